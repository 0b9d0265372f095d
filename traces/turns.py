"""A turn that was aborted and the next one of its thread.

Owns: pairing, and telling copies apart.  Must not know: formats, files, how rows are written.
Strategy: a `File` follows the threads of one file in its own order.  Each abort is paired with the next start there; a
`Collector` keeps, of all files that tell of the same abort, the one account to believe: the thread's own before a
fork's copy, an untroubled clock before one that was set back, then the earliest start.  So it does not matter in which
order files are read, nor how often a session was copied or resumed.  Memory grows with turns, not with bytes.

The paper counts a transition when an aborted turn is followed by a started one in the same thread within one hour
(A.1.1, "Recorded agent trace").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from traces.events import Compacted, CopySkipped, Event, Key, ModelCalled, PromptSeen, TurnAborted, TurnStarted
from traces.rows import AUTO_SUBMIT_S, Agent, StartKind, Transition

WITHIN_S: Final = 3600.0

SAME_S: Final = 60.0
"""A second marker so soon is the first one's abort.  Later, something ran that nobody was seen to start."""


@dataclass(slots=True, eq=False)
class _Call:
    key: Key
    time_s: float | None
    prompt: int
    cached: int
    output: int


@dataclass(slots=True, eq=False)
class _Turn:
    key: Key
    began_s: float | None
    kind: StartKind
    chars: int | None
    waiting: bool
    compacted: bool  # since the last call before its first
    calls: int = 0
    first: _Call | None = None


@dataclass(slots=True, eq=False)
class _Stop:
    told: TurnAborted
    time_s: float
    turn: _Turn | None
    last: _Call | None = None


@dataclass(slots=True, eq=False)
class _Thread:
    turn: _Turn | None = None
    call: _Call | None = None
    compacted: bool = False
    stop: _Stop | None = None  # waits for the next start
    ran: bool = False  # a call has come since


@dataclass(slots=True, eq=False)
class _Pair:
    agent: Agent
    stop: _Stop
    turn: _Turn
    gap_s: float  # negative: the start is stamped before the abort

    @property
    def clock_back(self) -> bool:
        return self.gap_s < 0 and not self.turn.waiting

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """The least is to be believed.  Asked when everything is read."""
        unknown = (self.stop.turn, self.stop.last, self.turn.first).count(None)
        return self.stop.told.forked, self.clock_back, max(0.0, self.gap_s), unknown

    @property
    def start_s(self) -> float:
        return self.stop.time_s + max(0.0, self.gap_s)

    def row(self, source: str, scope: int, zero_s: float) -> Transition:
        stop, turn, last, first = self.stop, self.turn, self.stop.last, self.turn.first
        common = min(first.cached, last.prompt + last.output) if first and last else None
        return Transition(
            source=source,
            scope=scope,
            agent=self.agent,
            start_kind=turn.kind,
            reason=stop.told.reason,
            t_abort_s=stop.time_s - zero_s,
            t_start_s=self.start_s - zero_s,
            gap_s=max(0.0, self.gap_s),
            aborted_turn_s=self._lasted_s(),
            aborted_turn_calls=stop.turn.calls if stop.turn else None,
            prompt_tokens_before=last.prompt if last else None,
            output_tokens_before=last.output if last else None,
            prompt_tokens_after=first.prompt if first else None,
            cached_tokens_after=first.cached if first else None,
            first_record_after_start_s=_since(self.start_s, first.time_s if first else None),
            compacted_between=turn.compacted,
            new_prompt_chars=turn.chars,
            auto_submit=turn.waiting or 0 <= self.gap_s < AUTO_SUBMIT_S,
            common_prefix_lb=common,
            clock_back=self.clock_back,
        )

    def _lasted_s(self) -> float | None:
        seen_s = _since(self.stop.turn.began_s, self.stop.time_s) if self.stop.turn else None
        return self.stop.told.lasted_s if seen_s is None else seen_s


def _since(before_s: float | None, after_s: float | None) -> float | None:
    if before_s is None or after_s is None or after_s < before_s:
        return None
    return after_s - before_s


def _by_rank(account: tuple[Key, _Pair]) -> tuple[object, ...]:
    thread, pair = account
    return (*pair.rank, thread)


def _one_per_start(accounts: Iterable[tuple[Key, _Pair]]) -> Iterable[tuple[Key, _Pair]]:
    """A turn follows one abort: of several markers the first, unless a file that begins with a later one is alone."""
    firsts: dict[Key, tuple[Key, _Pair]] = {}
    for account in sorted(accounts, key=lambda account: (account[1].stop.turn is None, account[1].stop.time_s)):
        firsts.setdefault(account[1].turn.key, account)
    return firsts.values()


@dataclass(slots=True)
class Collector:
    """Everything that files have told of one source.

    `counts` says how often a turn and an abort were met, once each, and what became of aborts.
    """

    counts: Counter[str] = field(default_factory=Counter)
    _first_s: float | None = None
    _known: set[Key] = field(default_factory=set)
    _accounts: dict[Key, list[tuple[Key, _Pair]]] = field(default_factory=dict)
    _unanswered: dict[Key, list[tuple[Agent, _Stop]]] = field(default_factory=dict)
    _openings: dict[Key, list[_Turn]] = field(default_factory=dict)

    def met(self, what: str, key: Key, time_s: float | None) -> None:
        """A turn or an abort was read; the same one may have been read in another file."""
        if time_s is not None and (self._first_s is None or time_s < self._first_s):
            self._first_s = time_s
        if key in self._known:
            self.counts["copies dropped"] += 1
        else:
            self._known.add(key)
            self.counts[what] += 1

    def paired(self, thread: Key, pair: _Pair) -> None:
        """An account of a transition."""
        self._accounts.setdefault(pair.stop.told.key, []).append((thread, pair))

    def unanswered(self, thread: Key, agent: Agent, stop: _Stop) -> None:
        """A file ended before the next turn."""
        self._unanswered.setdefault(thread, []).append((agent, stop))

    def opens(self, thread: Key, turn: _Turn) -> None:
        """A file begins with this turn of a thread."""
        self._openings.setdefault(thread, []).append(turn)

    def rows(self, source: str) -> Iterator[Transition]:
        """Transitions by the time of their start; scopes are numbered in that order.  Asked once, at the end."""
        self._answer_across_files()
        zero_s = self._first_s or 0.0
        best = [min(accounts, key=_by_rank) for accounts in self._accounts.values()]
        found = sorted(_one_per_start(best), key=lambda account: (account[1].start_s, account[1].stop.told.key))
        scopes: dict[Key, int] = {}
        for thread, pair in found:
            yield pair.row(source, scopes.setdefault(thread, len(scopes) + 1), zero_s)

    def _answer_across_files(self) -> None:
        """A session was resumed in a file of its own: its first turn there follows the abort that ended the other."""
        for thread, stops in self._unanswered.items():
            for agent, stop in stops:
                for turn in self._openings.get(thread, ()):
                    gap_s = _since(stop.time_s, turn.began_s)
                    if gap_s and gap_s <= WITHIN_S:  # 0 may be the aborted turn itself
                        self.paired(thread, _Pair(agent, stop, turn, gap_s))


class File:
    """The threads of one file, followed in its order."""

    def __init__(self, agent: Agent, collector: Collector) -> None:
        self._agent = agent
        self._into = collector
        self._threads: dict[Key, _Thread] = {}
        self._seen: set[Key] = set()

    def take(self, event: Event) -> None:
        """The next event of the file."""
        thread = self._threads.get(event.thread)
        if thread is None:
            thread = self._threads[event.thread] = _Thread()
        match event:
            case TurnStarted() if self._first_time(event.key):
                self._start(thread, event)
            case PromptSeen():
                self._prompt(thread, event)
            case ModelCalled():
                self._call(thread, event)
            case TurnAborted() if self._first_time(event.key):
                self._abort(thread, event)
            case Compacted():
                self._compact(thread)
            case CopySkipped():
                self._into.counts["copied records of forks"] += 1

    def end(self) -> None:
        """The file is read, or cannot be read further."""
        for name, thread in self._threads.items():
            if thread.stop:
                thread.stop.last = thread.call
                self._into.unanswered(name, self._agent, thread.stop)

    def _first_time(self, key: Key) -> bool:
        if key in self._seen:
            self._into.counts["copies dropped"] += 1
            return False
        self._seen.add(key)
        return True

    def _start(self, thread: _Thread, event: TurnStarted) -> None:
        self._into.met("turns", event.key, event.time_s)
        turn = _Turn(event.key, event.time_s, event.kind, event.prompt_chars, event.waiting, thread.compacted)
        if stop := thread.stop:
            stop.last = thread.call
            if event.time_s is None:
                self._into.counts["next turn without a time"] += 1
            elif (gap_s := event.time_s - stop.time_s) > WITHIN_S or (gap_s < -WITHIN_S and not event.waiting):
                self._into.counts["next turn after an hour"] += 1
            else:
                self._into.paired(event.thread, _Pair(self._agent, stop, turn, gap_s))
        elif thread.turn is None:
            self._into.opens(event.thread, turn)
        thread.turn, thread.stop = turn, None

    def _prompt(self, thread: _Thread, event: PromptSeen) -> None:
        if thread.turn and thread.turn.chars is None:
            thread.turn.chars = event.chars

    def _compact(self, thread: _Thread) -> None:
        thread.compacted = True
        if thread.turn and not thread.turn.first:
            thread.turn.compacted = True

    def _call(self, thread: _Thread, event: ModelCalled) -> None:
        if thread.call and thread.call.key == event.key:
            thread.call.output = max(thread.call.output, event.output_tokens)
            return
        if event.key in self._seen:
            return
        self._seen.add(event.key)
        thread.call = _Call(event.key, event.time_s, event.prompt_tokens, event.cached_tokens, event.output_tokens)
        thread.compacted, thread.ran = False, True
        if turn := thread.turn:
            turn.calls += 1
            turn.first = turn.first or thread.call

    def _abort(self, thread: _Thread, event: TurnAborted) -> None:
        if event.time_s is None:
            self._into.counts["aborts without a time"] += 1
        elif thread.stop and not thread.ran and event.time_s - thread.stop.time_s <= SAME_S:
            self._into.counts["second markers of an abort"] += 1
        else:
            self._into.met("aborts", event.key, event.time_s)
            thread.stop, thread.ran = _Stop(event, event.time_s, thread.turn), False
