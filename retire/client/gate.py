"""The client's own gate.

Owns: what this process knows of one scope's epochs: one lock, one number below which nothing is handed out.
Must not know: HTTP, who reads.
Strategy: the number is compared when a frame is handed out, so that one which waited in a socket, or in a buffer of the
reader, meets it as well (invariant 1's last remark).  While the server is being asked to revoke, frames wait for what
it says.  Who gets no answer cannot know, and counts the epoch as revoked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from retire.core.errors import RetireError


class ClientGate:
    """`epoch` is the newest epoch this process has heard of, 0 before the first answer."""

    def __init__(self) -> None:
        self._settled = threading.Condition()
        self._asking = 0
        self._revoked = 0  # this epoch and all before it
        self.epoch = 0

    @contextmanager
    def asking(self) -> Iterator[int]:
        """The server is asked to revoke the epoch that this gives.

        Any RetireError is an answer that has been taken in; any other exception means that there was none.
        """
        with self._settled:
            self._asking += 1
            epoch = self.epoch
        try:
            yield epoch
        except RetireError:
            raise
        except BaseException:
            self.revoked(epoch)
            raise
        finally:
            with self._settled:
                self._asking -= 1
                self._settled.notify_all()

    def begun(self, epoch: int) -> None:
        """The server has named this epoch as current."""
        with self._settled:
            self.epoch = max(self.epoch, epoch)
        self.revoked(epoch - 1)

    def revoked(self, epoch: int) -> None:
        """The epoch and all before it are over, for all that is known."""
        with self._settled:
            self._revoked = max(self._revoked, epoch)
            self._settled.notify_all()

    def passes(self, epoch: int) -> bool:
        """Whether a frame of this epoch may be handed out now; waits while that is being decided."""
        with self._settled:
            self._settled.wait_for(lambda: not self._asking or epoch <= self._revoked)
            return epoch > self._revoked
