"""What is learnt about steps from moments that were hit, and from those that came too late."""

from __future__ import annotations

import pytest

from harness.moments import Moment, Moments


class Watched:
    """A watch that saw steps (begin, end) and had its last answer at `answered`."""

    def __init__(self, ended: list[tuple[float, float]], answered: float) -> None:
        self.ended, self.answered = ended, answered

    def stop(self) -> None:
        pass

    def join(self) -> None:
        pass


def moment(at: float, *steps: tuple[float, float], begun: float, step: int = 2) -> Moment:
    return Moment(Watched(list(steps), steps[-1][1]), begun, at, steps_before=step - 1)


def test_a_moment_inside_its_step_is_hit_and_tells_its_length():
    found = moment(13.0, (10.0, 12.0), (12.0, 16.0), begun=12.0)
    assert found.hit()
    assert found.step_s() == 4.0
    assert found.boundary_s() == 3.0


def test_a_moment_behind_its_step_is_missed_and_tells_its_length_all_the_same():
    found = moment(17.0, (10.0, 12.0), (12.0, 16.0), (16.0, 19.0), begun=12.0)
    assert not found.hit()
    assert found.step_s() == 4.0


@pytest.mark.parametrize("step", [1, 2])
def test_a_machine_that_has_become_faster_is_hit_again_after_some_tries(step):
    moments, share, length_s = Moments("", lengths_s=[9.0, 9.0]), 0.95, 3.0
    misses = 0
    while misses < 8:
        begun = 3.0 * (step - 1)
        steps = [(3.0 * n, 3.0 * n + length_s) for n in range(4)]
        at = begun + share * moments.lengths_s[step - 1]
        seen = [one for one in steps if one[0] < at]
        found = moment(at, *seen, begun=begun, step=step)
        if found.hit():
            break
        misses += 1
        moments.learn(found)
    assert 0 < misses < 8
    assert moments.lengths_s[step - 1] * share < length_s
