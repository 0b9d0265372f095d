"""Long random lives of a scope on a block pool that hands released blocks to new owners at once.

Where the small world is exhaustive, this one is deep: many epochs, several KV groups, generations that move, copies
that take their time.  A ledger follows every pin and every copy along the whole path, and any guaranteed block of an
outstanding certificate that changes hands is a defect.  Soft blocks, and those given back after a copy, are reused at
random.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retire.core import check, step
from retire.core import events as ev
from retire.core.effects import (
    CloseRequests,
    InstallCertificate,
    OffloadPages,
    ReportClosed,
    ReportStage,
    StartCold,
    StartFresh,
)
from retire.core.errors import ProtocolError
from retire.core.types import BlockId, BlockRef, Generation, Holding, KVGroup, Refusal, Stage, Tier, TokenCount
from tests.core.world import (
    CERTIFIED,
    EXACT,
    HOST,
    NONE,
    TENANT,
    Ledger,
    adopted,
    advanced,
    fresh,
    geometry,
    host_of,
    released,
    rid,
    successor,
    tid,
)

GROUPS = (KVGroup(2), KVGroup(4, window_tokens=5))
CONTRACTS = st.sampled_from([CERTIFIED, CERTIFIED, HOST, HOST, EXACT, NONE])
UNKEPT = st.sampled_from([None, None, None, Refusal.QUOTA, Refusal.UNPROFITABLE])
# Frontier, blocks that slid away, guaranteed: mostly much, so that there is something to inherit.
LEFT = st.tuples(st.sampled_from([24, 24, 16, 12, 9, 3, 0]), st.sampled_from([0, 0, 1, 3]), st.booleans())
FAILURE = st.sampled_from([None, Refusal.CORRUPT, Refusal.TRANSFER])
TOKENS = st.tuples(
    st.sampled_from([24, 20, 16, 16, 11, 4, 0]), st.lists(st.integers(1, 2), min_size=1, max_size=3)
).map(lambda parts: (*[0] * parts[0], *parts[1]))
ANYBODY = st.integers(0, 20).map(lambda number: rid(f"r{number}"))
NOISE = st.one_of(
    st.builds(advanced, st.integers(0, 6), st.integers(0, 6)),
    st.builds(ev.RequestFinished, ANYBODY),
    st.builds(ev.PinsExpired, st.integers(1, 6).map(lambda old: tid(f"t{old}{old + 1}"))),
    st.builds(ev.AdoptionFailed, ANYBODY, st.just(Refusal.TRANSFER)),
    st.just(ev.CertificatesRevoked()),
)


class Scope(RuleBasedStateMachine):
    """Most events are plausible, some come from anywhere: late, repeated, of the wrong request."""

    def __init__(self) -> None:
        super().__init__()
        self.state = fresh()
        self.ledger = Ledger()
        self.generation: dict[BlockId, Generation] = {}
        self.env = geometry(
            GROUPS,
            self.generation.__getitem__,
            exact_tokens=8,
            offloads=True,
            pays=lambda tokens, tier: tier is Tier.HBM or tokens > 4,
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.waiting: set[str] = set()  # admitted, not yet started
        self.told: set[str] = set()  # asked to close
        self.ended: set[str] = set()  # transitions
        self.stages: set[tuple[str, Stage]] = set()
        self.finished: list[str] = []  # of the current epoch
        self.copies: dict[str, Holding] = {}  # asked for, by source

    def feed(self, event: ev.Event) -> bool:
        before = self.state
        try:
            after, effects = step(before, event, self.env)
        except ProtocolError:
            assert self.state is before
            return False
        self.state = after
        self.waiting -= {event.request} if isinstance(event, ev.RequestFinished) else set()
        self.ledger.record(event, effects, after)
        if isinstance(event, ev.RequestAdmitted):
            self.waiting.add(event.successor.request)
        for effect in effects:
            self.carry_out(effect)
        for held in released(effects):
            self.reuse(blocks_of(held))
        return True

    def reuse(self, blocks) -> None:
        for block in blocks:
            self.generation[block] = Generation(self.generation[block] + 1)

    def carry_out(self, effect) -> None:
        if isinstance(effect, CloseRequests):
            assert not effect.requests & self.told, "told twice"
            self.told |= effect.requests
            self.waiting -= effect.requests
        elif isinstance(effect, InstallCertificate):
            if effect.certificate.target in self.waiting:
                self.start(effect.certificate.target)
            else:
                assert effect.certificate.target in self.state.live, "only a failed installation is replaced"
        elif isinstance(effect, StartCold) and effect.request not in self.waiting:
            assert effect.request in self.state.live, "only an installation is withdrawn"
        elif isinstance(effect, (StartCold, StartFresh)):
            self.start(effect.request)
        elif isinstance(effect, ReportStage):
            assert (effect.transition, effect.stage) not in self.stages, "ended twice"
            self.stages.add((effect.transition, effect.stage))
        elif isinstance(effect, ReportClosed):
            assert effect.transition not in self.ended, "closed twice"
            self.ended.add(effect.transition)
        elif isinstance(effect, OffloadPages):
            self.copies[effect.holding.request] = effect.holding

    def start(self, request) -> None:
        assert request in self.state.live
        assert request not in self.told
        self.waiting.remove(request)

    def holding_of(self, request: str, frontier: int, slid: int, guaranteed: bool) -> Holding:
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
        kept, grid = TokenCount(frontier), TokenCount(frontier // 2)
        return Holding(rid(request), TENANT, tokens, kept, "f", tuple(groups), grid, guaranteed)

    @rule(contract=CONTRACTS, lost=st.sampled_from([0, 0, 0, 1]), left=LEFT, refusal=UNKEPT)
    @precondition(lambda self: self.state.live or self.finished or self.state.holdings)
    def advance(self, contract, lost, left, refusal):
        old = self.state.epoch + lost
        offered = tuple(self.holding_of(name, *left) for name in self.finished)
        if self.feed(advanced(old, old + 1, contract, left=offered, refusal=refusal)):
            self.finished.clear()

    @rule(data=st.data(), left=LEFT)
    @precondition(lambda self: not self.state.cancelled)
    def advance_with_pins_of_a_writer_or_pins_owned_already(self, data, left):
        writers = self.state.live | self.state.leaving | self.state.closing
        known = sorted(writers | {held.request for held in self.state.holdings})
        stranger = f"s{len(self.generation)}"
        names = (stranger, data.draw(st.sampled_from([*known, stranger])))
        epoch = self.state.epoch
        assert not self.feed(advanced(epoch, epoch + 1, left=tuple(self.holding_of(name, *left) for name in names)))

    @rule(contract=CONTRACTS, left=LEFT)
    def steer(self, contract, left):
        """The common course, up to where a successor may come."""
        if not self.state.live and not self.state.cancelled:
            self.admit((0,) * 24, 0)
        self.advance(contract, 0, left, None)
        for name in sorted(self.state.closing):
            assert self.feed(ev.RequestClosed(name, self.holding_of(name, *left)))

    @rule(tokens=TOKENS, copied=st.booleans(), attempts=st.integers(0, 3), data=st.data())
    @precondition(lambda self: self.state.place is Stage.ALIGN and self.state.holdings)
    def succeed(self, tokens, copied, attempts, data):
        """The common course from there on; device blocks may be reused between the attempts to adopt."""
        for name in sorted(self.copies) if copied else ():
            self.answer(name, is_there=True)
        self.reuse_soft_blocks(data)
        self.admit((*[0] * 9, *tokens), 0)
        for _ in range(attempts):
            if self.state.place is Stage.RESUME:
                self.reuse_soft_blocks(data)
                self.adopt(data.draw(FAILURE))

    @rule(tokens=TOKENS, ahead=st.sampled_from([0] * 10 + [-1, 1]))
    @precondition(lambda self: len(self.state.live) < 3)
    def admit(self, tokens, ahead):
        name = f"r{len(self.prompts)}"
        self.prompts[name] = tokens
        self.feed(ev.RequestAdmitted(successor(name, tokens), self.state.epoch + ahead))

    @rule(data=st.data())
    @precondition(lambda self: self.state.closing | self.state.leaving)
    def close(self, data):
        self.close_as(data.draw(st.sampled_from(sorted(self.state.closing | self.state.leaving))), data)

    @rule(data=st.data())
    @precondition(lambda self: self.state.closing)
    def close_all(self, data):
        for name in sorted(self.state.closing):
            self.close_as(name, data)

    def close_as(self, name, data):
        left, kept, refusal = data.draw(st.tuples(LEFT, st.sampled_from([True, True, False]), UNKEPT))
        self.feed(ev.RequestClosed(name, self.holding_of(name, *left) if kept else None, None if kept else refusal))

    @rule(data=st.data())
    @precondition(lambda self: self.state.live)
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(self.state.live)))
        assert self.feed(ev.RequestFinished(name))
        self.finished.append(name)

    @rule(event=NOISE, data=st.data())
    def receive_anything(self, event, data):
        """Also what ends a transition early, so that this does not happen all the time."""
        match data.draw(st.sampled_from(["event", "event", "close", "copy", "expire", "cancel"])):
            case "event":
                self.feed(event)
            case "close":
                self.close_as(data.draw(ANYBODY), data)
            case "copy":
                name = data.draw(ANYBODY)
                assert name in self.copies or not self.feed(ev.PagesOffloaded(name, None))
            case "expire" if self.state.transition:
                self.feed(ev.PinsExpired(self.state.transition.id))
            case "cancel" if self.state.epoch > 4:
                self.feed(ev.ScopeCancelled())

    @rule(failure=FAILURE)
    @precondition(lambda self: self.state.place is Stage.RESUME)
    def adopt(self, failure):
        """Device blocks are compared once more when they are installed; only restored pages can be corrupt."""
        certificate = self.state.transition.certificate
        if certificate.tier is Tier.HBM:
            failure = None if self.is_owned(certificate.groups) else Refusal.GENERATION
        assert self.feed(ev.AdoptionFailed(certificate.target, failure) if failure else adopted(certificate))

    def is_owned(self, groups) -> bool:
        return all(self.generation[ref.block] == ref.generation for group in groups for ref in group if ref)

    @rule(data=st.data(), is_there=st.booleans())
    @precondition(lambda self: self.copies)
    def answer_copy(self, data, is_there):
        self.answer(data.draw(st.sampled_from(sorted(self.copies))), is_there=is_there)

    def answer(self, name, *, is_there):
        """Every copy is answered once; whether the answer is still wanted is up to the protocol."""
        held = self.copies.pop(name)
        wanted = self.state.transition is not None and held.request in self.state.transition.copying
        self.ledger.asked.discard(held.request)
        assert self.feed(ev.PagesOffloaded(held.request, host_of(held.groups) if is_there else None)) == wanted

    @rule(data=st.data())
    def reuse_soft_blocks(self, data):
        """What no pin guarantees goes to somebody else, a few blocks of some holding at a time."""
        soft = [held for held in self.state.holdings if self.is_soft(held) and held.request not in self.copies]
        if soft:
            blocks = sorted(blocks_of(data.draw(st.sampled_from(soft))))
            self.reuse(data.draw(st.sets(st.sampled_from(blocks), max_size=3)) if blocks else ())

    def is_soft(self, held: Holding) -> bool:
        return not held.guaranteed or held.request in self.ledger.returned

    @invariant()
    def sound(self):
        check(self.state)

    @invariant()
    def certified_blocks_stay_with_their_owner(self):
        transition = self.state.transition
        if transition and transition.certificate and transition.certificate.tier is Tier.HBM:
            assert self.is_soft(transition.holdings[0]) or self.is_owned(transition.certificate.groups)

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
        for request in self.copies:
            assert not self.feed(ev.PagesOffloaded(rid(request), None))
        assert self.ledger.entered == self.ledger.left, "a pin leaked"
        assert not self.state.live | self.state.leaving


def blocks_of(held: Holding) -> set[BlockId]:
    return {ref.block for group in held.groups for ref in group if ref}


TestScope = Scope.TestCase
TestScope.settings = settings(max_examples=200, stateful_step_count=40)
