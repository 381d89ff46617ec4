"""Compiles a rank's list: each action becomes bound calls, once, in the order in which they run.

A send has arrived when its receiver has used it and sent something back; then the tensor that the
send holds can be freed:

    rank 0   SEND_ACT0 ──▶ … RECV_GRAD0  B0       by B0 its SEND_ACT0 has arrived: rank 1 has sent
    rank 1   RECV_ACT0  F0  B0  SEND_GRAD0        SEND_GRAD0 after the F0 that used it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

import attrs
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from schedir.errors import ExecutionError
from schedir.graph.alive import StageVersions, weight_versions
from schedir.graph.compile import graph_of
from schedir.ir import (
    BACKWARDS,
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    COMPUTE,
    COPIES,
    GATHERS,
    READS_WEIGHTS,
    RECEIVES,
    SENDS,
    STEPS,
    Action,
    Kind,
    Schedule,
    Together,
)
from schedir.runtime.accelerator import Accelerator, Streams
from schedir.runtime.arguments import Declared
from schedir.runtime.boundary import crossed
from schedir.runtime.call import Now
from schedir.runtime.gradients.gradients import Gradients
from schedir.runtime.gradients.reduction import Barrier
from schedir.runtime.program.compute import (
    Pair,
    backward,
    backward_input,
    backward_weight,
    first_forward,
    forward,
    forwards_aside,
    learn_gradients,
    optim_step,
    recompute,
    wait_of,
)
from schedir.runtime.program.instruction import Bound, Instruction, Observer, nothing
from schedir.runtime.program.offloading import (
    Copier,
    offload_activation,
    reload_activation,
    saving,
    using,
)
from schedir.runtime.program.transfers import TRANSFERS, Link, Messenger, waiting
from schedir.runtime.sharded import Sharded, settle
from schedir.runtime.stage.stage import Cell, Cells, Stage
from schedir.runtime.stage.weights import StageWeights
from schedir.runtime.transports import (
    Batch,
    FromBuffers,
    Pool,
    Poster,
    Transport,
    Work,
)


@attrs.frozen
class Parts:
    """The parts that actions are bound to.

    `now` is the current call, which `trains` or not. `gradients` has the work before OPTIM_STEPs.
    `messengers` send and take the messages of the ranks here. Boundaries, by the stage before, are
    `described` in every call, or `declared` by an example instead. `observers` watch every run.
    `beside` sends values from host to host; None if the transport of the payloads does that too.
    `streams` are those of the ranks, and side streams. `pools` are the buffers that ranks send from
    and receive into. `copiers` move offloaded tensors.
    """

    accelerator: Accelerator
    stages: Mapping[int, Stage]
    gradients: Gradients
    messengers: Mapping[int, Messenger]
    described: Collection[int]
    declared: Mapping[int, Declared]
    observers: Sequence[Observer]
    beside: Poster | None
    trains: bool
    now: Now
    streams: Streams
    pools: dict[int, Pool] = attrs.field(factory=dict)
    copiers: dict[int, Copier] = attrs.field(factory=dict)


@attrs.define(eq=False, slots=False)
class RankList:
    """The list of a rank here in `schedule`, to be compiled with these parts.

    `listed_at` has the place of each entry in the list before its receives were moved. `cells` know
    what is sent, except over the `described` boundaries. `autocast` where the caller may compute in
    lower precision.
    """

    _parts: Parts
    _schedule: Schedule
    _rank: int
    _transport: Transport
    _listed_at: Sequence[int]
    _cells_of: Cells
    _autocast: bool
    _described: Collection[int]

    def __attrs_post_init__(self) -> None:
        parts, schedule, rank = self._parts, self._schedule, self._rank
        self._stages, self._now = parts.stages, parts.now
        self._entries, self._actions = schedule.actions[rank], schedule.flat[rank]
        # By turn, which numbers the actions.
        self._cells = {
            turn: self._cells_of[action.stage, action.microbatch]
            for turn, action in enumerate(self._actions)
            if action.microbatch is not None
        }
        graph, own = graph_of(schedule), slice(*schedule.columns.starts[rank : rank + 2])
        self._peers, self._transfers = graph.peers[own].tolist(), graph.crossing[own].tolist()
        self._batches: dict[int, Sequence[int]] = {}  # by transfer, those that come with it
        self._listed = {(action.kind, action.stage, action.microbatch) for action in self._actions}
        self._versions: Mapping[int, StageVersions] = weight_versions(schedule.columns, rank)
        self._arrived = arrivals(schedule, rank)
        self._came: Counter[Barrier] = Counter()
        self._gathered = first_uses(self._actions)
        self._early = early_additions(self._actions)
        self._link = self._over(self._transport)

    def _over(self, poster: Poster) -> Link:
        """What posts payloads over this; on a device from buffers, and into them."""
        device, beside = self._parts.accelerator.device, self._parts.beside or self._transport
        if not self._parts.accelerator.queues:
            return Link(poster, beside, partial(torch.empty_strided, device=device))
        pool = self._parts.pools.setdefault(self._rank, Pool(device))
        return Link(FromBuffers(poster, pool), beside, pool.empty)

    def instructions(self) -> Sequence[Instruction]:
        """The instructions, in the order of the list."""
        aside = forwards_aside(self._entries)
        found: list[Instruction] = []
        turn = 0
        for index, entry in enumerate(self._entries):
            if not isinstance(entry, Together):
                found += self._made(index, turn, self._link)
                turn += 1
                continue
            batch = Batch(self._transport)
            link = self._over(batch)
            turns = range(turn, turn + len(entry.actions))
            turn = turns.stop
            made = [one for each in turns for one in self._made(index, each, link)]
            if entry.actions[0].kind in COMMUNICATION:
                comes = [self._transfers[t] for t in turns if self._actions[t].kind in RECEIVES]
                self._batches.update(dict.fromkeys(comes, comes))
                post = attrs.evolve(made[0], run=batch.post, listed=False, parts=[*made])
                found += [*made, post]
                continue
            wait, made[1] = wait_of(made[1]), attrs.evolve(made[1], wait=None)
            if self._parts.accelerator.queues:
                made = self._abreast(made, index in aside)
            found += [wait, *made]
        return found

    def _made(self, index: int, turn: int, link: Link) -> Iterator[Instruction]:
        """The instructions of the action at a turn: the action itself, and the work before it."""
        action = self._actions[turn]
        make = partial(Instruction, self._rank, index, self._listed_at[index], action)
        stage, kind, cell = self._stages[action.stage], action.kind, self._cells.get(turn)
        transfer = self._transfers[turn]
        if kind is Kind.OPTIM_STEP:
            if self._parts.gradients.updates:
                if not turn or self._actions[turn - 1].kind is not Kind.OPTIM_STEP:
                    yield from self._before_steps(make, turn)
                run = optim_step(stage, self._step(action.stage, turn), self._now)
                yield make(self._in_turn(stage, run, adds=False), computes=True, stage=stage)
        elif stage.sharded is not None and kind in _OF_SHARDED:
            yield make(self._of_sharded(kind, stage.sharded))
        elif kind is Kind.REDUCE_GRAD:
            if stage.replicas is not None:
                meeting = [stage.replicas.barrier]
                run = _if_updating([meeting[0].arrive], self._now)
                yield make(run, after=self._all_at(meeting), does=meeting)
                self._came.update(meeting)
            elif stage.reduction is not None:
                sums = stage.reduction
                run = _if_updating([sums.post], self._now, sums.each_call)
                yield make(run, sums=(sums,))
        elif cell is None:
            raise ExecutionError(f"{action} has no microbatch", rank=self._rank, index=index)
        elif kind in COPIES:
            yield make(self._copy(kind, cell, stage), cell=cell, stage=stage)
        elif kind in COMPUTE:
            receives: list[Work] = []
            wait: Bound | None = None
            after: Sequence[tuple[object, int]] = ()
            if transfer >= 0:
                receives = cell.input_receives if kind is Kind.FORWARD else cell.grad_receives
                wait = waiting(receives, [*map(self._sends, self._arrived.get(turn, ()))])
                # All of its batch is waited for.
                after = [(each, 1) for each in self._batches.get(transfer, [transfer])]
            if stage.sharded is not None and turn in self._gathered:
                wait = _until_gathered(stage.sharded, stage.weights, wait)
            yield make(
                self._compute(turn, kind, cell, stage),
                wait,
                receives,
                after,
                computes=True,
                cell=cell,
                stage=stage,
            )
        else:
            peer = self._peers[turn]
            if peer < 0:
                raise ExecutionError(f"{action} has no peer", rank=self._rank, index=index)
            described, known = TRANSFERS[kind]
            if crossed(action) in self._described:
                run = described(cell, self._parts.messengers[self._rank], peer)
            else:
                run = known(cell, link, peer)
            does = [transfer] if kind in SENDS else ()
            yield make(run, does=does, cell=cell, peer=peer)

    def _compute(self, turn: int, kind: Kind, cell: Cell, stage: Stage) -> Bound:
        trains, versions = self._parts.trains, self._versions[cell.stage]
        version = versions.reads[cell.microbatch]
        before, beyond = (n in self._described for n in (cell.stage - 1, cell.stage))
        replayed = self._lists(Kind.RECOMPUTE, cell)
        earlier = self._earlier(turn, cell)
        if kind is Kind.FORWARD:
            if before or beyond:
                given = self._parts.declared
                run = first_forward(stage, cell, self._now, trains, replayed, beyond, given)
            else:
                run = forward(stage, cell, self._now, trains, replayed)
        elif kind is Kind.RECOMPUTE:
            run = recompute(stage, cell)
        elif kind is Kind.BACKWARD_WEIGHT:
            run = backward_weight(stage, cell, version)
        elif kind is Kind.BACKWARD:
            run = backward(stage, cell, version)
        else:
            run = backward_input(stage, cell, version, earlier)
        if before and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            run = _after(run, partial(learn_gradients, cell))
        if self._lists(Kind.OFFLOAD, cell):
            if kind is (Kind.RECOMPUTE if replayed else Kind.FORWARD):
                run = saving(cell, run)
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                run = using(cell, self._parts.accelerator, run)
        if self._autocast and kind in (Kind.FORWARD, Kind.RECOMPUTE):
            run = _under_autocast(run, self._now)
        if stage.weights.stashes:
            run = _at_version(run, stage.weights, version, versions.last_read[version] == turn)
        if stage.sharded is not None and stage.sharded.free and kind in BACKWARDS:
            run = _after(stage.sharded.only_add, run)
        return self._in_turn(stage, run, kind in COMPLETES_GRADIENTS or earlier is not None)

    def _of_sharded(self, kind: Kind, sharded: Sharded) -> Bound:
        if kind is Kind.REDUCE_GRAD:
            return _if_updating([sharded.reduce], self._now, sharded.each_call)
        return sharded.gather if kind is Kind.UNSHARD else sharded.release

    def _earlier(self, turn: int, cell: Cell) -> Sequence[Cell] | None:
        """The cells that may have gradients to add before the I at a turn adds its own; None where
        its W adds all: where they add to another version's copy, and in a sharded stage, for after
        each I FSDP may widen the sum so far."""
        if turn not in self._early or self._stages[cell.stage].sharded is not None:
            return None
        cells = [self._cells[earlier] for earlier in self._early[turn]]
        reads = self._versions[cell.stage].reads
        versions = {reads[each.microbatch] for each in (*cells, cell)}
        return cells if len(versions) == 1 else None

    def _copy(self, kind: Kind, cell: Cell, stage: Stage) -> Bound:
        copiers = self._parts.copiers
        if self._rank not in copiers:
            copiers[self._rank] = Copier(self._parts.accelerator)
        if kind is Kind.OFFLOAD:
            return offload_activation(cell, stage, copiers[self._rank])
        return reload_activation(cell, copiers[self._rank])

    def _lists(self, kind: Kind, cell: Cell) -> bool:
        """Whether there is such an action of a (stage, microbatch)."""
        return (kind, cell.stage, cell.microbatch) in self._listed

    def _before_steps(self, make: Callable[..., Instruction], turn: int) -> Iterator[Instruction]:
        """The work before the consecutive OPTIM_STEPs from a turn on: 1. finish sums of gradients
        over processes, 2. finish sums over replicas in this process, 3. sum what is split otherwise
        than its parameter, 4. scale sums that need it, 5. pass the barriers: ties, then clipping,
        6. check what is about to be applied.

        The ranks of this process come to the barriers one after the other, and then all leave them.
        """
        gradients = self._parts.gradients
        steps = [
            (action.stage, self._step(action.stage, at))
            for at, action in enumerate(
                takewhile(lambda action: action.kind is Kind.OPTIM_STEP, self._actions[turn:]), turn
            )
        ]
        stages = [self._stages[stage] for stage, _ in steps]
        reductions = [stage.reduction for stage in stages if stage.reduction is not None]
        summed = [stage.replicas.barrier for stage in stages if stage.replicas is not None]
        split = [p for stage in stages for p in stage.weights.newest if isinstance(p, DTensor)]
        barriers = gradients.barriers([stage.index for stage in stages])
        arrive: list[Bound] = [
            *(reduction.finish for reduction in reductions),
            *(barrier.leave for barrier in summed),
            *([partial(settle, split)] if split else []),
            *(self._scale(*step) for step in steps if step in gradients.share_sums),
            *(barrier.arrive for barrier in barriers),
        ]
        yield make(
            _if_updating(arrive, self._now),
            after=self._all_at(summed),
            does=barriers,
            listed=False,
            sums=reductions,
        )
        self._came.update(barriers)
        leave: list[Bound] = [barrier.leave for barrier in barriers]
        if gradients.nonfinite.looks_alone:
            leave.append(partial(gradients.nonfinite.look, steps))
        run = _if_updating(leave, self._now)
        yield make(run, after=self._all_at(barriers), listed=False)

    def _all_at(self, barriers: Iterable[Barrier]) -> list[tuple[object, int]]:
        """What to wait for: that all ranks here have come to these barriers as often as this."""
        return [(barrier, barrier.parties * self._came[barrier]) for barrier in barriers]

    def _scale(self, stage: int, step: int) -> Callable[[], None]:
        weights, replicas = self._stages[stage].weights, self._stages[stage].replicas
        scale = partial(self._parts.gradients.scale, weights.newest, (stage, step))
        return scale if replicas is None else partial(replicas.scale, step, scale)

    def _step(self, stage: int, turn: int) -> int:
        """Which of its stage's OPTIM_STEPs stands at a turn of the rank."""
        return self._versions[stage].steps.index(turn)

    def _abreast(self, pair: Sequence[Instruction], forward_aside: bool) -> list[Instruction]:
        """The two of an overlapped pair on two streams."""
        first, second = pair
        assert first.cell is not None  # a compute action has one
        made = Pair(self._parts.accelerator, self._parts.streams("pairs", self._rank), first.cell)
        return made.abreast(first, second, forward_aside)

    def _in_turn(self, stage: Stage, run: Bound, adds: bool) -> Bound:
        """One that uses a stage which other ranks here use as well waits for these; whether it
        `adds` to the gradients of its rank."""
        if stage.replicas is None:
            return run
        return stage.replicas.in_turn(run, self._rank if adds else None)

    def _sends(self, turn: int) -> list[Work]:
        """Where the works of the send at a turn are."""
        cell = self._cells[turn]
        return cell.output_sends if self._actions[turn].kind is Kind.SEND_ACT else cell.grad_sends


def first_uses(actions: Sequence[Action]) -> set[int]:
    """Where a rank's list first uses the weights of a stage after each gathering of them."""
    fresh: set[int] = set()
    found = set()
    for turn, action in enumerate(actions):
        if action.kind in GATHERS:
            fresh.add(action.stage)
        elif action.kind in READS_WEIGHTS and action.stage in fresh:
            fresh.remove(action.stage)
            found.add(turn)
    return found


def early_additions(actions: Sequence[Action]) -> dict[int, list[int]]:
    """By turn, each I of a rank's list that may add gradients of parameters before its W does, with
    the turns of the Is of its stage that wait for their Ws then.

    No sum changes by that: a microbatch that begins later is completed later, in the same round.

        0I0 0I1 0W0 0W1          both: {0: [], 1: [0]}
        0I0 0I1 0W1 0W0          the second
        0I0 0B1 0W0              none
        0I0 0OPTIM_STEP 0W0      none
    """
    found: dict[int, list[int]] = {}
    waiting: dict[int, list[int]] = {}
    for turn, action in enumerate(actions):
        begun = waiting.setdefault(action.stage, [])
        if action.kind is Kind.BACKWARD_INPUT:
            found[turn] = [*begun]
            begun.append(turn)
        elif action.kind in _ADDS_UP:
            while begun and actions[begun[0]].microbatch != action.microbatch:
                del found[begun.pop(0)]  # overtaken
            del begun[:1]
    return found


def _until_gathered(sharded: Sharded, weights: StageWeights, wait: Bound | None) -> Bound:
    """The wait of the first action that uses the weights, after its own wait: torch puts others in
    the module's place."""

    def call() -> None:
        if wait is not None:
            wait()
        sharded.wait()
        weights.expect_gradients(sharded.parameters)

    return call


def _after(first: Bound, run: Bound) -> Bound:
    def call() -> None:
        first()
        run()

    return call


def _if_updating(calls: Sequence[Bound], now: Now, each_call: bool = False) -> Bound:
    """The calls where OPTIM_STEPs are carried out; with `each_call` in any case. Without an update
    sums can wait, because gradients add up here until there is one."""

    def call() -> None:
        if each_call or now.call.updates:
            for each in calls:
                each()

    return call if calls else nothing


def _at_version(run: Bound, weights: StageWeights, version: int, last_read: bool) -> Bound:
    """A computation at a weight version, after whose last read its copy goes."""

    def versioned() -> None:
        weights.install(version)
        run()
        if last_read:
            weights.release(version)

    return versioned


def _under_autocast(run: Bound, now: Now) -> Bound:
    """A forward in the types that the caller's autocast computes in."""

    def resumed() -> None:
        set_autocast(now.call.autocast, enabled=True)
        try:
            run()
        finally:
            set_autocast(now.call.autocast, enabled=False)

    return resumed


def set_autocast(devices: Iterable[str], enabled: bool) -> None:
    """Turn autocast on or off. It is for forwards alone: backwards and updates compute in the types
    of what they work on."""
    for device in devices:
        torch.set_autocast_enabled(device, enabled)


def arrivals(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """For each compute action of the rank that consumes a receive, the sends that have arrived by
    then: as indices into the rank's list."""
    transfers, start = graph_of(schedule).transfers, int(schedule.columns.starts[rank])
    found: dict[int, list[int]] = {}
    sent = np.flatnonzero((transfers.source == rank) & transfers.matched)
    for peer in sorted({*transfers.target[sent].tolist()}):
        to = sent[transfers.target[sent] == peer]
        answers = (transfers.source == peer) & (transfers.target == rank)
        back = np.flatnonzero(answers & transfers.matched)
        back = back[np.argsort(transfers.send[back])]
        # The first that the peer sends after the compute that has used what it was sent.
        first = np.searchsorted(transfers.send[back], transfers.user[to])
        for send, answer in zip(transfers.send[to].tolist(), first.tolist(), strict=True):
            if answer < len(back):
                # Of all answers from there on, the one that this rank looks at first.
                user = int(transfers.user[back[answer:]].min())
                found.setdefault(user - start, []).append(send - start)
    return found


_ADDS_UP = COMPLETES_GRADIENTS | STEPS
_OF_SHARDED = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
_CARRIED_OUT = {
    *(Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE),
    *(*TRANSFERS, Kind.OFFLOAD, Kind.RELOAD, Kind.OPTIM_STEP, *_OF_SHARDED),
}
"""The kinds that the functions above make bound calls of."""


def expect_carried_out(schedule: Schedule) -> None:
    """Raise ExecutionError, with its place, for an action of a kind that has no bound call yet."""
    columns = schedule.columns
    unknown = columns.where(*(kind for kind in Kind if kind not in _CARRIED_OUT))
    if len(unknown):
        rank, index = columns.position(int(unknown[0]))
        action = columns.action(int(unknown[0]))
        raise ExecutionError(
            f"the executor does not carry out {action.kind.name} yet: schedules with it can be "
            "proved and simulated",
            rank=rank,
            index=index,
            action=action,
        )
