"""`python -m harness.preforked FLAGS`: vLLM's API server, whose processes import its code once instead of three times.

vLLM starts its engine process by `spawn`, and that one its worker: one after the other each imports the same modules,
which is most of a start.  Here a process sets a copy of itself aside as soon as the modules are there and before
anything has run in it; a spawn then takes the copy instead of a new interpreter, and the copy's own copy serves the
next.  A copy gets what a new interpreter would get, the environment and the file descriptors, and loads its plugins
itself.  For tests, which start servers by the dozen, beside one that starts as users start it: copies share the seed of
string hashes and have their modules before their plugins.  Not for compiled graphs, whose compiler reads its settings
when it is imported.

Owns: the hand-over to a copy.  Source of what is replaced: `multiprocessing.popen_spawn_posix`.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
MODULES = (ENTRY, "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker")
GENERATIONS = 2  # engine, worker
HIGH = 512  # descriptors from here on are in nobody's way
LONGEST, MOST = 1 << 20, 253  # bytes and descriptors of one message


def set_aside(generations: int) -> None:
    """Fork a copy that takes the place of the next process to be spawned, and so on, so many deep."""
    if not generations:
        return
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        set_aside(generations - 1)
        _become_what_is_spawned(_high(theirs))
    theirs.close()
    channel, spawn_anew = _high(ours), util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in args:
            return spawn_anew(path, args, passfds)
        util.spawnv_passfds = spawn_anew
        fds = sorted(set(passfds))
        told = {"program": args[args.index("-c") + 1], "environ": dict(os.environ), "fds": fds}
        socket.send_fds(channel, [json.dumps(told).encode()], fds)
        channel.close()
        return pid

    util.spawnv_passfds = spawn


def _high(channel: socket.socket) -> socket.socket:
    """The same one under a number that no other process has in use for something that it may hand over."""
    return socket.socket(fileno=_moved(channel.detach()))


def _become_what_is_spawned(channel: socket.socket) -> None:
    """Wait in a copy for its turn; never returns."""
    said, received, _, _ = socket.recv_fds(channel, LONGEST, MOST)
    if not said:
        os._exit(0)  # whoever set it aside needed nobody
    channel.close()
    told = json.loads(said)
    for fd, number in zip([_moved(fd) for fd in received], told["fds"], strict=True):
        os.dup2(fd, number)  # inheritable, as those of a new interpreter are
        os.close(fd)
    os.environ.clear()
    os.environ.update(told["environ"])
    _bind_threads()
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(told["program"], {"__name__": "spawned"})  # noqa: S102 - what `python -c` would run; ends by SystemExit
    raise AssertionError("unreachable")


def _moved(fd: int) -> int:
    """The same descriptor under a high number."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(fd)
    return high


def _bind_threads() -> None:
    """OpenMP reads these two when it is loaded, which it is already."""
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if cores := os.environ.get("GOMP_CPU_AFFINITY"):
        os.sched_setaffinity(0, {int(core) for core in cores.split()})


def main() -> None:
    """Import, set copies aside, serve."""
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("setproctitle").getproctitle()  # it finds its place by an environment as it was given
    set_aside(GENERATIONS)
    importlib.import_module(ENTRY).main()


if __name__ == "__main__":
    main()
