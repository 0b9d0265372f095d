"""An independent reader of journals: shares the schema of a record with the server, and nothing else.

`reading`: files to records.  `rules`: what every record must agree with.
"""

from .reading import Journal, read
from .rules import Finding, Report, examine, told

__all__ = ["Finding", "Journal", "Report", "examine", "read", "told"]
