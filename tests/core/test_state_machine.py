"""Long random lives of a scope on a block pool that hands released blocks to new owners at once.

Where the small world is exhaustive, this one is deep: many epochs, several KV groups, generations that move.  A ledger
follows every pin along the whole path, and any block of an outstanding certificate that changes hands is a defect.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retire.core import check, step
from retire.core import events as ev
from retire.core.effects import CloseRequests, InstallCertificate, ReportClosed, StartCold, StartFresh
from retire.core.errors import ProtocolError
from retire.core.types import BlockId, BlockRef, Generation, Holding, KVGroup, Refusal, Stage, TokenCount
from tests.core.world import CERTIFIED, NONE, TENANT, Ledger, advanced, fresh, geometry, released, rid, successor, tid

GROUPS = (KVGroup(2), KVGroup(4, window_tokens=5))
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)


class Scope(RuleBasedStateMachine):
    """Half of the events are plausible, half come from anywhere: late, repeated, of the wrong request."""

    def __init__(self) -> None:
        super().__init__()
        self.state = fresh()
        self.ledger = Ledger()
        self.generation: dict[BlockId, Generation] = {}
        self.env = geometry(GROUPS, self.generation.__getitem__)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.waiting: set[str] = set()  # admitted, not yet started
        self.told: set[str] = set()  # asked to close
        self.ended: set[str] = set()  # transitions

    def feed(self, event: ev.Event) -> bool:
        before = self.state
        try:
            after, effects = step(before, event, self.env)
        except ProtocolError:
            assert self.state is before
            return False
        self.state = after
        self.ledger.record(event, effects, after)
        if isinstance(event, ev.RequestAdmitted):
            self.waiting.add(event.successor.request)
        for effect in effects:
            self.carry_out(effect)
        for held in released(effects):
            for block in (ref.block for group in held.groups for ref in group if ref):
                self.generation[block] = Generation(self.generation[block] + 1)
        return True

    def carry_out(self, effect) -> None:
        if isinstance(effect, CloseRequests):
            assert not effect.requests & self.told, "told twice"
            self.told |= effect.requests
            self.waiting -= effect.requests
        elif isinstance(effect, InstallCertificate):
            self.start(effect.certificate.target)
        elif isinstance(effect, StartCold) and effect.request not in self.waiting:
            assert effect.request in self.state.live, "only an installation is withdrawn"
        elif isinstance(effect, (StartCold, StartFresh)):
            self.start(effect.request)
        elif isinstance(effect, ReportClosed):
            assert effect.transition not in self.ended, "closed twice"
            self.ended.add(effect.transition)

    def start(self, request) -> None:
        assert request in self.state.live
        assert request not in self.told
        self.waiting.remove(request)

    def holding_of(self, request: str, frontier: int, slid: int) -> Holding:
        tokens = self.prompts.get(request, (0,))
        frontier = min(frontier, len(tokens))
        groups = []
        for group in GROUPS:
            row: list[BlockRef | None] = []
            for index in range(frontier // group.block_tokens):
                block = BlockId(len(self.generation))
                self.generation[block] = Generation(1)
                row.append(None if group.window_tokens and index < slid else BlockRef(block, Generation(1)))
            groups.append(tuple(row))
        return Holding(rid(request), TENANT, tokens, TokenCount(frontier), "f", tuple(groups))

    @rule(contract=st.sampled_from([CERTIFIED, CERTIFIED, NONE]), lost=st.integers(0, 1))
    def advance(self, contract, lost):
        old = self.state.epoch + lost
        self.feed(advanced(old, old + 1, contract))

    @rule(old=st.integers(0, 6), new=st.integers(0, 6))
    def advance_from_anywhere(self, old, new):
        self.feed(advanced(old, new))

    @rule(tokens=TOKENS, ahead=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def admit(self, tokens, ahead):
        name = f"r{len(self.prompts)}"
        self.prompts[name] = tokens
        self.feed(ev.RequestAdmitted(successor(name, tokens), self.state.epoch + ahead))

    @rule(data=st.data())
    @precondition(lambda self: self.state.closing | self.state.leaving)
    def close(self, data):
        name = data.draw(st.sampled_from(sorted(self.state.closing | self.state.leaving)))
        self.close_any(name, *data.draw(st.tuples(st.integers(0, 24), st.integers(0, 3), st.booleans())))

    @rule(number=st.integers(0, 20), frontier=st.integers(0, 24), slid=st.integers(0, 3), kept=st.booleans())
    def close_anyone(self, number, frontier, slid, kept):
        self.close_any(f"r{number}", frontier, slid, kept)

    def close_any(self, name, frontier, slid, kept):
        self.feed(ev.RequestClosed(rid(name), self.holding_of(name, frontier, slid) if kept else None))

    @rule(number=st.integers(0, 20))
    def finish(self, number):
        name = rid(f"r{number}")
        if self.feed(ev.RequestFinished(name)):
            self.waiting.discard(name)

    @rule(fails=st.booleans())
    @precondition(lambda self: self.state.place is Stage.RESUME)
    def adopt(self, fails):
        certificate = self.state.transition.certificate
        blocks = tuple(tuple(ref and ref.block for ref in group) for group in certificate.groups)
        event = ev.CertificateAdopted(certificate.target, blocks)
        assert self.feed(ev.AdoptionFailed(certificate.target, Refusal.NOT_ADOPTED) if fails else event)

    @rule(kind=st.sampled_from([ev.PinsExpired, ev.PinsYielded]), old=st.integers(1, 6))
    def lose_pins(self, kind, old):
        self.feed(kind(self.state.transition.id if self.state.transition and old > 3 else tid(f"t{old}{old + 1}")))

    @rule()
    def revoke(self):
        assert self.feed(ev.CertificatesRevoked())

    @rule(sure=st.integers(0, 9))
    def cancel(self, sure):
        if sure == 0:
            self.feed(ev.ScopeCancelled())

    @invariant()
    def sound(self):
        check(self.state)

    @invariant()
    def certified_blocks_stay_with_their_owner(self):
        transition = self.state.transition
        if transition and transition.certificate:
            for ref in (ref for group in transition.certificate.groups for ref in group if ref):
                assert self.generation[ref.block] == ref.generation

    @invariant()
    def only_a_successor_in_fence_waits(self):
        transition = self.state.transition
        expected = (
            {transition.successor.request}
            if transition and transition.stage is Stage.FENCE and transition.successor
            else set()
        )
        assert self.waiting == expected

    def teardown(self):
        self.feed(ev.ScopeCancelled())
        for request in sorted(self.state.leaving):
            assert self.feed(ev.RequestFinished(request))
        assert self.ledger.entered == self.ledger.left, "a pin leaked"
        assert not self.state.live | self.state.leaving


TestScope = Scope.TestCase
TestScope.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
