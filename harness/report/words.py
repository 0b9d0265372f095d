"""Names as they are spelled in JSON, for a reader."""

from __future__ import annotations


def words(name: str) -> str:
    """Without underscores."""
    return name.replace("_", " ").strip() or name
