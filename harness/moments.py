"""When a prefill is interrupted: at a share of one of its steps.

Owns: finding out from outside where a running prefill is, and how long its steps take.
Must not know: what happens at that moment.
Strategy: the engine answers questions only between two steps, so an answer that kept us waiting spans one step.  A
thread asks without pause while a prefill runs; it stops asking at the moment itself, so that nobody is disturbed after.
All times are seconds of one clock, which may be one that stands still at times (`harness.turns`).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.client import TIMEOUT_S, Streaming, http
from harness.workload import PATIENCE_S

WEIGHT = 0.5  # of a step's newest length


class MomentMissed(RuntimeError):
    """The step that was waited for never began, or was over."""


Clock = Callable[[], float]
NAP_S = 0.001


class _StepWatch:
    """Watches one prefill.

    `ended`: (begin, end) of its steps so far.  `asked`: when the newest question was; `answered`: when the newest
    answer came.
    """

    def __init__(self, url: str, clock: Clock, threshold_s: float) -> None:
        self.ended: list[tuple[float, float]] = []
        self.asked = self.answered = clock()
        self._url, self._clock, self._threshold_s = url, clock, threshold_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.asked = self._clock()
            http.get(f"{self._url}/retire/status", timeout=TIMEOUT_S).raise_for_status()
            self.answered = self._clock()
            if self.answered - self.asked > self._threshold_s:
                self.ended.append((self.asked, self.answered))

    def stop(self) -> None:
        """Ask no more; the question that is out is answered at the end of the running step."""
        self._stop.set()

    def join(self) -> None:
        """Until the last answer is there."""
        self._stop.set()
        self._thread.join()


@dataclass
class Moments:
    """Where the steps of prefills of one kind begin, and how long they take.

    `lengths_s`: of the first, second, ... step, as last seen; servers that are alike may share it.
    `idle_s`: an answer between two steps.
    """

    url: str
    clock: Clock = time.monotonic
    lengths_s: list[float] = field(default_factory=list)
    idle_s: float = 0.0

    def calibrate(self, begin: Callable[[], Streaming], steps: int) -> None:
        """Learn from a prefill that nobody interrupts.  Raises MomentMissed when it did not show so many steps."""
        self.settle()
        prefill = begin()
        watch = self._watch()
        prefill.wait()
        watch.join()
        if len(watch.ended) < steps:
            raise MomentMissed(f"{len(watch.ended)} steps of {steps} were seen: they are too short to tell")
        self.lengths_s[:] = [end - begin for begin, end in watch.ended[:steps]]

    def settle(self) -> None:
        """Learn how long an answer takes while nothing is computed."""
        self.idle_s = statistics.median(self._idle_answer_s() for _ in range(9))

    def wait(self, prefill: Streaming, step: int, share: float) -> Moment:
        """Until step number `step` (from 1) has done that share of its work.  Raises MomentMissed.

        How long it takes is judged by how long the step before took just now.
        """
        watch = self._watch()
        deadline = time.monotonic() + PATIENCE_S
        while len(watch.ended) < step - 1 or self.clock() - watch.asked < self._busy_s:
            if prefill.reply.done_at or prefill.reply.token_ids or time.monotonic() > deadline:
                watch.join()
                raise MomentMissed(f"step {step} was never seen")
            time.sleep(NAP_S)
        begun, length_s = watch.asked, self.lengths_s[step - 1]
        if step > 1:
            before = watch.ended[step - 2]
            length_s *= (before[1] - before[0]) / self.lengths_s[step - 2]
        self._sleep_until(begun + share * length_s)
        return Moment(watch, begun, self.clock(), steps_before=step - 1)

    def wait_decoding(self, answer: Streaming, tokens: int, offset_s: float) -> Moment:
        """Until so long after that many tokens of an answer.  Raises MomentMissed when it is over by then."""
        watch = self._watch()
        answer.wait_for_tokens(tokens)
        self._sleep_until(self.clock() + offset_s)
        if answer.reply.done_at:
            watch.join()
            raise MomentMissed("the answer was over")
        return Moment(watch, watch.asked, self.clock())

    def learn(self, moment: Moment) -> None:
        """Its step ran to its end as it always does, or was over before the moment: so long does it take now."""
        assert moment.steps_before is not None
        seen_s, step = moment.step_s(), moment.steps_before
        self.lengths_s[step] += WEIGHT * (seen_s - self.lengths_s[step])

    @property
    def _busy_s(self) -> float:
        """An answer that takes longer is kept waiting by a step."""
        return 3 * self.idle_s + 0.01

    def _watch(self) -> _StepWatch:
        shortest = min(self.lengths_s, default=0.0)
        return _StepWatch(self.url, self.clock, 0.3 * shortest if shortest else 10 * self.idle_s + 0.02)

    def _idle_answer_s(self) -> float:
        asked = self.clock()
        http.get(f"{self.url}/retire/status", timeout=TIMEOUT_S).raise_for_status()
        return self.clock() - asked

    def _sleep_until(self, at: float) -> None:
        while (left_s := at - self.clock()) > 0:
            time.sleep(min(left_s, NAP_S))


class Moment:
    """One moment that came; nobody asks the engine any more.

    `begun`: the beginning of its step.  `steps_before`: how many the prefill had.
    """

    def __init__(self, watch: _StepWatch, begun: float, at: float, steps_before: int | None = None) -> None:
        watch.stop()
        self.begun, self.at = begun, at
        self.steps_before = steps_before
        self._watch = watch

    def hit(self) -> bool:
        """Whether it lay within that step; waits until the step is over."""
        self._watch.join()
        before = sum(end < self.at for _, end in self._watch.ended)
        return self._watch.answered > self.at and self.steps_before in (None, before)

    def boundary_s(self) -> float:
        """How long from the moment until the engine answered between two steps."""
        self._watch.join()
        return self._watch.answered - self.at

    def step_s(self) -> float:
        """How long its step took in all; it may have been over before the moment."""
        self._watch.join()
        ended = self._watch.ended[self.steps_before :] if self.steps_before is not None else ()
        return (ended[0][1] if ended else self._watch.answered) - self.begun
