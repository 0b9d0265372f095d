"""Speculation: one version fences drafting and verification, and what is left of them is true in every layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.client import Streaming, http
from harness.server import Server
from retire import models
from retire.authority.table import AuthorityTable
from retire.core.types import RequestId
from retire.engine import forward
from retire.engine.plan import Phase, PlannedRows, StepPlan
from retire.engine.worker import StepFenced, StepGuard
from tests.conftest import SHORT_PINS, TINY_FLAGS, all_served, leak_checked
from tests.support import (
    Handover,
    clean_run,
    complete,
    completion,
    fresh_salt,
    prefill_s,
    record_of,
    supersede,
    supersede_inside_a_step,
    text_ids,
)

GUESSES = 3
PREFIX, SUFFIX = 7000, 60

# -- the drafter's passes, without an engine ----------------------------------------------------------------------

ROWS, KEY = 24, 5


class Drafting(nn.Module):
    """A draft model of one layer that asks as attention does.  `meanwhile`: what happens before each of its passes."""

    def __init__(self, guard: StepGuard) -> None:
        super().__init__()
        self._guard = guard
        self.meanwhile: dict[int, Any] = {}
        self.passes: list[int] = []

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.meanwhile.get(len(self.passes), lambda: None)()
        if self._guard.armed:
            self._guard.attention_point("draft_model.layers.0")
        self.passes.append(len(input_ids))
        return torch.ones(len(input_ids), 4)


class Drafted:
    """A step of one request, its target's pass over, and a runner whose drafter is about to propose."""

    def __init__(self, table: AuthorityTable) -> None:
        self.table = table
        self.slot = table.insert(0, KEY, 1)
        self.ticket = table.issue(self.slot, table.raw(self.slot))
        self.guard = StepGuard(table)
        self.begin(armed=True)
        self.model = Drafting(self.guard)
        self.runner = SimpleNamespace(
            drafter=SimpleNamespace(
                model=self.model, hidden_size=4, net_num_new_slots_per_request=1, draft_attn_groups=[]
            ),
            input_batch=SimpleNamespace(num_reqs=1, req_ids=["a"]),
            query_start_loc=SimpleNamespace(cpu=torch.tensor([0, ROWS], dtype=torch.int32)),
            attn_groups=[],
            num_spec_tokens=GUESSES,
            device=torch.device("cpu"),
            use_aux_hidden_state_outputs=False,
            vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(mode=0)),
        )

    def begin(self, *, armed: bool) -> None:
        rows = PlannedRows(RequestId("a"), self.ticket, 0, ROWS)
        self.guard.begin(StepPlan(1, (rows,), 0, armed, unit_tokens=8), drafts=True)

    def supersede(self) -> None:
        self.table.advance(self.slot, KEY, self.table.raw(self.slot), 1)
        self.table.lower(self.ticket, 0)

    def propose(self) -> torch.Tensor:
        def propose() -> torch.Tensor:
            for rows in (ROWS + 1, *[1] * (GUESSES - 1)):
                self.model(input_ids=torch.zeros(rows), inputs_embeds=None)
            return torch.full((1, GUESSES), 7)

        found: torch.Tensor = forward.drafted(self.runner, propose)
        return found


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafted]:
    table = AuthorityTable.create(tmp_path / "table", tenants=1, scopes_per_tenant=16, rows=32)
    made = Drafted(table)
    monkeypatch.setattr(forward, "guard", lambda: made.guard)
    yield made
    table.close()


@pytest.mark.parametrize(("before", "passes", "end"), [(0, [], 0), (1, [ROWS + 1], ROWS), (2, [ROWS + 1, 1], ROWS)])
def test_a_drafter_stops_at_its_next_pass_or_inside_the_long_one(
    step: Drafted, before: int, passes: list[int], end: int
) -> None:
    if before:
        original = step.guard.arm_guesses
        calls = iter(range(1, GUESSES))

        def arm_guesses() -> None:
            if next(calls) == before:
                step.supersede()
            original()

        step.guard.arm_guesses = arm_guesses  # type: ignore[method-assign]
    else:
        step.model.meanwhile[0] = step.supersede
    assert step.propose().tolist() == [[0] * GUESSES]
    assert step.model.passes == passes
    receipt = step.guard.end()
    assert receipt is not None
    assert (receipt.stopped, receipt.ends) == (True, (end,))
    assert receipt.phase_of(RequestId("a")) is Phase.DRAFT
    assert "forward" not in vars(step.model)


def test_an_error_at_the_beginning_of_a_guess_leaves_no_safe_point(step: Drafted, monkeypatch) -> None:
    def fail() -> None:
        assert step.guard.armed
        raise ValueError("broken")

    monkeypatch.setattr(step.guard, "safe_point", fail)
    with pytest.raises(ValueError, match="broken"):
        step.propose()
    assert step.model.passes == [ROWS + 1]
    assert not step.guard.armed
    assert "forward" not in vars(step.model)


@pytest.mark.parametrize("armed", [True, False])
def test_a_drafter_that_nobody_stops_proposes(step: Drafted, armed: bool) -> None:
    step.begin(armed=armed)
    assert step.propose().tolist() == [[7] * GUESSES]
    assert step.model.passes == [ROWS + 1, *[1] * (GUESSES - 1)]
    receipt = step.guard.end()
    assert receipt is not None
    assert (receipt.stopped, receipt.ends, receipt.cuts) == (False, (ROWS,), ())


def test_a_step_that_stopped_in_the_targets_pass_drafts_nothing(step: Drafted) -> None:
    step.guard.arm(4)
    step.supersede()
    with pytest.raises(StepFenced):
        step.guard.attention_point("layers.0")
    assert step.propose().tolist() == [[0] * GUESSES]
    assert step.model.passes == []


def test_a_drafter_without_a_model_is_left_alone(step: Drafted) -> None:
    del step.runner.drafter.model
    assert step.propose().tolist() == [[7] * GUESSES]


# -- on the real engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama, somewhat disturbed: it guesses right sometimes."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("drafter") / "model"
    shutil.copytree(models.resolve("tiny-llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] *= 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def speculating_servers(drafter_folder: Path) -> Iterator[dict[str, Server]]:
    """One with each kind of drafter."""
    ways: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"method": "draft_model", "model": str(drafter_folder)},
    }
    yield from all_served(
        {
            name: (
                "tiny-llama",
                {"env": SHORT_PINS},
                (*TINY_FLAGS, "--speculative-config", json.dumps({**way, "num_speculative_tokens": GUESSES})),
            )
            for name, way in ways.items()
        }
    )


@pytest.fixture(params=["ngram", "draft_model"])
def speculating(request: pytest.FixtureRequest, speculating_servers: dict[str, Server]) -> Iterator[Server]:
    yield from leak_checked(speculating_servers[request.param])


@pytest.fixture
def drafting(speculating_servers: dict[str, Server]) -> Iterator[Server]:
    yield from leak_checked(speculating_servers["draft_model"])


def pair(url: str, attempt: int, shared: int) -> tuple[dict[str, Any], dict[str, Any]]:
    ids, salt = text_ids(url, PREFIX, seed=1000 + attempt), fresh_salt()
    return (
        completion(ids + text_ids(url, 300, seed=5000 + attempt), cache_salt=salt),
        completion(ids[:shared] + text_ids(url, SUFFIX, seed=9000 + attempt), cache_salt=salt),
    )


def counted(url: str, name: str) -> float:
    lines = http.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total"))


def is_right(url: str, found: Handover, shared: int) -> None:
    """The successor aliases what both models have written, and says what a clean run says."""
    record, certificate = found.record, found.record["certificate"]
    assert record["outcome"] == "inherited"
    assert record["adopted_blocks"] == certificate["blocks"]
    (receipt,) = record["receipts"]
    assert 0 < certificate["tokens"] <= receipt["frontier_tokens"]
    _, new = pair(url, int(record["scope"].rsplit("-", 1)[1]), shared)
    assert found.new.text == clean_run(url, new["prompt"], certificate["tokens"])


@pytest.mark.engine
@pytest.mark.parametrize(("choice", "shared"), [("stop", 4100), ("trim", 5500)])
def test_a_successor_of_a_cut_prefill_is_right(speculating: Server, scope: str, choice: str, shared: int) -> None:
    url = speculating.url
    found = supersede_inside_a_step(url, scope, lambda attempt: pair(url, attempt, shared), choice)
    is_right(url, found, shared)
    if choice == "trim":
        assert found.record["certificate"]["tokens"] == shared // 32 * 32, "a draft model's rows were trimmed alike"


@pytest.mark.engine
@pytest.mark.parametrize("shared", [2100, 5500])
def test_a_prefill_is_cut_in_the_draft_models_pass(drafting: Server, scope: str, shared: int) -> None:
    url = drafting.url
    whole_s = min(prefill_s(url, pair(url, 200, shared)[0]["prompt"]) for _ in range(2))
    for attempt in range(201, 240):
        old, new = pair(url, attempt, shared)
        found = supersede(url, f"{scope}-{attempt}", old, new, after_s=whole_s * (0.3 + 0.618 * attempt % 0.6))
        cut = found.choice in ("stop", "trim") and found.record["receipts"][0]["phase"] == "draft"
        if cut and found.record["inherited_tokens"]:
            is_right(url, found, shared)
            return
    pytest.fail("the revision never fell into the draft model's pass")


@pytest.mark.engine
def test_a_successor_inherits_accepted_guesses_of_a_running_answer_and_nothing_else(
    speculating: Server, scope: str
) -> None:
    url = speculating.url
    before = [counted(url, name) for name in ("num_draft_tokens", "num_accepted_tokens")]
    few = text_ids(url, 6, seed=7)  # a random model repeats itself only where it has little choice
    steps: list[dict[str, Any]] = []  # that were under way when authority moved
    for attempt in range(8):
        ids, salt = text_ids(url, 600, seed=70 + attempt), fresh_salt()
        old = completion(ids, 1500, cache_salt=salt, return_token_ids=True, allowed_token_ids=few)
        (choice,) = complete(url, {**old, "max_tokens": 300, "cache_salt": fresh_salt()})["choices"]
        answer = choice["token_ids"]
        first = Streaming(url, old, {"X-Retire-Scope": f"{scope}-{attempt}"})
        first.wait_for_tokens(300)
        new = completion([*ids, *answer[:290], 9, 8, 7], cache_salt=salt)
        second = Streaming(url, new, {"X-Retire-Scope": f"{scope}-{attempt}", "X-Retire-Supersedes": "*"}).wait()
        assert not first.wait().error
        record = record_of(url, second.headers["location"])
        assert record["inherited_tokens"] > len(ids), "tokens of the answer, too"
        assert all(record["inherited_tokens"] <= step["frontier_tokens"] for step in record["receipts"])
        assert second.text == clean_run(url, new["prompt"], record["inherited_tokens"])
        steps += record["receipts"]
        if len(steps) >= 2:
            break
    assert steps, "authority moved between two steps again and again"
    drafted, accepted = (
        counted(url, name) - was for name, was in zip(("num_draft_tokens", "num_accepted_tokens"), before, strict=True)
    )
    assert accepted < drafted, "some guesses were wrong"
    assert accepted > 0, "and some were not"
