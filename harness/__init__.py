"""Everything that drives a server from outside: the demo now, paired experiments beside it.  Imported by nobody."""
