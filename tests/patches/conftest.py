"""A process that has vLLM's modules loaded forks one child per scenario: no scenario sees another's patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import dedent

import pytest

NURSERY = r"""
import importlib, json, os, sys, tempfile, traceback
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print("ready", file=answers, flush=True)
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 0
            try:
                exec(compile(json.loads(line), "<scenario>", "exec"), {"__name__": "scenario"})
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([status, output.read()]), file=answers, flush=True)
"""

PRELUDE = """
import importlib, inspect, os, sys
os.environ.pop("VLLM_PLUGINS", None)
from retire import seal
from retire.core.errors import SeamError
import vllm_patches
from vllm_patches import _seam

SEAMS = vllm_patches.seams()

def now(target):
    owner, name = _seam._owner(target)
    return inspect.getattr_static(owner, name, None)

def marked():
    return [seam.target for seam in SEAMS if hasattr(now(seam.target), _seam.MARK)]

BEFORE = {seam.target: now(seam.target) for seam in SEAMS}

def put(target, value):
    owner, name = _seam._owner(target)
    setattr(owner, name, value)

def refused():
    try:
        seal.install()
    except SeamError as error:
        assert seal.current() is None
        return str(error)
    raise AssertionError("installed, and should have refused")

def same_as_before(*, but=()):
    return [t for t, was in BEFORE.items() if t not in but and now(t) is not was] == []
"""


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str


@pytest.fixture(scope="session")
def nursery() -> Iterator[subprocess.Popen[str]]:
    import vllm_patches

    modules = sorted({seam.target.partition(":")[0] for seam in vllm_patches.seams()})
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY, json.dumps(modules)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)


@pytest.fixture
def forked(nursery: subprocess.Popen[str]) -> Callable[[str], Outcome]:
    """Run a scenario in a child that has vLLM loaded; `PRELUDE` stands before it.  Fails when the scenario does."""

    def run(scenario: str, *, prelude: str = PRELUDE) -> Outcome:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps(prelude + dedent(scenario)) + "\n")
        nursery.stdin.flush()
        outcome = Outcome(*json.loads(nursery.stdout.readline()))
        assert outcome.status == 0, outcome.output
        return outcome

    return run
