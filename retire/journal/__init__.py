"""What happened, as every process of a server saw it: `note` writes one record.

`schema`: what a record holds.  `recorder`: where records go.  The checker (`retire.checker`) shares the schema alone.
"""

from .recorder import audits, newest, note
from .schema import NOWHERE, U64, Kind, under

__all__ = ["NOWHERE", "U64", "Kind", "audits", "newest", "note", "under"]
