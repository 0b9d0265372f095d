"""A server whose patches are not all in place does not come up, and says why in one line.

Each fault is put in by a `sitecustomize` that every process of the server runs before anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from textwrap import dedent

import pytest

from harness.server import Server
from retire import models
from tests.conftest import all_failed

FLAGS = ("--enforce-eager", "--max-model-len", "512", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20))
OURS = re.compile(r"^(?:\(.*?\) )?retire: (.*)$", re.MULTILINE)

ENDPOINT_BREAKS = """
    import retire.plugin

    def endpoint():
        raise RuntimeError("broken on purpose")

    retire.plugin.endpoint = endpoint
    """
SOMEBODY_OUTSIDE = """
    import retire.plugin

    ours = retire.plugin.endpoint

    def endpoint():
        plugin = ours()
        attach = plugin.attach_router

        def attach_router(app):
            attach(app)
            inner = app.build_middleware_stack

            def build():
                gated = inner()

                async def outside(scope, receive, send):
                    await gated(scope, receive, send)

                return outside

            app.build_middleware_stack = build

        plugin.attach_router = attach_router
        return plugin

    retire.plugin.endpoint = endpoint
    """
UNNAMED_IN_CHILDREN = """
    import os, sys

    if any("spawn_main" in argument for argument in sys.orig_argv):
        os.environ["VLLM_PLUGINS"] = ""
    """


FAULTS = {
    "endpoint not attached": (ENDPOINT_BREAKS, "gate did not load"),
    "gate not outermost": (SOMEBODY_OUTSIDE, "outside RETIRE's gate"),
    "children unpatched": (UNNAMED_IN_CHILDREN, "engine process is not patched"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Server]]:
    """A server for every fault."""
    servers = {}
    for name, (fault, _) in FAULTS.items():
        folder = tmp_path_factory.mktemp("faulty")
        (folder / "sitecustomize.py").write_text(dedent(fault))
        servers[name] = Server(
            models.resolve("tiny-llama"),
            FLAGS,
            env={"PYTHONPATH": str(folder)},
            state_dir=folder / "state",
            preforked="children" not in name,
        )
    yield from all_failed(servers)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_piece_missing_does_not_come_up(faulty: Mapping[str, Server], fault: str) -> None:
    server = faulty[fault]
    assert server.wait(10) != 0
    said = OURS.findall(server.log())
    assert len(said) == 1, server.log_tail(60)
    assert FAULTS[fault][1] in said[0]
