"""Every order of events in small worlds around the real core: messages late, lost and repeated, processes that die.

`world`: what a state is and which moves lead on.  `search`: all states, shortest counterexamples, liveness.
`worlds`: the named ones.  `defects`: faults that are planted to see them found.  `relation`: whether a recorded run
of one scope is a path of the core.
"""
