"""Starts and stops a real server for demos, tests and benches.

Owns: a free port, a state directory, the log, readiness, the end by SIGTERM of exactly the processes it started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from harness.client import http
from retire import checker
from retire.settings import AUDIT_ENV, JOURNAL_ENV

START_TIMEOUT_S = 300.0


class ServerFailed(RuntimeError):
    """The server ended before it was ready; the message holds the last lines of its log."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A vLLM server in its own process group.  Use as a context manager.

    `flags`: vLLM's own.  `patched`: whether `VLLM_PLUGINS` names retire; an unpatched one is plain vLLM.
    `preforked`: start in a third of the time, see `harness.preforked`; nothing that is measured starts so.
    `journaled`: it keeps a journal with every frame and row, which `examined` reads.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str] = (),
        *,
        patched: bool = True,
        preforked: bool = False,
        journaled: bool = False,
        env: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._scratch = tempfile.TemporaryDirectory(prefix="retire-")
        self.state_dir = state_dir or Path(self._scratch.name) / "state"
        self.log_path = Path(self._scratch.name) / "server.log"
        self._command = [
            sys.executable,
            "-m",
            "harness.preforked" if preforked else "vllm.entrypoints.launchers.api_server.entry",
            *("--model", model, "--host", "127.0.0.1", "--port", str(self.port)),
            *flags,
        ]
        self._env = {
            **os.environ,
            "VLLM_PLUGINS": "retire" if patched else "",
            "RETIRE_STATE_DIR": str(self.state_dir),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **(env or {}),
        }
        self.journal_dir = Path(self._scratch.name) / "journal" if journaled and patched else None
        if self.journal_dir is not None:
            self._env |= {JOURNAL_ENV: str(self.journal_dir), AUDIT_ENV: "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The API process."""
        assert self._process is not None
        return self._process.pid

    def children(self) -> list[int]:
        """Engine and worker processes, parents first."""
        found, queue = [], [self.pid]
        while queue:
            parent = queue.pop(0)
            tasks = Path(f"/proc/{parent}/task")
            kids = [int(k) for t in tasks.glob("*/children") for k in t.read_text().split()] if tasks.exists() else []
            found += kids
            queue += kids
        return found

    def start(self) -> None:
        """Start and wait until it answers.  Raises ServerFailed."""
        # A group of its own, to be ended as a whole, but the caller's session: where the kernel groups tasks by session
        # (`sched_autogroup_enabled`), one that keeps every core busy held up the clients of another for seconds.
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(self.log_tail())
            try:
                if http.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        self.stop()
        raise ServerFailed(f"not ready after {START_TIMEOUT_S:g} s\n{self.log_tail()}")

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Start without waiting for readiness is not offered; this waits for the process to end by itself."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def log_tail(self, lines: int = 25) -> str:
        """The end of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def log(self) -> str:
        """The whole log."""
        return self.log_path.read_text(errors="replace")

    def freeze(self) -> None:
        """Let none of its processes run until `thaw`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM to the process; SIGKILL to its group when it does not end."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self.thaw()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def examined(self) -> checker.Report | None:
        """What the checker says of its journal, of all its lives so far; None where it kept none."""
        if self.journal_dir is None or not self.journal_dir.exists():
            return None
        return checker.examine(*checker.read([self.journal_dir]))

    def close(self) -> None:
        """Stop and remove the scratch directory."""
        self.stop()
        self._scratch.cleanup()


def start_side_by_side(servers: Sequence[Server]) -> None:
    """Start all of them; most of a start is one core's work.

    Raises:
        ServerFailed: of the first that failed, when every one has come up or ended.
    """
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        started = [pool.submit(server.start) for server in servers]
    for one in started:
        one.result()
