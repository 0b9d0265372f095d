"""JSON that is too large to hold, cut down to what is wanted.

Owns: what is left out.  Must not know: files, agents.
Strategy: in logs it is strings that are large.  `Shortener` follows strings through chunks of bytes and cuts long ones
to their beginning; what comes out of it never ends inside a string.  `Document` cuts messages out of such text by
counting brackets.  Neither judges whether JSON is well formed: whoever parses the pieces finds out.  Both hold a
bounded number of bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

_PLAIN: Final = re.compile(rb'(?:[^"]++|"[^"]{0,512}+")*+')
_INSIDE: Final = re.compile(rb'(?:[^"\[\]{}]++|"[^"]*+")*+')
_SHORT_BYTES: Final = 514
_KEPT: Final = 64
_CUT: Final = b"\\ufdd0"  # a code point that no text has
_MOST: Final = 1 << 18  # bytes of one message without its arrays and long strings


def is_whole(text: str) -> bool:
    """Whether a string of a shortened line is as it was."""
    return not text.endswith("\ufdd0")


class Shortener:
    """Cuts strings of more than 512 bytes to their beginning, at most 64 bytes."""

    def __init__(self) -> None:
        self._inside = False  # of a string that has been cut
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes, shortened.  A string that is not complete is held back."""
        text, self._held = self._held + chunk, b""
        if (len(text) - len(text.rstrip(b"\\"))) % 2:  # what the last byte escapes comes with the next chunk
            text, self._held = text[:-1], b"\\"
        quotes = _quotes(text)
        out = bytearray()
        at = 0
        while at < len(text):
            if self._inside:
                end = quotes.find(b'"', at)
                self._inside = end < 0
                at = len(text) if self._inside else end + 1
                continue
            end = _end(_PLAIN, quotes, at)
            out += text[at:end]
            if end == len(text):
                break
            at = end  # of a long string, or of one that is not complete
            if quotes.find(b'"', at + 1) < 0 and len(text) - at <= _SHORT_BYTES:
                self._held = text[at:] + self._held
                break
            out += b'"' + text[at + 1 : at + 1 + _KEPT].split(b"\\")[0] + _CUT + b'"'
            self._inside = True
            at += 1
        return bytes(out)


class Document:
    """Cuts the members of the outermost object's list "messages" out of JSON, without their own lists.

    Where the list begins, an object comes first that has the "sessionId" that stood before it, if one did.
    """

    def __init__(self) -> None:
        self.values = 0  # outermost ones that are complete
        self.lost = 0  # messages that were too large even so
        self._shortener = Shortener()
        self._depth = 0
        self._head = bytearray()  # what is outermost since the last list or object in there
        self._session: dict[str, Any] = {}
        self._listing = False
        self._message: bytearray | None = None
        self._mute: int | None = None  # the depth of a list that is left out

    @property
    def complete(self) -> bool:
        """Whether nothing is open."""
        return self._depth == 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The objects that the next bytes complete."""
        text = self._shortener.feed(chunk)
        quotes = _quotes(text)
        at = 0
        while at < len(text):
            end = _end(_INSIDE, quotes, at)
            self._plain(text[at:end])
            at = end + 1
            match text[end : end + 1]:
                case b"{" | b"[" as bracket:
                    yield from self._open(bracket)
                case b"}" | b"]":
                    yield from self._close()

    def _plain(self, text: bytes) -> None:
        if self._message is not None and self._mute is None:
            self._message += text
            if len(self._message) > _MOST:
                self._message.clear()
                self._mute = 3
        elif self._depth == 1:
            self._head += text
            if len(self._head) > _MOST:
                self._head.clear()

    def _open(self, bracket: bytes) -> Iterator[bytes]:
        self._depth += 1
        if self._depth == 2:
            self._listing = self._name_here() == "messages" and bracket == b"["
            if self._listing:
                yield json.dumps(self._session).encode()
        elif self._depth == 3 and self._listing and bracket == b"{":
            self._message, self._mute = bytearray(bracket), None
        elif self._message is not None and self._mute is None:
            self._message += bracket
            self._mute = self._depth if bracket == b"[" else None

    def _name_here(self) -> str | None:
        """The name of what begins in the outermost object.  What stands before it there is read and forgotten."""
        try:
            found = json.loads(str(b"{" + self._head.strip(b", \t\r\n") + b"null}", "utf-8", "replace"))
        except ValueError:
            found = {}
        self._head.clear()
        if "sessionId" in found:
            self._session = {"sessionId": found["sessionId"]}
        return next(reversed(found), None)

    def _close(self) -> Iterator[bytes]:
        if self._message is not None:
            if self._mute is None:
                self._message += b"}"
            elif self._mute == self._depth:
                self._message += b"]"
                self._mute = None
            if self._depth == 3:
                if len(self._message) > 1:
                    yield bytes(self._message)
                else:
                    self.lost += 1
                self._message = None
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self.values += 1
            self._head.clear()
            self._session = {}


def is_document(head: bytes) -> bool:
    """Whether a file that begins so is one object with a list of messages, rather than an object a line."""
    document = Document()
    return any(document.values == 0 for _ in document.feed(head))


def _quotes(text: bytes) -> bytes:
    """The same with escapes masked, byte for byte: each quote in it begins or ends a string."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "every pattern here matches the empty string"
    return found.end()
