"""Names as they are spelled in JSON, and text that anybody may have written, for a reader."""

from __future__ import annotations

import re

_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def words(name: str) -> str:
    """Without underscores."""
    return name.replace("_", " ").strip() or name


def seen(text: str) -> str:
    """With a mark for each character that cannot be written, or that changes how others are read."""
    return _UNSEEN.sub("\ufffd", text)
