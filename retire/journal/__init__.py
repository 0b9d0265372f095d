"""What happened, as every process of a server saw it: `note` writes one record.

`schema`: what a record holds.  `recorder`: where records go.  The checker (`retire.checker`) shares the schema alone.
"""

from .recorder import audits, note
from .schema import NOWHERE, Kind

__all__ = ["NOWHERE", "Kind", "audits", "note"]
