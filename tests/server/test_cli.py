"""The same from a shell, against a running server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def retire(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "retire.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.engine
def test_status_shows_scopes_and_what_the_engine_holds(server):
    done = retire("status", "--url", server.url)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert "pinned_blocks" in json.dumps(shown)
    assert "scopes" in json.dumps(shown)


@pytest.mark.engine
def test_supersede_tells_the_new_epoch_and_a_stale_one_is_refused(server, scope):
    done = retire("supersede", scope, "1", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new_epoch"] == 2
    again = retire("supersede", scope, "1", "--url", server.url)
    assert again.returncode == 4
    assert json.loads(again.stdout)["error"]["current_epoch"] == 2
