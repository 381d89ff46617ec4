"""Building blocks: the actions of one microbatch and their times, which a schedule repeats.

The framework is that of Qi et al. ("Pipeline Parallelism with Controllable Memory", arXiv
2405.15362). An activation lives equally long in each repetition, so the block alone decides how
much memory the schedule takes. The block is repeated and squeezed. Then the gradients of the
weights fill the gaps that the schedule leaves under given costs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from schedir.graph.board import WAYS, Board, Order, Steps, options, play, steps_of
from schedir.ir import Action, Ints, Kind, backward, backward_input, forward
from schedir.library.authoring import Pipeline

if TYPE_CHECKING:
    from schedir.simulator import CostModel

_Step: TypeAlias = int
"""An action of a microbatch, as a Board numbers it: `way * stages + stage`, a place in WAYS."""

_WEIGHT = WAYS.index((Kind.BACKWARD_WEIGHT, False))


def repeat_block(
    pipe: Pipeline, block: Mapping[Action, int], costs: CostModel | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The compute of every rank, without updates, from the actions of one microbatch.

    The method is that of Qi et al. (building blocks and squeezing, arXiv 2405.15362). `block` holds
    the slot in which microbatch 0 runs the FORWARD and the BACKWARD or BACKWARD_INPUT of every
    stage. A FORWARD takes one slot, a BACKWARD two, and a BACKWARD_INPUT one; its BACKWARD_WEIGHT
    takes one slot later on. Microbatch m runs m intervals later. An interval is the number of slots
    that the busiest rank works for a microbatch.

    Then the repeated block is squeezed. One by one, in the order of their slots, actions move to
    the earliest slot that is free, after their inputs, and within the activations that the repeated
    block holds at its peak. Last, the BACKWARD_WEIGHTs are put off: each runs when its rank would
    otherwise wait, or when the rank lacks memory for its next FORWARD. `costs` decide when a rank
    waits; without them the slots do.

    Raises ValueError for a block with missing or other actions, an action before its input is
    there, two actions in one slot of a rank once the block is repeated, and a stage on several
    ranks. Raises SchedirError for costs of other stages or links.

    >>> import schedir
    >>> pipe = schedir.Pipeline(ranks=2, microbatches=2, chunks=1, placement=((0,), (1,)))
    >>> forwards = {schedir.forward(0, 0): 0, schedir.forward(1, 0): 1}
    >>> backwards = {schedir.backward(1, 0): 2, schedir.backward(0, 0): 4}
    >>> for actions in schedir.repeat_block(pipe, forwards | backwards):
    ...     print(*actions)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    if any(len(ranks) > 1 for ranks in pipe.placement):
        raise ValueError("a block cannot be repeated over a stage on several ranks")
    stages = range(pipe.stages)
    way: list[tuple[Action, ...]] = [(forward(s, 0),) for s in stages]
    way += [(backward(s, 0), backward_input(s, 0)) for s in reversed(stages)]
    chosen = [[action for action in either if action in block] for either in way]
    if len(block) != len(way) or any(len(actions) != 1 for actions in chosen):
        raise ValueError(
            "a block has the FORWARD and one of BACKWARD and BACKWARD_INPUT of microbatch 0 at "
            f"each of the {pipe.stages} stages, and nothing else"
        )
    placement = [rank for (rank,) in pipe.placement]
    # A FORWARD takes one slot, and a backward two, with its BACKWARD_WEIGHT.
    interval = 3 * max(Counter(placement).values())
    starts: dict[_Step, int] = {}
    end = 0
    taken: dict[tuple[int, int], Action] = {}
    for (action,) in chosen:
        start, rank = block[action], placement[action.stage]
        if start < end:
            raise ValueError(f"{action} is in slot {start}, but its input is there in slot {end}")
        end = start + action.kind.meaning.cost
        for slot in range(start, end):
            other = taken.setdefault((rank, slot % interval), action)
            if other != action:
                raise ValueError(
                    f"{other} and {action} meet on rank {rank}, as microbatches run {interval} "
                    "slots apart"
                )
        starts[WAYS.index((action.kind, False)) * pipe.stages + action.stage] = start
    steps = _steps(placement, pipe.microbatches, costs)
    order, limit = _squeezed(steps, starts, interval)
    return _weights_put_off(steps, order, limit)


def _steps(placement: Sequence[int], microbatches: int, costs: CostModel | None) -> Steps:
    """The steps of a pipeline, in slots without costs. Transfers do not wait for each other, and an
    activation is held until its BACKWARD or BACKWARD_WEIGHT.

    Raises SchedirError for costs of other stages or links.
    """
    stages = len(placement)
    one = [1] * stages
    lasts: dict[Kind, Sequence[float]] = {kind: [kind.meaning.cost] * stages for kind, _ in WAYS}
    travels = {value: [(0.0, 0.0)] * stages for value in ("input", "output gradient")}
    if costs is not None:
        lasts = {kind: costs.by_stage(kind.cost_name, stages) for kind in lasts}
        sizes = costs.by_stage("boundary_bytes", stages - 1)
        for stage, (rank, after) in enumerate(pairwise(placement)):
            travels["input"][stage + 1] = costs.way(rank, after, sizes[stage])[0], 0
            travels["output gradient"][stage] = costs.way(after, rank, sizes[stage])[0], 0
    return steps_of(placement, (microbatches,), lasts, travels, {"saved": one, "deferred": one})


def _squeezed(steps: Steps, starts: dict[_Step, int], interval: int) -> tuple[Order, int]:
    """What each rank runs but its BACKWARD_WEIGHTs, in the order of its slots, and the most
    activations that a rank holds.

    `starts` are the slots of microbatch 0; each step needs the one before it. Microbatch m runs m
    times `interval` slots later. `slots[step, m]` is the slot in which microbatch m runs a step; a
    BACKWARD_WEIGHT starts in the first free slot. `taken` has a byte for each slot of a rank, not 0
    if the rank works there. `live` is the number of activations that a rank holds in a slot, which
    may not exceed `limit`.
    """
    (microbatches,), stages, changes = steps.microbatches, steps.depth, steps.changes
    # Whatever is put off to the end finds room there.
    end = max(starts.values()) + (microbatches + 1) * interval
    taken = [bytearray(end) for _ in steps.queues_of]
    live: Ints = np.zeros((len(taken), end), np.int64)
    slots = {
        (step, m): start + m * interval
        for step, start in starts.items()
        for m in range(microbatches)
    }
    needs = {step: need for need, step in pairwise(starts)}
    rank = {step: steps.placement[step % stages] for step in range(len(changes))}
    length = {step: WAYS[step // stages][0].meaning.cost for step in rank}

    def runs() -> list[tuple[_Step, int]]:
        """All steps with their microbatches, by their slots."""
        return sorted(slots, key=slots.__getitem__)

    def take(step: _Step, slot: int, byte: bytes = b"\1") -> None:
        taken[rank[step]][slot : slot + length[step]] = byte * length[step]

    def take_free(step: _Step, low: int, high: int) -> int:
        slot = taken[rank[step]].find(bytes(length[step]), low, high)
        take(step, slot)
        return slot

    def count(step: _Step, slot: int, until: int) -> None:
        """Count a step in `slot` and no longer, or not yet, in `until`."""
        # An activation is held to the end of its last step.
        after = 0 if changes[step] > 0 else length[step]
        live[rank[step], slot + after : until + after] += int(changes[step])

    for run, slot in slots.items():
        take(run[0], slot)
    for step, m in runs():
        if not changes[step]:
            weight = _WEIGHT * stages + step % stages
            needs[weight] = step
            slots[weight, m] = take_free(weight, slots[step, m] + 1, end)
    for run, slot in slots.items():
        count(run[0], slot, end)
    limit = int(live.max())
    for run in runs():
        (step, m), slot = run, slots[run]
        before = [each for each in ((needs.get(step, -1), m), (step, m - 1)) if each in slots]
        earliest = max((slots[each] + length[each[0]] for each in before), default=0)
        if earliest < slot and changes[step] > 0:
            full = live[rank[step], earliest:slot] >= limit
            if full.any():
                earliest += len(full) - int(full[::-1].argmax())
        if earliest < slot:
            take(step, slot, b"\0")
            slots[run] = take_free(step, earliest, slot + length[step])
            count(step, slots[run], slot)
    order: Order = [[] for _ in taken]
    for step, _ in runs():
        if step in starts:
            order[rank[step]].append(step)
    return order, limit


def _weights_put_off(steps: Steps, order: Order, limit: int) -> tuple[tuple[Action, ...], ...]:
    """The lists with each rank's BACKWARD_WEIGHTs where there is the time for one until its next
    action can run, or where it holds `limit` activations and is to run a FORWARD.

    The rest stays in its order until a rank has run its last FORWARD. Then memory no longer
    decides, and its BACKWARD_INPUTs run as soon as they can; a BACKWARD, being longer, would be in
    the way of a more urgent one.
    """
    board, changes, stages = Board.of(steps), steps.changes, steps.depth
    ahead = [deque(own) for own in order]
    weights: list[deque[_Step]] = [deque() for _ in order]
    forwards = [sum(changes[step] > 0 for step in own) for own in ahead]

    def choose(rank: int, now: float) -> tuple[float, int]:
        """What a rank that is free runs now, or by when something arrives for it."""
        arrivals = {value * stages + stage: at for at, value, stage in options(board, rank, now)}
        next_arrival, coming = math.inf, -1
        for step in ahead[rank]:
            if board.held[rank] + changes[step] <= limit:
                arrival = arrivals.get(steps.queue[step], math.inf)
                if arrival <= now:
                    ahead[rank].remove(step)
                    forwards[rank] -= changes[step] > 0
                    if not changes[step]:
                        weights[rank].append(_WEIGHT * stages + step % stages)
                    return now, step
                if arrival < next_arrival:
                    next_arrival, coming = arrival, step
            if forwards[rank] or changes[step] < 0:
                break
        if weights[rank] and now + steps.lasts[weights[rank][0]] <= next_arrival:
            return now, weights[rank].popleft()
        return next_arrival, coming

    filled = play(board, choose)
    if filled is None:
        raise AssertionError("a block that fits the limit is blocked by it")
    turns = [count() for _ in steps.queue]
    return tuple(
        tuple(Action(WAYS[step // stages][0], step % stages, next(turns[step])) for step in own)
        for own in filled
    )
