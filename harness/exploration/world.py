"""What surrounds the core in a small world, and every move that can be made there.

Owns: states, moves, and the invariants that a state or a move can show.
Must not know: in which order states are visited.
Strategy: the core is the real `step`; everything else is the smallest thing that keeps its side of ARCHITECTURE.md.
A store with one word per scope, a network that holds messages and hands them over in any order, twice or not at all,
an engine with a pool of blocks, participants that write blocks at their own pace.  What a participant has written
where is kept as a ghost that no process can see: that is what "written before it is read" is checked against.

States are tuples; the core's are interned, so that a state is hashed by small numbers.  Participants have no names:
their columns are sorted, and states that differ by who is who are one.

A block holds `BLOCK_TOKENS` tokens.  A piece of content is named by tenant and prefix (`Prompts`), 0 is anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from retire.core import Effect, Event, Geometry, ScopeState, check, step
from retire.core import effects as do
from retire.core import events as ev
from retire.core.errors import InvariantViolation, ProtocolError
from retire.core.invariants import Invariant, require
from retire.core.transition import place_name
from retire.core.types import (
    BlockId,
    BlockRef,
    Contract,
    Epoch,
    Generation,
    Holding,
    HostRef,
    Inherit,
    KVGroup,
    Refusal,
    RequestId,
    ScopeId,
    Successor,
    TenantId,
    Tier,
    TokenCount,
    TransitionId,
)

BLOCK_TOKENS = 2
GARBAGE = 0
CONTRACTS = {
    "certified": Contract(),
    "none": Contract(inherit=Inherit.NONE),
    "dram": Contract(tier=Tier.DRAM),
}

# A request: admitted and not yet allowed to run; being installed; running; told to close.
WAITING, INSTALLING, RUNNING, CLOSING = range(4)
# A participant's part of a step: under way; written, stopped (the receipt is on its way); the receipt was taken, or
# lost; under way for an engine that waits no more.
WORKING, WROTE, STOPPED, TAKEN_WROTE, TAKEN_STOPPED, LOST, ORPHAN = range(7)


class Request(NamedTuple):
    """One request in the engine.  `blocks`: (block, generation) that it holds.  `written`: blocks known as complete.

    `stepping`: a step that writes the next block is in flight.
    """

    version: int
    phase: int
    blocks: tuple[tuple[int, int], ...]
    written: int
    stepping: bool


class Scope(NamedTuple):
    """One scope, across all processes.

    `word`: in the store; `told`: the greatest that anybody was ever told; `synced`: what a loss of the host leaves.
    `tickets`: the word under which each version was named, the newest last.  `answered`: the newest one's answer came.
    `core`: number of the engine's `ScopeState`.  `seen`: newest version that this engine was sent.
    `copying`: versions whose pages are being copied; `returned`: those whose device blocks were given back.
    """

    word: int
    told: int
    synced: int
    cancelled: bool
    tickets: tuple[int, ...]
    answered: bool
    core: int
    seen: int
    requests: tuple[Request, ...]
    copying: tuple[int, ...]
    returned: tuple[int, ...]

    @property
    def version(self) -> int:
        """The newest."""
        return len(self.tickets)


class Job(NamedTuple):
    """A participant's part of a step: which block it writes, for whom, and how far that is."""

    scope: int
    version: int
    place: int
    block: int
    generation: int
    status: int


class Part(NamedTuple):
    """A participant.  `contents`: what it wrote last into each block.  `echoes`: receipts that will come once more."""

    contents: tuple[int, ...]
    jobs: tuple[Job, ...]
    echoes: tuple[Job, ...]


class Block(NamedTuple):
    """`refs`: requests, pins and old writers that hold it.  `name`: the content it is published as."""

    generation: int
    refs: int
    name: int


class State(NamedTuple):
    """Everything.  `net`: messages under way.  `faults`: how many crashes are still to come at most."""

    scopes: tuple[Scope, ...]
    pool: tuple[Block, ...]
    parts: tuple[Part, ...]
    net: tuple[tuple[Any, ...], ...]
    faults: int


class Move(NamedTuple):
    """What happened.  `good`: a move of a system in which nothing fails and nobody changes his mind."""

    text: str
    good: bool


Step = Callable[[ScopeState, Event, Geometry], tuple[ScopeState, tuple[Effect, ...]]]


Edge = tuple[str, str, str, frozenset[str]]
"""A kind of step of the core: place before, event, place after, kinds of effects."""


def edge(before: ScopeState, event: Event, after: ScopeState, effects: Sequence[Effect]) -> Edge:
    """Of one step."""
    kinds = frozenset(type(effect).__name__ for effect in effects)
    return place_name(before.place), type(event).__name__, place_name(after.place), kinds


class Violated(AssertionError):
    """A state or a move broke an invariant."""


@dataclass(frozen=True)
class World:
    """A named world.

    `prompts`: per scope and version, the tokens of the prompt, a multiple of `BLOCK_TOKENS` and one more.
    `tenants`: of the scopes.  `losses`, `echoes`: whether messages and receipts may be lost, or come twice.
    `crashes`: which processes may die, `faults` times in all.  `stride`: what a loss of the host adds to an epoch.
    """

    name: str
    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    tenants: tuple[str, ...]
    participants: int = 1
    blocks: int = 3
    contracts: tuple[str, ...] = ("certified",)
    losses: bool = False
    echoes: bool = False
    cancels: bool = False
    expiry: bool = False
    host_memory: bool = False
    crashes: tuple[str, ...] = ()
    faults: int = 0
    stride: int = 2


class Rules:
    """Moves of one world.  Keeps what the core answered, so that every question is asked once.

    `relation`: every kind of step that the core has taken.
    `draft`, `core`: what carries moves out and what answers events; others than these have a defect.
    """

    def __init__(self, world: World, draft: type[Draft] | None = None, core: Step = step) -> None:
        self.world = world
        self._draft = draft or Draft
        self._core = core
        self._states: list[ScopeState] = []
        self._numbers: dict[ScopeState, int] = {}
        self._pins: list[tuple[tuple[int, tuple[tuple[int, int], ...]], ...]] = []
        self._memo: dict[Any, tuple[int, tuple[Effect, ...]] | None] = {}
        self._names: dict[tuple[str, tuple[int, ...]], int] = {}
        self.relation: set[Edge] = set()
        self.pieces = [
            [self._pieces_of(tenant, tokens) for tokens in prompts]
            for tenant, prompts in zip(world.tenants, world.prompts, strict=True)
        ]

    def _pieces_of(self, tenant: str, tokens: Sequence[int]) -> tuple[int, ...]:
        ends = range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)
        return tuple(self._names.setdefault((tenant, tuple(tokens[:end])), len(self._names) + 1) for end in ends)

    @property
    def start(self) -> State:
        """Nothing has happened: every scope has a first version, and its request is under way."""
        world = self.world
        scopes = tuple(
            Scope(1, 1, 1, False, (1,), False, self.core_of(scope, 1), 0, (), (), ())
            for scope in range(len(world.prompts))
        )
        part = Part((GARBAGE,) * world.blocks, (), ())
        net = tuple(sorted(("adm", scope, 1) for scope in range(len(scopes))))
        return State(scopes, (Block(1, 0, GARBAGE),) * world.blocks, (part,) * world.participants, net, world.faults)

    # -- the core -------------------------------------------------------------------------------------------------

    def core_of(self, scope: int, epoch: int) -> int:
        """Of an engine that has just started."""
        tenant = TenantId(self.world.tenants[scope])
        return self._number(ScopeState(tenant, ScopeId(f"s{scope}"), Epoch(epoch)))

    @property
    def core_states(self) -> int:
        """How many states of the core were seen."""
        return len(self._states)

    def core(self, number: int) -> ScopeState:
        """The core's state of that number."""
        return self._states[number]

    def _number(self, state: ScopeState) -> int:
        known = self._numbers.get(state)
        if known is None:
            check(state)
            known = self._numbers[state] = len(self._states)
            self._states.append(state)
            self._pins.append(
                tuple(
                    (version_of(held.request), tuple((ref.block, ref.generation) for ref in held.groups[0] if ref))
                    for held in state.holdings
                )
            )
        return known

    def stepped(self, number: int, event: Event, generations: tuple[int, ...]) -> tuple[int, tuple[Effect, ...]] | None:
        """What the core says to an event; None if it has no place there."""
        key = number, event, generations
        if key not in self._memo:
            env = Geometry(
                (KVGroup(BLOCK_TOKENS),),
                lambda block: Generation(generations[block]),
                offloads=self.world.host_memory,
            )
            try:
                before = self._states[number]
                after, effects = self._core(before, event, env)
                self._memo[key] = self._number(after), effects
                self.relation.add(edge(before, event, after, effects))
            except ProtocolError:
                self._memo[key] = None
        return self._memo[key]

    # -- moves ----------------------------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[Move, State]]:
        """Every move from here, and where it leads.  Raises Violated when one breaks an invariant."""
        for make in self._possible(state):
            draft = self._draft(self, state)
            try:
                move = make(draft)
                if move is not None:
                    yield move, draft.frozen()
            except InvariantViolation as error:
                raise Violated(str(error)) from None

    def _possible(self, state: State) -> Iterator[Any]:
        for number, scope in enumerate(state.scopes):
            yield from self._of_runtime(number, scope)
            for request in scope.requests:
                yield from self._of_request(number, request)
            yield from self._of_engine(number, scope)
        for message in state.net:
            yield from self._of_network(message)
        for place, part in enumerate(state.parts):
            if place and part == state.parts[place - 1]:
                continue  # nobody can tell the two apart
            for job in part.jobs:
                yield from self._of_job(place, job)
            for echo in part.echoes:
                yield lambda d, p=place, e=echo: d.echo(p, e)
        if state.faults:
            for process in self.world.crashes:
                yield lambda d, p=process: d.crash(p)

    def _of_network(self, message: tuple[Any, ...]) -> Iterator[Any]:
        yield lambda d: d.deliver(message, keep=False)
        if self.world.echoes:
            yield lambda d: d.deliver(message, keep=True)
        if self.world.losses:
            yield lambda d: d.lose(message)

    def _of_engine(self, number: int, scope: Scope) -> Iterator[Any]:
        for version in scope.copying:
            yield lambda d, v=version: d.copied(number, v, works=True)
            yield lambda d, v=version: d.copied(number, v, works=False)
        core = self._states[scope.core]
        if self.world.expiry and core.transition is not None:
            yield lambda d: d.expire(number)
        if core.epoch < scope.word or (scope.cancelled and not core.cancelled):
            yield lambda d: d.notice(number)

    def _of_runtime(self, number: int, scope: Scope) -> Iterator[Any]:
        world = self.world
        if not scope.cancelled:
            if scope.version < len(world.prompts[number]) and scope.word - scope.synced < world.stride:
                for contract in world.contracts:
                    yield lambda d, c=contract: d.supersede(number, c)
            if world.cancels:
                yield lambda d: d.cancel(number)
            if not scope.answered:
                yield lambda d: d.retry(number)
        if scope.synced != scope.word and "host" in world.crashes:
            yield lambda d: d.sync(number)

    def _of_request(self, number: int, request: Request) -> Iterator[Any]:
        version = request.version
        if request.phase == INSTALLING:
            yield lambda d: d.install(number, version)
        elif request.phase == RUNNING and not request.stepping:
            if request.written < len(self.pieces[number][version - 1]):
                yield lambda d: d.launch(number, version)
            else:
                yield lambda d: d.answer(number, version)
        elif request.phase == CLOSING and request.stepping and (self.world.losses or self.world.faults):
            yield lambda d: d.give_up(number, version)
        elif request.stepping and self.world.losses:
            yield lambda d: d.no_receipt(number, version)

    def _of_job(self, place: int, job: Job) -> Iterator[Any]:
        if job.status in (WORKING, ORPHAN):
            yield lambda d: d.write(place, job)
            yield lambda d: d.stop(place, job)
        elif job.status in (WROTE, STOPPED):
            yield lambda d: d.receipt(place, job, echo=False)
            if self.world.echoes:
                yield lambda d: d.receipt(place, job, echo=True)
            if self.world.losses:
                yield lambda d: d.lose_receipt(place, job)

    # -- what every state must show --------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Raises Violated where a state breaks an invariant; its ghost says what was really written."""
        try:
            self._check(state)
        except InvariantViolation as error:
            raise Violated(str(error)) from None

    def _check(self, state: State) -> None:
        owners: Counter[int] = Counter()
        for number, scope in enumerate(state.scopes):
            core = self._states[scope.core]
            require(scope.word >= scope.told, Invariant.ONE_EPOCH, "the word lies below an epoch that was told")
            require(core.epoch <= scope.word, Invariant.ONE_EPOCH, "the engine is ahead of the store")
            self._check_requests(state, number, owners)
            self._check_pins(state, number, owners)
        old_writers = {(j.block, j.generation) for part in state.parts for j in part.jobs if j.status == ORPHAN}
        owners.update(block for block, _ in old_writers)
        for block, found in enumerate(state.pool):
            counted = owners[block]
            require(found.refs == counted, Invariant.PINS, f"block {block}: {found.refs} references, {counted} owners")
            if found.name:
                self._is_written(state, block, found.name, Invariant.WRITTEN_BEFORE_READ)

    def _check_requests(self, state: State, number: int, owners: Counter[int]) -> None:
        for request in state.scopes[number].requests:
            pieces = self.pieces[number][request.version - 1]
            for place, (block, generation) in enumerate(request.blocks):
                owners[block] += 1
                owned = state.pool[block].generation == generation
                require(owned, Invariant.NO_OLD_WRITER, f"block {block} was handed on under its owner")
                if place < request.written:
                    self._is_written(state, block, pieces[place], Invariant.CERTIFIED)

    def _check_pins(self, state: State, number: int, owners: Counter[int]) -> None:
        scope = state.scopes[number]
        for version, pins in self._pins[scope.core]:
            if version in scope.returned:
                continue
            for place, (block, generation) in enumerate(pins):
                owners[block] += 1
                kept = state.pool[block].generation == generation
                require(kept, Invariant.PINS, f"pinned block {block} was handed on")
                piece = self.pieces[number][version - 1][place]
                self._is_written(state, block, piece, Invariant.WRITTEN_BEFORE_READ)

    def _is_written(self, state: State, block: int, piece: int, invariant: Invariant) -> None:
        for part in state.parts:
            require(part.contents[block] == piece, invariant, f"block {block} is not what it is read as")

    def rests(self, state: State) -> bool:
        """Whether the newest version of every scope has answered, or the scope is cancelled."""
        return all(scope.answered or scope.cancelled for scope in state.scopes)


def version_of(request: RequestId) -> int:
    """A request is named by its version."""
    return int(request)


class Draft:
    """A state that is being changed by one move."""

    def __init__(self, rules: Rules, state: State) -> None:
        self.rules = rules
        self.world = rules.world
        self.scopes = list(state.scopes)
        self.pool = list(state.pool)
        self.parts = list(state.parts)
        self.net = set(state.net)
        self.faults = state.faults

    def frozen(self) -> State:
        """The state it has become, with participants in an order that says nothing."""
        parts = tuple(sorted(self.parts)) if len(self.parts) > 1 else tuple(self.parts)
        return State(tuple(self.scopes), tuple(self.pool), parts, tuple(sorted(self.net)), self.faults)

    def _set(self, number: int, **new: Any) -> Scope:
        self.scopes[number] = found = self.scopes[number]._replace(**new)
        return found

    def _current(self, number: int, version: int) -> bool:
        """A gate's compare: the ticket's word against the store's."""
        scope = self.scopes[number]
        return not scope.cancelled and scope.tickets[version - 1] == scope.word

    # -- the runtime and the store ---------------------------------------------------------------------------------

    def supersede(self, number: int, contract: str) -> Move:
        """ADVANCE: one store, then the news and the successor go out."""
        scope = self.scopes[number]
        word = scope.word + 1
        self._set(number, word=word, told=max(scope.told, word), tickets=(*scope.tickets, word), answered=False)
        version = scope.version + 1
        self.net |= {("adv", number, version, contract), ("adm", number, version)}
        return Move(f"scope {number} is superseded by version {version}, {contract}", good=False)

    def cancel(self, number: int) -> Move:
        """A tombstone."""
        self._set(number, cancelled=True)
        self.net.add(("cancel", number))
        return Move(f"scope {number} is cancelled", good=False)

    def retry(self, number: int) -> Move | None:
        """The runtime sends its newest version again, under the epoch that is current."""
        scope = self.scopes[number]
        message = ("again", number, scope.version)
        if message in self.net or ("adm", number, scope.version) in self.net:
            return None
        if scope.tickets[-1] != scope.word:
            self._set(number, tickets=(*scope.tickets[:-1], scope.word))
        self.net.add(message)
        return Move(f"scope {number} sends version {scope.version} again", good=True)

    def sync(self, number: int) -> Move:
        """The durable record has caught up."""
        self._set(number, synced=self.scopes[number].word)
        return Move(f"the record of scope {number} is synced", good=True)

    # -- the network -----------------------------------------------------------------------------------------------

    def lose(self, message: tuple[Any, ...]) -> Move:
        """It never arrives."""
        self.net.discard(message)
        return Move(f"lost: {message}", good=False)

    def deliver(self, message: tuple[Any, ...], *, keep: bool) -> Move:
        """It arrives; with `keep`, not for the last time."""
        kind, number, *rest = message
        if not keep:
            self.net.discard(message)
        getattr(self, f"_on_{kind}")(number, *rest)
        return Move(f"delivered{', to come again' if keep else ''}: {message}", good=not keep)

    def _on_adv(self, number: int, version: int, contract: str) -> None:
        scope = self.scopes[number]
        self._advance(number, scope.tickets[version - 1], CONTRACTS[contract])

    def _on_adm(self, number: int, version: int) -> None:
        scope = self.scopes[number]
        if not self._current(number, version) or scope.seen >= version:
            return
        if scope.tickets[version - 1] > self.rules.core(scope.core).epoch:
            self._advance(number, scope.tickets[version - 1], CONTRACTS["certified"])  # its epoch is news
        scope = self._set(number, seen=version)
        if any(request.version == version for request in scope.requests):
            return
        tokens = self.world.prompts[number][version - 1]
        who = Successor(RequestId(str(version)), TenantId(self.world.tenants[number]), tokens, "f")
        self._set(number, requests=(*scope.requests, Request(version, WAITING, (), 0, stepping=False)))
        if not self._feed(number, ev.RequestAdmitted(who, Epoch(scope.tickets[version - 1]))):
            self._set(number, requests=scope.requests)

    def _on_again(self, number: int, version: int) -> None:
        """A new request for the same version, which takes the place of one that is gone."""
        if not any(request.version == version for request in self.scopes[number].requests):
            self._set(number, seen=min(self.scopes[number].seen, version - 1))
        self._on_adm(number, version)

    def _on_cancel(self, number: int) -> None:
        self._feed(number, ev.ScopeCancelled())

    def _on_gone(self, number: int, version: int) -> None:
        scope = self.scopes[number]
        self._set(number, seen=min(scope.seen, version - 1))
        if any(request.version == version for request in scope.requests):
            self._end(number, version)

    def _on_frame(self, number: int, version: int, ticket: int) -> None:
        """The gate compares and publishes, with nothing in between."""
        if self._passes_gate(number, ticket):
            scope = self.scopes[number]
            current = ticket == scope.word and not scope.cancelled
            require(current, Invariant.CURRENT_OUTPUT, f"a frame of epoch {ticket} went out at {scope.word}")
            if version == scope.version:
                self._set(number, answered=True)

    def _passes_gate(self, number: int, ticket: int) -> bool:
        scope = self.scopes[number]
        return ticket == scope.word and not scope.cancelled

    # -- the engine ------------------------------------------------------------------------------------------------

    def _feed(self, number: int, event: Event) -> bool:
        """Hand an event to the core and carry out what it wants; whether the event had a place."""
        generations = tuple(block.generation for block in self.pool)
        answer = self.rules.stepped(self.scopes[number].core, event, generations)
        if answer is None:
            return False
        self._set(number, core=answer[0])
        closed: list[int] = []
        for effect in answer[1]:
            if isinstance(effect, do.CloseRequests):
                closed += sorted(version_of(request) for request in effect.requests)
            else:
                self._carry_out(number, effect)
        for version in closed:
            self._request(number, version, phase=CLOSING)
        for version in closed:
            found = self._found(number, version)
            if found is not None and not found.stepping:
                self._close(number, version, every_receipt=True)
        return True

    def _carry_out(self, number: int, effect: Effect) -> None:
        if isinstance(effect, (do.StartCold, do.StartFresh)):
            self._start(number, version_of(effect.request))
        elif isinstance(effect, do.InstallCertificate):
            self._request(number, version_of(effect.certificate.target), phase=INSTALLING)
        elif isinstance(effect, do.ReleasePins):
            for held in effect.holdings:
                self._unpin(number, held)
        elif isinstance(effect, do.OffloadPages):
            copying = (*self.scopes[number].copying, version_of(effect.holding.request))
            self._set(number, copying=tuple(sorted(copying)))
        elif isinstance(effect, do.ReturnBlocks):
            self._return(number, effect.holding)

    def _advance(self, number: int, epoch: int, contract: Contract) -> None:
        old = self.rules.core(self.scopes[number].core).epoch
        if epoch > old:
            self._feed(number, ev.EpochAdvanced(TransitionId(f"t{epoch}"), old, Epoch(epoch), contract))

    def notice(self, number: int) -> Move:
        """The engine compares for itself: the news is late or lost."""
        scope = self.scopes[number]
        if scope.cancelled:
            self._feed(number, ev.ScopeCancelled())
        else:
            self._advance(number, scope.word, CONTRACTS["certified"])
        return Move(f"the engine notices that scope {number} is at {scope.word}", good=True)

    def expire(self, number: int) -> Move | None:
        """Nobody came for the pins in time."""
        transition = self.rules.core(self.scopes[number].core).transition
        assert transition is not None
        if not self._feed(number, ev.PinsExpired(transition.id)):
            return None
        return Move(f"the pins of scope {number} expire", good=False)

    def _start(self, number: int, version: int) -> None:
        """Let it run, with what the prefix cache has."""
        pieces, hit = self.rules.pieces[number][version - 1], list[tuple[int, int]]()
        for piece in pieces:
            block = next((b for b, found in enumerate(self.pool) if found.name == piece), None)
            if block is None:
                break
            self._take(block)
            hit.append((block, self.pool[block].generation))
        self._request(number, version, phase=RUNNING, blocks=tuple(hit), written=len(hit))

    def install(self, number: int, version: int) -> Move:
        """RESUME: alias what was certified, if it is still what it was."""
        transition = self.rules.core(self.scopes[number].core).transition
        assert transition is not None
        assert transition.certificate is not None
        certificate, taken = transition.certificate, list[tuple[int, int]]()
        request = RequestId(str(version))
        for page in certificate.groups[0]:
            assert page is not None
            if isinstance(page, HostRef):
                block = self._allocate()
                if block is None:
                    break
                self._restored(block, page.digest)
            else:
                if not self._is_as_certified(page):
                    break
                block = int(page.block)
                self._take(block)
            taken.append((block, self.pool[block].generation))
        if len(taken) < len(certificate.groups[0]):
            for block, _ in taken:
                self._drop(block)
            lost = Refusal.GENERATION if certificate.tier is Tier.HBM else Refusal.TRANSFER
            self._request(number, version, phase=WAITING)
            self._feed(number, ev.AdoptionFailed(request, lost))
            return Move(f"scope {number} cannot adopt for version {version}: {lost.value}", good=True)
        self._request(number, version, phase=RUNNING, blocks=tuple(taken), written=len(taken))
        self._feed(number, ev.CertificateAdopted(request, (tuple(block for block, _ in taken),)))
        return Move(f"scope {number}, version {version} adopts {len(taken)} blocks", good=True)

    def _is_as_certified(self, page: BlockRef) -> bool:
        return self.pool[page.block].generation == page.generation

    def _restored(self, block: int, piece: int) -> None:
        """A verified copy from host memory: every participant has it."""
        self.parts = [
            part._replace(contents=(*part.contents[:block], piece, *part.contents[block + 1 :])) for part in self.parts
        ]

    def launch(self, number: int, version: int) -> Move | None:
        """A step that writes the next block, unless the request has lost authority."""
        if not self._may_launch(number, version):
            return None
        block = self._allocate()
        if block is None:
            return None
        require(self._current(number, version), Invariant.ANY_STAGE, f"a launch of a revoked version {version}")
        found = self._found(number, version)
        assert found is not None
        generation = self.pool[block].generation
        self._request(number, version, blocks=(*found.blocks, (block, generation)), stepping=True)
        job = Job(number, version, found.written, block, generation, WORKING)
        self.parts = [part._replace(jobs=tuple(sorted((*part.jobs, job)))) for part in self.parts]
        return Move(f"scope {number}, version {version}: a step begins to write block {block}", good=True)

    def _may_launch(self, number: int, version: int) -> bool:
        return self._current(number, version)

    def answer(self, number: int, version: int) -> Move:
        """Its prompt is computed: the first frame goes to the gate, and that was all."""
        ticket = self.scopes[number].tickets[version - 1]
        self.net.add(("frame", number, version, ticket))
        self._end(number, version)
        return Move(f"scope {number}, version {version}: a frame goes to the gate", good=True)

    def _end(self, number: int, version: int) -> None:
        """A request is gone; what its step still writes is kept from others until it is over."""
        found = self._found(number, version)
        assert found is not None
        self._orphan(number, found)
        for block, _ in found.blocks:
            self._drop(block)
        self._forget(number, version)
        self._feed(number, ev.RequestFinished(RequestId(str(version))))

    def _close(self, number: int, version: int, *, every_receipt: bool) -> None:
        """FENCE of one request is over: what is complete is pinned and offered."""
        found = self._found(number, version)
        assert found is not None
        frontier = self._frontier(found) if every_receipt else 0
        held = None
        if frontier:
            kept = tuple(BlockRef(BlockId(b), Generation(g)) for b, g in found.blocks[:frontier])
            held = Holding(
                RequestId(str(version)),
                TenantId(self.world.tenants[number]),
                self.world.prompts[number][version - 1],
                TokenCount(frontier * BLOCK_TOKENS),
                "f",
                (kept,),
            )
        for block, _ in found.blocks[frontier:]:
            self._drop(block)
        self._forget(number, version)
        if not self._feed(number, ev.RequestClosed(RequestId(str(version)), held)) and held is not None:
            self._unpin(number, held)

    def _frontier(self, request: Request) -> int:
        """How many blocks every participant has completely written."""
        return request.written

    def give_up(self, number: int, version: int) -> Move | None:
        """A receipt does not come: the scope goes on cold, and the block waits for its writers."""
        found = self._found(number, version)
        assert found is not None
        if not any(self._is_of(job, number, found) and job.status in (LOST, WORKING) for job in self._jobs()):
            return None
        self._orphan(number, found)
        self._close(number, version, every_receipt=False)
        return Move(f"scope {number}, version {version}: no receipt comes", good=True)

    def no_receipt(self, number: int, version: int) -> Move | None:
        """A step of a current request never ends: the engine gives itself up and is started again."""
        found = self._found(number, version)
        assert found is not None
        if not any(self._is_of(job, number, found) and job.status == LOST for job in self._jobs()):
            return None
        self._lost_engine()
        return Move(f"scope {number}, version {version}: a step never ends, the engine starts anew", good=True)

    def _orphan(self, number: int, request: Request) -> None:
        """Nobody waits for its step any more; a reference stays on the block that is being written."""
        if not request.stepping:
            return
        block, generation = request.blocks[-1]
        working = False
        for place, part in enumerate(self.parts):
            jobs = []
            for job in part.jobs:
                if not self._is_of(job, number, request):
                    jobs.append(job)
                elif job.status == WORKING:
                    jobs.append(job._replace(status=ORPHAN))
                    working = True
            self.parts[place] = part._replace(jobs=tuple(sorted(jobs)))
        if working:
            assert self.pool[block].generation == generation
            self._take(block)

    def _is_of(self, job: Job, number: int, request: Request) -> bool:
        return (
            (job.scope, job.version) == (number, request.version)
            and request.stepping
            and (job.block, job.generation) == request.blocks[-1]
            and job.status != ORPHAN
        )

    def copied(self, number: int, version: int, *, works: bool) -> Move:
        """The answer to a copy: what every participant has in blocks that are still the holding's."""
        scope = self._set(number, copying=tuple(v for v in self.scopes[number].copying if v != version))
        request, host = RequestId(str(version)), None
        held = next((h for h in self.rules.core(scope.core).holdings if h.request == request), None)
        if works and held is not None:
            pages = [
                HostRef(100 + piece, piece) if (piece := self._read(ref)) is not None else None
                for ref in held.groups[0]
                if ref is not None
            ]
            host = (tuple(pages),)
        self._feed(number, ev.PagesOffloaded(request, host))
        return Move(f"scope {number}: the copy of version {version} {'is there' if works else 'fails'}", good=True)

    def _read(self, ref: BlockRef) -> int | None:
        """What a page holds for all participants; None where it belongs to somebody else by now."""
        if self.pool[ref.block].generation != ref.generation:
            return None
        found = {part.contents[ref.block] for part in self.parts}
        require(
            len(found) == 1, Invariant.WRITTEN_BEFORE_READ, f"block {ref.block} is copied and not everywhere written"
        )
        return found.pop()

    # -- participants ----------------------------------------------------------------------------------------------

    def write(self, place: int, job: Job) -> Move:
        """All layers of it are written."""
        part = self.parts[place]
        piece = self.rules.pieces[job.scope][job.version - 1][job.place]
        contents = (*part.contents[: job.block], piece, *part.contents[job.block + 1 :])
        self.parts[place] = part._replace(contents=contents)
        self._worked(place, job, WROTE)
        return Move(f"participant {place} has written block {job.block} for version {job.version}", good=True)

    def stop(self, place: int, job: Job) -> Move | None:
        """A safe point shows another word: half a block is written."""
        if self._current(job.scope, job.version):
            return None
        part = self.parts[place]
        contents = (*part.contents[: job.block], GARBAGE, *part.contents[job.block + 1 :])
        self.parts[place] = part._replace(contents=contents)
        self._worked(place, job, STOPPED)
        return Move(f"participant {place} stops writing block {job.block} for version {job.version}", good=True)

    def _worked(self, place: int, job: Job, status: int) -> None:
        if job.status != ORPHAN:
            self._job(place, job, job._replace(status=status))
            return
        self._job(place, job, None)
        others = [o for o in self._jobs() if o.status == ORPHAN and (o.block, o.generation) == job[3:5]]
        if not others:
            self._drop(job.block)

    def receipt(self, place: int, job: Job, *, echo: bool) -> Move:
        """The engine hears of it."""
        taken = job._replace(status=TAKEN_WROTE if job.status == WROTE else TAKEN_STOPPED)
        self._job(place, job, taken)
        if echo:
            part = self.parts[place]
            self.parts[place] = part._replace(echoes=tuple(sorted({*part.echoes, taken})))
        self._counted(job.scope, job.version)
        return Move(
            f"receipt of participant {place} for block {job.block}{', to come again' if echo else ''}", not echo
        )

    def lose_receipt(self, place: int, job: Job) -> Move:
        """It never arrives."""
        self._job(place, job, job._replace(status=LOST))
        return Move(f"the receipt of participant {place} for block {job.block} is lost", good=False)

    def echo(self, place: int, echo: Job) -> Move:
        """A receipt comes once more: whoever has gone on since must not take it for his."""
        part = self.parts[place]
        self.parts[place] = part._replace(echoes=tuple(e for e in part.echoes if e != echo))
        for job in part.jobs:
            if self._is_same_step(job, echo) and job.status in (WORKING, WROTE, STOPPED):
                self._job(place, job, job._replace(status=echo.status))
                self._counted(job.scope, job.version)
                break
        return Move(f"the receipt of participant {place} for block {echo.block} comes again", good=True)

    def _is_same_step(self, job: Job, echo: Job) -> bool:
        return job[:5] == echo[:5]

    def _counted(self, number: int, version: int) -> None:
        """The step is over once every participant's receipt is there."""
        found = self._found(number, version)
        if found is None or not found.stepping:
            return
        mine = [job for job in self._jobs() if self._is_of(job, number, found)]
        if not self._complete(mine):
            return
        for place, part in enumerate(self.parts):
            self.parts[place] = part._replace(jobs=tuple(j for j in part.jobs if not self._is_of(j, number, found)))
        wrote = self._wrote(mine)
        self._request(number, version, stepping=False, written=found.written + wrote)
        found = self._found(number, version)
        assert found is not None
        if wrote and self._may_publish(number, version):
            self._publish(number, found)
        if found.phase == CLOSING:
            self._close(number, version, every_receipt=True)
        elif not wrote:
            block, _ = found.blocks[-1]
            self._request(number, version, blocks=found.blocks[:-1])
            self._drop(block)

    def _complete(self, jobs: Sequence[Job]) -> bool:
        return len(jobs) == len(self.parts) and all(job.status in (TAKEN_WROTE, TAKEN_STOPPED) for job in jobs)

    def _wrote(self, jobs: Sequence[Job]) -> bool:
        return all(job.status == TAKEN_WROTE for job in jobs)

    def _may_publish(self, number: int, version: int) -> bool:
        return self._current(number, version)

    def _publish(self, number: int, request: Request) -> None:
        """The prefix cache may serve it now."""
        piece = self.rules.pieces[number][request.version - 1][request.written - 1]
        block, _ = request.blocks[request.written - 1]
        if all(found.name != piece for found in self.pool):
            self.pool[block] = self.pool[block]._replace(name=piece)

    # -- deaths ----------------------------------------------------------------------------------------------------

    def crash(self, process: str) -> Move:
        """A process is gone, and another one takes its place."""
        self.faults -= 1
        getattr(self, f"_lost_{process}")()
        return Move(f"the {process} dies", good=False)

    def _lost_engine(self) -> None:
        """Its requests, its pool and its workers with it."""
        for number, scope in enumerate(self.scopes):
            core = self.rules.core_of(number, scope.word)
            self._set(number, core=core, seen=0, requests=(), copying=(), returned=())
        self.pool = [Block(1, 0, GARBAGE)] * len(self.pool)
        self.parts = [Part((GARBAGE,) * len(self.pool), (), ())] * len(self.parts)

    def _lost_api(self) -> None:
        """Its streams; the engine hears of each sooner or later.  The store stays."""
        self.net = {message for message in self.net if message[0] != "frame"}
        for number, scope in enumerate(self.scopes):
            self.net |= {("gone", number, request.version) for request in scope.requests}

    def _lost_host(self) -> None:
        """Everything but what was synced; every epoch begins a stride above that."""
        self.net = set()
        for number, scope in enumerate(self.scopes):
            if not scope.cancelled:
                word = self._recovered(scope)
                self._set(number, word=word, told=max(scope.told, word), synced=word)
        self._lost_engine()

    def _recovered(self, scope: Scope) -> int:
        return scope.synced + self.world.stride

    # -- small things ----------------------------------------------------------------------------------------------

    def _jobs(self) -> Iterator[Job]:
        for part in self.parts:
            yield from part.jobs

    def _job(self, place: int, old: Job, new: Job | None) -> None:
        part = self.parts[place]
        jobs = [job for job in part.jobs if job != old] + ([new] if new is not None else [])
        self.parts[place] = part._replace(jobs=tuple(sorted(jobs)))

    def _found(self, number: int, version: int) -> Request | None:
        return next((r for r in self.scopes[number].requests if r.version == version), None)

    def _request(self, number: int, version: int, **new: Any) -> None:
        requests = self.scopes[number].requests
        self._set(number, requests=tuple(r._replace(**new) if r.version == version else r for r in requests))

    def _forget(self, number: int, version: int) -> None:
        scope = self.scopes[number]
        self._set(number, requests=tuple(r for r in scope.requests if r.version != version))

    def _take(self, block: int) -> None:
        found = self.pool[block]
        self.pool[block] = found._replace(refs=found.refs + 1)

    def _drop(self, block: int) -> None:
        found = self.pool[block]
        require(found.refs > 0, Invariant.PINS, f"block {block} is given back twice")
        self.pool[block] = found._replace(refs=found.refs - 1)

    def _allocate(self) -> int | None:
        """A block that nobody holds, rather one that the prefix cache does not name."""
        free = [(bool(found.name), block) for block, found in enumerate(self.pool) if self._is_free(found)]
        if not free:
            return None
        _, block = min(free)
        writers = [job for job in self._jobs() if job.block == block and job.status in (WORKING, ORPHAN)]
        require(not writers, Invariant.NO_OLD_WRITER, f"block {block} has an old writer")
        self.pool[block] = Block(self.pool[block].generation + 1, 1, GARBAGE)
        return block

    def _is_free(self, block: Block) -> bool:
        return block.refs == 0

    def _unpin(self, number: int, held: Holding) -> None:
        version = version_of(held.request)
        returned = self.scopes[number].returned
        if version in returned:
            self._set(number, returned=tuple(v for v in returned if v != version))
            return
        for ref in held.groups[0]:
            assert ref is not None
            self._drop(ref.block)

    def _return(self, number: int, held: Holding) -> None:
        self._unpin(number, held)
        returned = self.scopes[number].returned
        self._set(number, returned=tuple(sorted((*returned, version_of(held.request)))))
