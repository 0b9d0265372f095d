"""`retire replay`: a trace of transitions against any server.

Owns: flags, and what is printed and written.  Must not know: how anything works.
Not compared to anything here are answers; `retire bench burst` does that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.arrivals import Pace, Plan, Sizes, arrivals, counted, plan
from harness.bench import table
from harness.client import TIMEOUT_S, http
from harness.experiment import Cell, Result, columns, join
from harness.manifest import manifest
from harness.progress import note
from harness.replay import Arm, Replay, Replayed, Site, in_turn, on_time, prompts, summary
from harness.workload import bearer
from retire.core.errors import RetireError
from traces import rows

PAPER = "Figure 6 and Table 9"
TAIL_S = 10.0
"""How long goodput is counted after the last version has started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Replay; exit status 0 when every check passed.

    Raises:
        RetireError: a file cannot be read or holds something else, or the server serves no model.
        httpx.HTTPError: the server does not answer.
    """
    options = _options(argv)
    sizes = Sizes(
        prompt_tokens=options.prompt_tokens,
        overlap=options.overlap,
        scale=options.scale_tokens,
        most_tokens=options.most_tokens,
        answer_tokens=options.answer_tokens,
    )
    with _lines(options.trace) as lines:
        planned = plan(
            rows.read(lines),
            sizes,
            scopes=options.scopes,
            speed=options.speed,
            pace=Pace(options.pace),
            window_s=options.window,
        )
    window_s = options.goodput_window or planned.last_s + TAIL_S
    others = []
    if options.background is not None:
        with _lines(options.background) as lines:
            others = arrivals(
                lines, speed=options.background_speed, until_s=window_s, most_tokens=options.most_tokens // 2
            )
    note(f"{_told(counted(planned))}, other requests {len(others)}, window {window_s:g} s")
    if options.dry_run:
        for version in planned.versions:
            print(json.dumps(asdict(version)))
        return 0
    site, seal = _site(options, max([_longest(planned), *(one.prompt_tokens + one.answer_tokens for one in others)]))
    replay = Replay(
        site,
        planned,
        prompts(site, planned, options.seed),
        window_s=window_s,
        limit_s=options.limit,
        others=others,
    )
    found: dict[str, list[Replayed]] = {arm: [] for arm in options.arm}
    for trial in range(options.trials):
        for arm in in_turn(options.arm, trial):
            run = on_time(partial(replay.run, Arm(arm)))
            found[arm].append(run)
            note(f"  {trial + 1}/{options.trials} {arm}: {_line(run)}")
    result = _result(found, planned, window_s, options, seal)
    document = result.document(manifest("replay", result, quick=False))
    print(table(result, document["manifest"], PAPER))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if result.correct else 1


def _result(
    found: dict[str, list[Replayed]], planned: Plan, window_s: float, options: argparse.Namespace, seal: dict[str, str]
) -> Result:
    about = {
        "bench": "replay",
        "window_s": window_s,
        "scopes": len(planned.scopes),
        "bursts_s": list(planned.bursts_s),
        "speed": options.speed,
    }
    checks: dict[str, bool] = {}
    for runs in found.values():
        for run in runs:
            join(checks, run.checks())
    figures = {arm: [run.figures() for run in runs] for arm, runs in found.items()}
    told = summary(figures, Arm.NATIVE, Arm.RETIRE, planned)
    for arm, runs in found.items():
        for name in ("goodput_tokens_per_s", "obsolete_tokens", "late_tokens", "final_whole", "cleanup_ms"):
            told[f"{name}.{arm}"] = [one[name] for one in figures[arm]]
        told[f"outcomes.{arm}"] = runs[0].account.outcomes()
    versions = {
        arm: [
            {
                "trial": trial,
                "scope": fate.version.planned.scope,
                "version": fate.version.planned.number,
                "outcome": fate.outcome.value,
                "status": fate.version.reply.status,
                "current_frames": len(fate.current),
                "late_frames": len(fate.late),
                "obsolete_frames": len(fate.obsolete),
                "cleanup_ms": fate.cleanup_ms,
            }
            for trial, run in enumerate(runs)
            for fate in run.account.fates
        ]
        for arm, runs in found.items()
    }
    cells = [
        Cell(about, columns({arm: of[trial] for arm, of in figures.items()} for trial in range(options.trials))),
        Cell({"bench": "replay", "what": "versions"}, {arm: {"versions": of} for arm, of in versions.items()}),
    ]
    return Result(cells, told, checks, (), options.model or "unknown", seal)


def _line(run: Replayed) -> str:
    told = run.figures()
    return ", ".join(
        f"{name} {told[name]:.4g}" if isinstance(told[name], float) else f"{name} {told[name]}"
        for name in ("goodput_tokens_per_s", "obsolete_tokens", "final_versions", "cleanup_ms", "most_obsolete")
    )


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


def _longest(planned: Plan) -> int:
    """Tokens of the longest version, prompt and answer."""
    return max(version.prompt_tokens + version.answer_tokens for version in planned.versions)


def _site(options: argparse.Namespace, longest: int) -> tuple[Site, dict[str, str]]:
    """Where requests go, of which none has more than `longest` tokens, and what the server is made of.

    Raises:
        RetireError: the server cannot serve such requests, or an arm; or the native one would go over TLS.
        httpx.HTTPError: it does not answer.
    """
    if Arm.NATIVE in options.arm and urlsplit(options.url).scheme.lower() == "https":
        # Shutting down one side of a TLS connection ends the TLS layer, and what still comes could not be read.
        raise RetireError("over https nobody can hang up and read on: choose --arm retire or --arm abandon")
    headers = bearer(options.api_key)
    served = http.get(f"{options.url}/v1/models", headers=headers, timeout=TIMEOUT_S).raise_for_status().json()["data"]
    if not served:
        raise RetireError("the server serves no model")
    if options.model is None:
        options.model = served[0]["id"]
    length = next((one.get("max_model_len") for one in served if one["id"] == options.model), None)
    if length is not None and longest > length:
        raise RetireError(
            f"{options.model} takes {length} tokens, prompt and answer together, and this replay has {longest}:"
            " lower --most-tokens or --answer-tokens"
        )
    status = http.get(f"{options.url}/retire/status", headers=headers, timeout=TIMEOUT_S)
    seal: dict[str, str] = status.json()["seal"] if status.is_success else {}
    if not seal and Arm.RETIRE in options.arm:
        raise RetireError("this server supersedes nothing; choose --arm native or --arm abandon")
    return Site(options.url, options.model, options.api_key), seal


@contextmanager
def _lines(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError) as error:
        raise RetireError(f"{path} cannot be read: {error}") from None
    except RetireError as error:
        raise RetireError(f"{path}: {error}") from None


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="retire replay",
        description="Recorded interruptions against a running server: what becomes of every version.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="rows of `retire traces`")
    parser.add_argument("--url", default=os.environ.get("RETIRE_URL", "http://127.0.0.1:8000"), help="%(default)s")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"), help="default: $VLLM_API_KEY")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument(
        "--arm",
        action="append",
        choices=[arm.value for arm in Arm],
        help="native hangs up, abandon does not even that; several may be given (native and retire)",
    )
    parser.add_argument("--trials", type=_count, default=1, metavar="N", help="of every arm (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the texts (%(default)s)")
    when = parser.add_argument_group("when")
    when.add_argument("--speed", type=_positive, default=1.0, metavar="X", help="times as fast (%(default)g)")
    when.add_argument(
        "--pace",
        choices=[pace.value for pace in Pace],
        default=Pace.RECORDED.value,
        help="folded: what lies between a scope's aborted turns is left out (%(default)s)",
    )
    when.add_argument("--window", type=_positive, metavar="S", help="only the densest S recorded seconds")
    when.add_argument("--scopes", type=_count, metavar="N", help="only the N with most transitions")
    when.add_argument(
        "--goodput-window", type=_positive, metavar="S", help="seconds counted (to 10 s after the last start)"
    )
    when.add_argument(
        "--limit", type=_positive, default=180.0, metavar="S", help="wait so long after the last act (%(default)g)"
    )
    size = parser.add_argument_group("how long, in tokens")
    size.add_argument("--prompt-tokens", type=_count, default=1024, metavar="N", help="where a row is silent")
    size.add_argument("--overlap", type=_share, default=0.0, metavar="SHARE", help="where a row is silent")
    size.add_argument("--scale-tokens", type=_positive, default=1.0, metavar="X", help="times what rows say")
    size.add_argument("--most-tokens", type=_count, default=4096, metavar="N", help="of a prompt (%(default)s)")
    size.add_argument("--answer-tokens", type=_count, default=256, metavar="N", help="of every version (%(default)s)")
    load = parser.add_argument_group("other work")
    load.add_argument("--background", type=Path, metavar="FILE", help="arrivals: Azure's CSV or Mooncake's JSON lines")
    load.add_argument(
        "--background-speed", type=_positive, default=1.0, metavar="X", help="times as fast (%(default)g)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan, send nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    options = parser.parse_args(argv)
    options.arm = list(dict.fromkeys(options.arm or [Arm.NATIVE.value, Arm.RETIRE.value]))
    return options


def _checked(kind: Callable[[str], float], least: float, most: float, text: str) -> float:
    if not least <= (number := kind(text)) <= most:
        raise argparse.ArgumentTypeError(f"must be {least:g} to {most:g}")
    return number


def _count(text: str) -> int:
    return int(_checked(int, 1, 1e9, text))


def _positive(text: str) -> float:
    return _checked(float, 1e-6, 1e9, text)


def _share(text: str) -> float:
    return _checked(float, 0, 1, text)


if __name__ == "__main__":
    sys.exit(main())
