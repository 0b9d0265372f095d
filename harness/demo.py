"""`retire demo`: the coding-agent story on a real server, with the figures it claims.

An agent reads a long repository context; the user changes the plan while the server is still prefilling it; the
runtime supersedes.  A little later, while the answer streams, the user changes the plan once more.  The native boundary
(what a plain abort waits for) and the clean run (what the successor must equal) are measured on the same server in the
same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.client import TIMEOUT_S, Reply, Streaming, http
from harness.moments import Moments
from harness.server import Server
from harness.workload import prefill_s, record_of
from retire import models

MODEL = "smollm2"
QUANTUM = 2048
CONTEXT_TOKENS = 6400
ANSWER_TOKENS = 48
INTERRUPTED, INTO_QUANTUM = 3, 0.15  # in which quantum the plan changes, and at what share of it
FLAGS = (
    "--enforce-eager",
    *("--served-model-name", MODEL),
    *("--max-model-len", "8192"),
    *("--max-num-batched-tokens", str(QUANTUM)),
    *("--kv-cache-memory-bytes", str(1 << 30)),
)
PLAN = "Rename the public functions of this module to snake case. List the first function you would rename."
REVISED = "Keep the public API as it is and only change the implementation. Name the first function you would touch."
REVISED_AGAIN = "Stop. Only answer: what does this module do?"


class Story:
    """One server, one conversation."""

    def __init__(self, url: str, say: Any) -> None:
        self.url = url
        self._say = say
        self._context = self._trim(Path(argparse.__file__).read_text(encoding="utf-8"))

    def _trim(self, source: str) -> str:
        low, high = 0, len(source)
        while high - low > 64:  # as much of the file as fills the context
            middle = (low + high) // 2
            low, high = (middle, high) if self._count(source[:middle]) <= CONTEXT_TOKENS else (low, middle)
        return source[:low]

    def _count(self, text: str) -> int:
        answer = http.post(f"{self.url}/tokenize", json={"model": MODEL, "prompt": text}, timeout=TIMEOUT_S)
        count: int = answer.json()["count"]
        return count

    def body(self, plan: str, **more: Any) -> dict[str, Any]:
        """A chat request over the repository context."""
        system = f"You are a coding agent. The repository contains this file:\n\n{self._context}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": plan}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": True}
        return {**body, **more}

    def tokens(self, plan: str) -> list[int]:
        """The request's prompt as token ids."""
        ask = {"model": MODEL, "messages": self.body(plan)["messages"], "add_generation_prompt": True}
        ids: list[int] = http.post(f"{self.url}/tokenize", json=ask, timeout=TIMEOUT_S).json()["tokens"]
        return ids

    def prefill(self, ids: list[int], salt: str) -> None:
        """Leave the blocks of these tokens in the cache of that salt."""
        prefill_s(self.url, MODEL, ids, salt)


def play(url: str, say: Any) -> dict[str, Any]:
    """Play the story; returns the figures."""
    story = Story(url, say)
    ids = story.tokens(PLAN)
    say(f"repository context and plan: {len(ids)} tokens, prefill quantum {QUANTUM}")
    moments = Moments(url)
    moments.calibrate(lambda: Streaming(url, story.body(PLAN, cache_salt=f"warm-{uuid.uuid4()}")), INTERRUPTED)

    say("\nNative: the client aborts early in the third quantum; when is the engine free again?")
    native = Streaming(url, story.body(PLAN, cache_salt=f"native-{uuid.uuid4()}"))
    moment = moments.wait(native, INTERRUPTED, INTO_QUANTUM)
    native.leave()
    boundary_ms = (moment.boundary_s() - moments.idle_s) * 1000
    say(f"  at the step's end, {boundary_ms:.0f} ms after the abort")

    say("\nRETIRE: at the same moment the user changes the plan, and the runtime supersedes")
    scope = f"plan-{uuid.uuid4().hex[:8]}"
    old = Streaming(url, story.body(PLAN), {"X-Retire-Scope": scope})
    moments.wait(old, INTERRUPTED, INTO_QUANTUM)
    # The runtime vouches for two quanta only: without that the third, which its new plan shares too, would be finished.
    contract = json.dumps({"keep_prefix": 2 * QUANTUM})
    superseding = {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1", "X-Retire-Contract": contract}
    new = Streaming(url, story.body(REVISED), superseding)
    new.wait_for_text(frames=8)
    newest = Streaming(url, story.body(REVISED_AGAIN), {"X-Retire-Scope": scope, "X-Retire-Supersedes": "2"})
    replies = [old.wait(), new.wait(), newest.wait()]
    first, second = (record_of(url, reply.headers["location"]) for reply in replies[1:])
    stale = sum(
        1
        for reply, successor in itertools.pairwise(replies)
        for frame in reply.frames
        if frame.text and frame.at > successor.headers_at
    )
    _timeline(say, first, second, replies)

    inherited = first["inherited_tokens"]
    same_blocks = bool(first["certificate"]) and first["adopted_blocks"] == first["certificate"]["blocks"]
    say(f"\nClean run that reuses the same {inherited} tokens, in a cache of its own")
    salt = f"clean-{uuid.uuid4()}"
    if inherited:
        story.prefill(story.tokens(REVISED)[:inherited], salt)
    clean = Streaming(url, story.body(REVISED, cache_salt=salt)).wait()
    seen, expected = replies[1].logprobs, clean.logprobs
    matches = bool(seen) and [t for t, _ in seen] == [t for t, _ in expected[: len(seen)]]
    bitwise = matches and seen == expected[: len(seen)]
    say(
        f"  of {len(seen)} tokens published before the second revision: equal {matches}, logprobs bit for bit {bitwise}"
    )
    return {
        "stale_frames": stale,
        "fence_ms": first["stages"]["fence"],
        "native_boundary_ms": round(boundary_ms, 3),
        "inherited_tokens": inherited,
        "identical_block_ids": same_blocks,
        "successor_matches_clean": matches,
        "logprobs_bitwise_equal": bitwise,
        "stages": first["stages"],
        "receipts": first["receipts"],
        "second": {
            "stages": second["stages"],
            "inherited_tokens": second["inherited_tokens"],
            "published": second["published"],
        },
    }


def _timeline(say: Any, first: dict[str, Any], second: dict[str, Any], replies: list[Reply]) -> None:
    for name, record in (("epoch 1 → 2, during prefill", first), ("epoch 2 → 3, while streaming", second)):
        say(f"  {name}")
        for stage, at_ms in record["stages"].items():
            say(f"    {stage:<12}{at_ms:>10.1f} ms")
        for receipt in record["receipts"]:
            how = "stopped at a safe point" if receipt["stopped"] else "ran to the end of its step"
            say(f"    receipt: {how}, {receipt['frontier_tokens']} tokens complete")
        say(f"    inherited {record['inherited_tokens']} tokens" + _refused(record))
    say(f"  epoch 2 said: {replies[1].text!r}")
    say(f"  epoch 3 said: {replies[2].text!r}")


def _refused(record: dict[str, Any]) -> str:
    return f" (certificate refused: {record['refusal']})" if record["refusal"] else ""


def verdict(result: dict[str, Any], say: Any) -> bool:
    """Print what was claimed beside what was measured."""
    ratio = result["native_boundary_ms"] / result["fence_ms"]
    result["fence_ratio"] = round(ratio, 2)
    claims = [
        (f"stale frames           {result['stale_frames']}", result["stale_frames"] == 0),
        (f"fence                  {result['fence_ms']:.1f} ms", True),
        (f"native boundary        {result['native_boundary_ms']:.1f} ms, {ratio:.1f}× the fence", ratio >= 20),
        (
            f"inherited tokens       {result['inherited_tokens']}, same block ids: {result['identical_block_ids']}",
            result["inherited_tokens"] > 0 and result["identical_block_ids"],
        ),
        (f"equal to its clean run {result['successor_matches_clean']}", result["successor_matches_clean"]),
    ]
    say("")
    for text, holds in claims:
        say(f"  {'ok  ' if holds else 'NOT '} {text}")
    return all(holds for _, holds in claims)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when every claim holds."""
    parser = argparse.ArgumentParser(prog="retire demo", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--url", help="play on a running server that serves smollm2 instead of starting one")
    options = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, flush=True)

    if options.url:
        result = play(options.url.rstrip("/"), say)
    else:
        model = str(models.get(MODEL))
        say("starting the server (about half a minute) ...")
        server = Server(model, FLAGS)
        try:
            server.start()
            say(f"ready at {server.url}\n")
            result = play(server.url, say)
        finally:
            server.close()
    holds = verdict(result, say)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
