"""A server whose patches are not all in place does not come up, and says why in one line.

Each fault is put in by a `sitecustomize` that every process of the server runs before anything else.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from harness.server import Server, ServerFailed
from retire import models

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


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(ENDPOINT_BREAKS, "gate did not load", id="endpoint not attached"),
        pytest.param(SOMEBODY_OUTSIDE, "outside RETIRE's gate", id="gate not outermost"),
        pytest.param(UNNAMED_IN_CHILDREN, "engine process is not patched", id="engine process unpatched"),
    ],
)
def test_a_server_with_a_piece_missing_does_not_come_up(tmp_path: Path, fault: str, reason: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(dedent(fault))
    env = {"PYTHONPATH": str(tmp_path), "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    server = Server(models.resolve("tiny-llama"), FLAGS, env=env, state_dir=tmp_path / "state")
    try:
        with pytest.raises(ServerFailed):
            server.start()
        said = OURS.findall(server.log())
        assert len(said) == 1, server.log_tail(60)
        assert reason in said[0]
        assert server.wait(10) != 0
    finally:
        server.close()
