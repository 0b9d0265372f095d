"""The kernel's side of a scoped stream: how much it may hold behind the last gate.

Owns: the size of the socket's send buffer, and when a frame may be handed to it.  Must not know: frames, authority.
Strategy: a full buffer alone is no bound.  The kernel goes on appending to a segment that waits for the reader's
window, up to 64 KiB of it, however small the buffer.  So nothing is handed over unless Linux calls the socket writable,
which it does while at most two thirds of the buffer are in use.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket


def stated_bytes(backlog_bytes: int) -> int:
    """What a socket with this send buffer holds at most when a frame is handed over.

    The kernel is asked what it makes of the size: it doubles it, between limits of its own.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, backlog_bytes)
        return 2 * probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 3


class Outlet:
    """One connection.  `sock` is what asyncio tells of the transport's socket."""

    def __init__(self, sock: socket.socket, backlog_bytes: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, backlog_bytes)
        self._descriptor = sock.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)

    def open(self) -> bool:
        """Whether a frame may be handed over now."""
        return bool(self._poll.poll(0))

    async def wait(self) -> None:
        """Until it is open, or the connection has failed."""
        loop, opened = asyncio.get_running_loop(), asyncio.Event()
        watched = os.dup(self._descriptor)  # the loop lets nobody watch a transport's own
        loop.add_writer(watched, opened.set)
        try:
            await opened.wait()
        finally:
            loop.remove_writer(watched)
            os.close(watched)
