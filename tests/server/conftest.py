"""Whatever a test sends, the server's log shows no traceback."""

from __future__ import annotations

import pytest

# uvicorn tells the queued request of a lost connection, not the running one; its next write then raises, as in vLLM.
UPSTREAMS_OWN = {"test_a_client_that_leaves_in_the_middle_of_a_pipeline_leaves_nothing_behind"}
TROUBLE = ("Traceback (most recent call last)", "Exception in ASGI application", "was never retrieved")


@pytest.fixture(autouse=True)
def untroubled(request):
    """Read what a test that used the shared server has added to its log."""
    if "server" not in request.fixturenames or request.node.originalname in UPSTREAMS_OWN:
        yield
        return
    log = request.getfixturevalue("tiny_server").log_path
    start = log.stat().st_size
    yield
    with log.open("rb") as file:
        file.seek(start)
        said = file.read().decode(errors="replace")
    assert not any(trouble in said for trouble in TROUBLE), said[:6000]
