"""What came of the versions of a replay.

Owns: what counts as finished, obsolete, current, live and cleaned up.  Must not know: how versions were sent, or which
arm it was: the definitions are the same for all.
All times are seconds of the client's `time.monotonic`.

- A version is *given up* when the application begins to replace it, and *revoked* when it learns that this was
  accepted: by the status line of the successor (200, or a refusal that says that authority has advanced), or, where the
  successor comes later, by the answer to the supersede; a hang-up is its own acceptance.  A successor that was refused
  revokes nothing: the next one that was accepted does.
- A token is *current* up to when its version is given up, *obsolete* after it is revoked, and *late* in between.
- An execution is *live* from when it was sent until its answer is over; a superseded one until the engine was seen to
  have let go of it.  From when it is given up it is an obsolete one.
- *Cleanup* is from giving up to letting go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from harness.arrivals import Planned
from harness.client import Frame, Reply

NEVER = float("inf")


class Outcome(StrEnum):
    """How a version ended."""

    FINISHED = "finished"  # the whole answer came
    SUPERSEDED = "superseded"  # it was given up before
    FAILED = "failed"  # refused, broken off, or cut short while nobody had given it up


@dataclass
class Version:
    """One version and what was seen of it.

    `gave_up_at`: when its predecessor was given up for it; `accepted_at`: when that was accepted, None while it is not
    or never will be.  Both stay None for a first version.
    `let_go_at`: when the engine was seen to compute it no more, if somebody looked.
    `transition`: where its predecessor's record is, if the server keeps one.
    """

    planned: Planned
    reply: Reply
    gave_up_at: float | None = None
    accepted_at: float | None = None
    let_go_at: float | None = None
    transition: str | None = None

    @property
    def whole(self) -> bool:
        """Whether the whole answer came."""
        return self.reply.status == 200 and tokens(self.reply.frames) >= self.planned.answer_tokens

    @property
    def accepted(self) -> bool:
        """Whether the server took it on, be it that it was superseded before it could answer."""
        return self.reply.status == 200 or self.reply.headers.get("x-retire-authority") == "advanced"


def tokens(frames: Iterable[Frame]) -> int:
    """How many tokens they carried; a frame with text and no token ids counts as one."""
    return sum(len(frame.token_ids) or bool(frame.text) for frame in frames)


@dataclass(frozen=True)
class Fate:
    """What became of one version.  Times are None for what did not happen.

    `let_go_at`: of a version that was live when it was given up; later than anything if it never was.
    """

    version: Version
    outcome: Outcome
    given_up_at: float | None
    revoked_at: float | None
    current: Sequence[Frame] = ()
    late: Sequence[Frame] = ()
    obsolete: Sequence[Frame] = ()

    @property
    def let_go_at(self) -> float | None:
        """When its execution was over after it had been given up; None if it was over before."""
        if self.outcome is not Outcome.SUPERSEDED or self.given_up_at is None:
            return None
        ended_at = self.version.let_go_at or self.version.reply.done_at or NEVER
        return max(self.given_up_at, ended_at)

    @property
    def cleanup_ms(self) -> float | None:
        """ms from giving up to letting go, of an execution that was live then."""
        ended_at = self.let_go_at
        return None if ended_at is None or self.given_up_at is None else (ended_at - self.given_up_at) * 1000


def fates(versions: Sequence[Version]) -> list[Fate]:
    """What became of the versions of one scope, which are given in order."""
    return [_fate(version, versions[place + 1 :]) for place, version in enumerate(versions)]


def _ending(later: Sequence[Version]) -> Version | None:
    """The one of these that ended the version before them; None if none was accepted."""
    return next((one for one in later if one.gave_up_at is not None and one.accepted_at is not None), None)


def _fate(version: Version, later: Sequence[Version]) -> Fate:
    ending = _ending(later)
    given_up_at = NEVER if ending is None or ending.gave_up_at is None else ending.gave_up_at
    revoked_at = NEVER if ending is None or ending.accepted_at is None else ending.accepted_at
    frames = list(version.reply.frames)
    return Fate(
        version,
        _outcome(version, later),
        None if ending is None else given_up_at,
        None if ending is None else revoked_at,
        [frame for frame in frames if frame.at <= given_up_at],
        [frame for frame in frames if given_up_at < frame.at <= revoked_at],
        [frame for frame in frames if frame.at > max(given_up_at, revoked_at)],
    )


def _outcome(version: Version, later: Sequence[Version]) -> Outcome:
    reply = version.reply
    ended_at = reply.done_at or NEVER
    tried_at = min((one.gave_up_at for one in later if one.gave_up_at is not None), default=NEVER)
    if version.whole and ended_at <= tried_at:
        return Outcome.FINISHED
    # 0: it was given up before there was an answer; 410: superseded before there was one.
    if tried_at <= ended_at and tried_at < NEVER and reply.status in (0, 200, 410):
        return Outcome.SUPERSEDED
    return Outcome.FINISHED if version.whole else Outcome.FAILED


def live(found: Iterable[Fate], origin: float) -> list[tuple[float, int, int]]:
    """How many executions of current and of obsolete versions there were: (seconds since `origin`, current, obsolete).

    Each holds from then on; what never ended stays.
    """
    steps: Counter[tuple[float, int]] = Counter()
    for fate in found:
        reply = fate.version.reply
        if fate.outcome is Outcome.FAILED and not fate.version.accepted:
            continue
        current_until = reply.done_at or NEVER
        if fate.let_go_at is not None and fate.given_up_at is not None:
            current_until = max(reply.sent_at, fate.given_up_at)
            steps[current_until, 1] += 1
            steps[fate.let_go_at, 1] -= 1
        steps[reply.sent_at, 0] += 1
        steps[current_until, 0] -= 1
    changes: list[tuple[float, int, int]] = []
    current = obsolete = 0
    for at in sorted({at for at, _ in steps if at < NEVER}):
        current, obsolete = current + steps[at, 0], obsolete + steps[at, 1]
        if not changes or changes[-1][1:] != (current, obsolete):
            changes.append((at - origin, current, obsolete))
    return changes


@dataclass(frozen=True)
class Account:
    """A replay in figures.

    `window_s`: over which goodput is counted, from `origin` on.  `finals`: (scope, number) of the versions that count
    as final.  `records`: of transitions that have one, as `GET /transitions/{id}` tells them.
    """

    fates: Sequence[Fate]
    origin: float
    window_s: float
    finals: Sequence[tuple[int, int]]
    records: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def current_tokens(self) -> int:
        """Tokens of versions that were current when they came, within the window."""
        end = self.origin + self.window_s
        return tokens(frame for fate in self.fates for frame in fate.current if frame.at <= end)

    def goodput(self) -> float:
        """Such tokens per second of the window."""
        return self.current_tokens() / self.window_s

    def obsolete_tokens(self) -> int:
        """Tokens that came although their successor was accepted, whenever that was."""
        return sum(tokens(fate.obsolete) for fate in self.fates)

    def late_tokens(self) -> int:
        """Tokens that came after their version was given up and before its successor was accepted."""
        return sum(tokens(fate.late) for fate in self.fates)

    def spoke(self) -> int:
        """How many final versions let a token be heard while they were current."""
        return sum(tokens(fate.current) > 0 for fate in self._finals())

    def whole(self) -> int:
        """How many final versions answered in full."""
        return sum(fate.version.whole for fate in self._finals())

    def first_token_ms(self) -> list[float]:
        """From sending to the first token, of the final versions that spoke."""
        return [
            (fate.current[place].at - fate.version.reply.sent_at) * 1000
            for fate in self._finals()
            if (place := next((n for n, frame in enumerate(fate.current) if tokens([frame])), None)) is not None
        ]

    def cleanup_ms(self) -> list[float]:
        """Of every execution that was live when it was given up, in the order of versions."""
        return [ms for fate in self.fates if (ms := fate.cleanup_ms) is not None]

    def cleanup_intervals(self) -> list[float]:
        """Per transition whose obsolete step had safe points: the fence over the longest interval between two of them.

        Steps too short to be armed have none; what they cost is in `cleanup_ms`.
        """
        return [worst for record in self.records if (worst := fence_intervals(record)) is not None]

    def outcomes(self) -> dict[str, int]:
        """How many versions ended how."""
        found = Counter(fate.outcome for fate in self.fates)
        return {outcome.value: found[outcome] for outcome in Outcome}

    def live(self) -> list[tuple[float, int, int]]:
        """See `live`."""
        return live(self.fates, self.origin)

    def most_obsolete(self) -> int:
        """The most obsolete executions at once."""
        return max((obsolete for _, _, obsolete in self.live()), default=0)

    def _finals(self) -> list[Fate]:
        wanted = set(self.finals)
        return [fate for fate in self.fates if (fate.version.planned.scope, fate.version.planned.number) in wanted]


def fence_intervals(record: Mapping[str, Any]) -> float | None:
    """The worst of a transition's receipts that had safe points; None without any."""
    ratios = [
        receipt["obsolete_closed_ms"] / receipt["longest_interval_ms"]
        for receipt in record["receipts"]
        if receipt["safe_points"] and receipt["longest_interval_ms"]
    ]
    return max(ratios, default=None)


def let_go(versions: Sequence[Version], records: Mapping[str, Mapping[str, Any]]) -> None:
    """Note when the engine let go of every superseded version of a scope, at the latest, as records tell it.

    A record tells FENCE in ms after ADVANCE.  When that was on the client's clock is not known, but the acceptance was
    read after it: FENCE added to that is an upper bound, too late by what an acceptance takes to come back and be read.
    Nor is it before the old stream was seen to end.  A transition that was overtaken has no FENCE of its own: the next
    one that has waited for its requests as well.
    """
    fenced_at: float | None = None
    for place in range(len(versions) - 1, 0, -1):
        version, predecessor = versions[place], versions[place - 1]
        record = None if version.transition is None else records.get(version.transition)
        if record is not None and version.accepted_at is not None and "fence" in record["stages"]:
            fenced_at = version.accepted_at + record["stages"]["fence"] / 1000
        if fenced_at is not None:
            predecessor.let_go_at = max(fenced_at, predecessor.reply.done_at)


def unpublished_tokens(versions: Sequence[Version], records: Mapping[str, Mapping[str, Any]]) -> int:
    """How many tokens of a scope's superseded versions came that the records do not state as published.

    The server counts what has passed its last gate when it revokes an epoch, and says so in the record of that very
    transition.  So this is exact, whenever anything was taken; clocks have no part in it.
    """
    beyond = 0
    for place, version in enumerate(versions):
        ending = _ending(versions[place + 1 :])
        record = None if ending is None or ending.transition is None else records.get(ending.transition)
        if record is None or not version.accepted:
            continue
        epoch = int(version.reply.headers["x-retire-epoch"])
        stated = [choice["tokens"] for one in record["published"] if one["epoch"] == epoch for choice in one["choices"]]
        beyond += max(0, tokens(version.reply.frames) - sum(filter(None, stated)))
    return beyond
