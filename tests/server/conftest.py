"""Whatever a test sends, the server's log shows no traceback."""

from __future__ import annotations

import pytest

# uvicorn tells the queued request of a lost connection, not the running one; its next write then raises, as in vLLM.
UPSTREAMS_OWN = {"test_a_client_that_leaves_in_the_middle_of_a_pipeline_leaves_nothing_behind"}
SHARED = {"server": "tiny_server", "tenants": "tenants_server"}  # what a test asks for, and which server that is
TROUBLE = ("Traceback (most recent call last)", "Exception in ASGI application", "was never retrieved")


@pytest.fixture(autouse=True)
def untroubled(request):
    """Read what a test that used the shared server has added to its log."""
    used = [SHARED[name] for name in request.fixturenames if name in SHARED]
    if not used or request.node.originalname in UPSTREAMS_OWN:
        yield
        return
    log = request.getfixturevalue(used[0]).log_path
    start = log.stat().st_size
    yield
    with log.open("rb") as file:
        file.seek(start)
        said = file.read().decode(errors="replace")
    assert not any(trouble in said for trouble in TROUBLE), said[:6000]
