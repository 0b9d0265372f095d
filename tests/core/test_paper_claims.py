"""One test per claim of the paper that the protocol itself must keep ("Serving a Revisable World", section cited)."""

from __future__ import annotations

import pytest

from retire.core.effects import CloseRequests, InstallCertificate, ReleasePins, ReportStage, StartCold
from retire.core.events import AdoptionFailed, CertificateAdopted, RequestFinished, ScopeCancelled
from retire.core.types import Certificate, Generation, KVGroup, Refusal, Stage
from tests.core.world import (
    COMMON,
    NONE,
    admitted,
    advanced,
    certificate_of,
    closed,
    fresh,
    geometry,
    holding,
    is_rejected,
    play,
    refs,
    released,
    rid,
    state_after,
    successor,
    tid,
)

OLD = holding("1a")  # the shared prefix, and an obsolete suffix in block 103
RUNNING = state_after(admitted("1a"))
ALIGNED = state_after(admitted("1a"), advanced(1, 2), closed("1a", OLD))
RESUMING = state_after(admitted("1a"), advanced(1, 2), closed("1a", OLD), admitted("2a"))
ADOPTED = CertificateAdopted(rid("2a"), ((100, 101, 102),))


def kinds(effects) -> list[type]:
    return [type(effect) for effect in effects]


def stages(effects) -> list[Stage]:
    return [effect.stage for effect in effects if isinstance(effect, ReportStage)]


# 3.1


def test_a_terminal_cancellation_has_no_successor():
    """Section 3.1."""
    state, _ = play(RUNNING, ScopeCancelled())
    assert is_rejected(state, admitted("1b"))
    assert is_rejected(state, advanced(1, 2))


# 5.1  Three guarantees


def test_current_version_publication_a_revoked_epoch_admits_nothing():
    """Section 5.1: state is visible only if it belongs to the current scope epoch."""
    state, _ = play(RUNNING, advanced(1, 2))
    assert rid("1a") not in state.live
    assert is_rejected(state, admitted("1b"))


def test_current_version_publication_an_overtaken_successor_installs_nothing():
    """Section 5.1: installed state is visible only if it belongs to the current scope epoch."""
    state, effects = play(RESUMING, advanced(2, 3))
    assert CloseRequests(frozenset({rid("2a")})) in effects
    assert is_rejected(state, ADOPTED)


@pytest.mark.parametrize(
    ("wanted", "generation", "reason"),
    [
        (successor("2a", (9, 9, 9, 9)), 1, Refusal.NO_COMMON_PREFIX),
        (successor("2a", fingerprint="another adapter"), 1, Refusal.FINGERPRINT),
        (successor("2a"), 2, Refusal.GENERATION),
        (successor("2a", tenant="rival"), 1, Refusal.TENANT),
    ],
)
def test_versioned_handoff_needs_prefix_configuration_generation_and_tenant(wanted, generation, reason):
    """Section 5.1: predecessor state is consumed only when all of them match; otherwise the successor recomputes."""
    assert certificate_of(OLD, wanted, geometry(generations=lambda _: Generation(generation))) is reason


def test_versioned_handoff_waits_for_the_old_writer():
    """Section 5.1: ... its old writer is closed."""
    state, effects = play(RUNNING, advanced(1, 2), admitted("2a"))
    assert InstallCertificate not in kinds(effects)
    _, effects = play(state, closed("1a", OLD))
    assert InstallCertificate in kinds(effects)


def test_otherwise_the_successor_recomputes():
    """Section 5.1."""
    _, effects = play(ALIGNED, admitted("2a", tokens=(9, 9, 9)))
    assert effects[0] == StartCold(rid("2a"), Refusal.NO_COMMON_PREFIX)


def test_retired_state_isolation_the_obsolete_suffix_is_not_in_the_certificate():
    """Sections 5.1 and 6.1, figure 4: old e is A B C D, the successor aliases A B C and nothing else."""
    assert RESUMING.transition.certificate.groups == (refs((100, 101, 102)),)


def test_retired_state_isolation_old_work_may_finish_after_the_switch():
    """Section 5.1: old work may finish; what it hands over late is released and reaches nobody."""
    state, _ = play(RUNNING, advanced(1, 2), RequestFinished(rid("1a")), admitted("2a"))
    after, effects = play(state, closed("1a", OLD))
    assert effects == (ReleasePins((OLD,)),)
    assert after == state


def test_without_profitable_reuse_a_cold_successor_bypasses_pinning():
    """Section 5.1: a cold successor bypasses physical pinning."""
    state, effects = play(RUNNING, advanced(1, 2, NONE), closed("1a", OLD))
    assert released(effects) == (OLD,)
    assert not state.holdings
    _, effects = play(state, admitted("2a"))
    assert effects[0] == StartCold(rid("2a"), Refusal.NOT_WANTED)


# 5.2  One five-stage transition


def test_the_five_stages_come_in_order():
    """Section 5.2."""
    _, effects = play(RUNNING, advanced(1, 2), closed("1a", OLD), admitted("2a"), ADOPTED)
    assert stages(effects) == list(Stage)


def test_advance_revokes_before_anything_else():
    """Section 5.2: revoke before publication."""
    _, effects = play(RUNNING, advanced(1, 2))
    assert effects[0] == ReportStage(tid("t12"), Stage.ADVANCE)


def test_fence_stops_old_launches_and_collects_every_receipt():
    """Section 5.2: stop new old-version launches and close writers, collecting participant receipts."""
    state, effects = play(fresh(), admitted("1a"), admitted("1b"), advanced(1, 2))
    assert effects[-1] == CloseRequests(frozenset({rid("1a"), rid("1b")}))
    state, effects = play(state, closed("1b"))
    assert Stage.FENCE not in stages(effects)
    assert state.place is Stage.FENCE
    _, effects = play(state, closed("1a"))
    assert Stage.FENCE in stages(effects)


def test_align_matches_the_revised_context_to_the_completed_prefix():
    """Section 5.2: certify its configuration, generation, and ownership."""
    certificate = RESUMING.transition.certificate
    assert certificate.tokens == len(COMMON)
    assert (certificate.source, certificate.target, certificate.transfer) == (rid("1a"), rid("2a"), tid("t12"))


def test_resume_admits_work_under_the_new_epoch():
    """Section 5.2: RESUME starts the replacement."""
    assert rid("2a") in RESUMING.live
    assert RESUMING.epoch == 2


def test_progress_depends_on_the_state_consumed_not_on_the_release_of_the_rest():
    """Section 5.2: the certificate goes out before the pins that lost the choice are released."""
    other = holding("1b", (1, 2, 7, 7), first_block=200)
    state = state_after(admitted("1a"), admitted("1b"), advanced(1, 2), closed("1a", OLD), closed("1b", other))
    _, effects = play(state, admitted("2a"))
    assert kinds(effects) == [InstallCertificate, ReleasePins, ReportStage]


# 5.3  Resume before reclamation


def test_the_common_prefix_stays_pinned_until_adoption():
    """Section 5.3."""
    assert RESUMING.holdings == (OLD,)


def test_pins_are_released_once_adoption_is_verified():
    """Section 5.3: handoff pins are released and the successor's references keep those pages live."""
    state, effects = play(RESUMING, ADOPTED)
    assert released(effects) == (OLD,)
    assert state.transition is None
    assert rid("2a") in state.live


def test_only_writer_closed_pages_cross():
    """Section 5.3: with one of two writers open, nothing is certified however much the other has left."""
    state = state_after(admitted("1a"), admitted("1b"), advanced(1, 2), closed("1a", OLD), admitted("2a"))
    assert state.place is Stage.FENCE
    assert state.transition.certificate is None


# 6.1  Redesigning the execution lifecycle


def test_the_prefix_is_limited_to_the_writer_complete_frontier():
    """Section 6.1: ... limits it to the minimum writer-complete frontier across participants."""
    found = certificate_of(holding("1a", frontier=4), successor("2a"))
    assert isinstance(found, Certificate)
    assert found.tokens == 4


def test_the_prefix_ends_on_a_block_boundary_shared_by_every_kv_group():
    """Section 6.1: rounds it to a block boundary shared by every KV group."""
    held = holding("1a", groups=(refs(range(4)), refs((10, 11))))
    found = certificate_of(held, successor("2a"), geometry((KVGroup(2), KVGroup(4))))
    assert isinstance(found, Certificate)
    assert (found.tokens, found.groups) == (4, (refs((0, 1)), refs((10,))))


def test_transfer_identity_a_completion_after_its_target_was_retired_is_rejected():
    """Section 6.1: rejecting transfers that complete after their intended execution has been retired."""
    overtaken, _ = play(RESUMING, advanced(2, 3))
    left, _ = play(RESUMING, RequestFinished(rid("2a")))
    for state in (overtaken, left):
        assert is_rejected(state, ADOPTED)
        assert is_rejected(state, AdoptionFailed(rid("2a"), Refusal.GENERATION))


def test_a_failed_certificate_selects_a_cold_successor():
    """Section 6.1: a failed certificate selects a cold, fresh-generation successor."""
    env = geometry(generations=lambda _: Generation(7))
    state, effects = play(ALIGNED, admitted("2a"), env=env)
    assert effects[0] == StartCold(rid("2a"), Refusal.GENERATION)
    assert released(effects) == (OLD,)
    assert state.transition is None


def test_another_revision_may_arrive_before_cleanup_ends():
    """Section 1: progress continues when another revision arrives before cleanup ends; the prefix grows each time."""
    prompt = tuple(range(40))
    state, certified = state_after(admitted("1a", tokens=prompt)), []
    for epoch in range(2, 8):
        frontier = 4 * (epoch - 1)  # each version gets two blocks further before it is revised
        held = holding(f"{epoch - 1}a", prompt, frontier, first_block=100 * epoch)
        state, effects = play(
            state, advanced(epoch - 1, epoch), closed(f"{epoch - 1}a", held), admitted(f"{epoch}a", tokens=prompt)
        )
        certified += [e.certificate.tokens for e in effects if isinstance(e, InstallCertificate)]
    assert certified == [4, 8, 12, 16, 20, 24]
