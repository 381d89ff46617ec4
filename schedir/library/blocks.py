"""Building blocks: the actions of one microbatch and their times, which a schedule repeats.

The framework is that of Qi et al. ("Pipeline Parallelism with Controllable Memory", arXiv
2405.15362). An activation lives equally long in each repetition, so the block alone decides how
much memory the schedule takes. The block is repeated and squeezed. Then the gradients of the
weights fill the gaps that the schedule leaves under given costs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from schedir.graph.board import WAYS, Board, Steps, options, play, steps_of
from schedir.ir import Action, Ints, Kind, backward, backward_input, backward_weight, forward
from schedir.library.authoring import Pipeline

if TYPE_CHECKING:
    from schedir.simulator import CostModel

_Number: TypeAlias = int
"""An action of a microbatch: 0 to S - 1 are the FORWARDs of the S stages, S to 2S - 1 the backwards
from the last stage on. Each needs the one before it. The BACKWARD_WEIGHT of backward n is n + S."""

_LENGTH_AND_CHANGE = {
    Kind.FORWARD: (1, 1),
    Kind.BACKWARD: (2, -1),
    Kind.BACKWARD_INPUT: (1, 0),
    Kind.BACKWARD_WEIGHT: (1, -1),
}


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
    one = _block_of(pipe, block)
    order, limit = _squeezed(one, pipe.microbatches)
    return _weights_put_off(one, order, limit, pipe.microbatches, costs)


@attrs.frozen
class _Block:
    """The actions of one microbatch, by number: each action, its rank, how many slots it takes, and
    how many activations it adds on its rank.

    `starts` are the slots of microbatch 0, in the order of the numbers; BACKWARD_WEIGHTs have none.
    Microbatch m runs m times `interval` slots later.
    """

    ranks: int
    stages: int
    interval: int
    actions: dict[_Number, Action]
    rank: dict[_Number, int]
    length: dict[_Number, int]
    change: dict[_Number, int]
    starts: list[int]


def _block_of(pipe: Pipeline, slots: Mapping[Action, int]) -> _Block:
    """The block with microbatch 0's actions in these slots, each BACKWARD_INPUT with its
    BACKWARD_WEIGHT.

    Raises ValueError for a block that `repeat_block` refuses.
    """
    if any(len(ranks) > 1 for ranks in pipe.placement):
        raise ValueError("a block cannot be repeated over a stage on several ranks")
    stages = range(pipe.stages)
    way: list[tuple[Action, ...]] = [(forward(s, 0),) for s in stages]
    way += [(backward(s, 0), backward_input(s, 0)) for s in reversed(stages)]
    chosen = [[action for action in either if action in slots] for either in way]
    if len(slots) != len(way) or any(len(actions) != 1 for actions in chosen):
        raise ValueError(
            "a block has the FORWARD and one of BACKWARD and BACKWARD_INPUT of microbatch 0 at "
            f"each of the {pipe.stages} stages, and nothing else"
        )
    actions = {n: action for n, (action,) in enumerate(chosen)}
    starts = [slots[action] for action in actions.values()]
    for n, action in [*actions.items()]:
        if action.kind is Kind.BACKWARD_INPUT:
            actions[n + pipe.stages] = backward_weight(action.stage, 0)
    rank = {n: pipe.placement[action.stage][0] for n, action in actions.items()}
    length, change = (
        {n: _LENGTH_AND_CHANGE[action.kind][of] for n, action in actions.items()} for of in (0, 1)
    )
    work = Counter[int]()
    for n, many in length.items():
        work[rank[n]] += many
    interval = max(work.values())
    end = 0
    taken: dict[tuple[int, int], Action] = {}
    for n, start in enumerate(starts):
        action = actions[n]
        if start < end:
            raise ValueError(f"{action} is in slot {start}, but its input is there in slot {end}")
        end = start + length[n]
        for slot in range(start, end):
            other = taken.setdefault((rank[n], slot % interval), action)
            if other != action:
                raise ValueError(
                    f"{other} and {action} meet on rank {rank[n]}, as microbatches run {interval} "
                    "slots apart"
                )
    return _Block(pipe.ranks, pipe.stages, interval, actions, rank, length, change, starts)


def _squeezed(block: _Block, microbatches: int) -> tuple[list[list[_Number]], int]:
    """What each rank runs but its BACKWARD_WEIGHTs, in the order of its slots, and the most
    activations that a rank holds.

    `slots[n][m]` is the slot in which microbatch m runs action n; a BACKWARD_WEIGHT starts in the
    first free slot. `taken` has a byte for each slot of a rank, not 0 if the rank works there.
    `live` is the number of activations that a rank holds in a slot, which may not exceed `limit`.
    """
    rank, length, change = block.rank, block.length, block.change
    # Whatever is put off to the end finds room there.
    end = max(block.starts) + (microbatches + 1) * block.interval
    taken = [bytearray(end) for _ in range(block.ranks)]
    live: Ints = np.zeros((block.ranks, end), np.int64)
    slots: dict[_Number, list[int]] = {
        n: [start + m * block.interval for m in range(microbatches)]
        for n, start in enumerate(block.starts)
    }

    def runs() -> list[tuple[_Number, int]]:
        """All actions with their microbatches, by their slots."""
        every = ((n, m) for n in slots for m in range(len(slots[n])))
        return sorted(every, key=lambda run: slots[run[0]][run[1]])

    def take(n: _Number, slot: int, byte: bytes = b"\1") -> None:
        taken[rank[n]][slot : slot + length[n]] = byte * length[n]

    def take_free(n: _Number, low: int, high: int) -> int:
        slot = taken[rank[n]].find(bytes(length[n]), low, high)
        take(n, slot)
        return slot

    def count(n: _Number, slot: int, until: int) -> None:
        """Count action n in `slot` and no longer, or not yet, in `until`."""
        after = 0 if change[n] > 0 else length[n]  # an activation is held to the end of its last
        live[rank[n], slot + after : until + after] += change[n]

    listed = runs()
    for n, m in listed:
        take(n, slots[n][m])
    for n, m in listed:
        if not change[n]:
            weight = n + block.stages
            slots.setdefault(weight, []).append(take_free(weight, slots[n][m] + 1, end))
    for n, m in runs():
        count(n, slots[n][m], end)
    limit = int(live.max())
    for n, m in runs():
        slot = slots[n][m]
        need = n - (1 if n < 2 * block.stages else block.stages)
        after_input = slots[need][m] + length[need] if n else 0
        earliest = max(after_input, slots[n][m - 1] + length[n] if m else 0)
        if earliest < slot and change[n] > 0:
            full = live[rank[n], earliest:slot] >= limit
            if full.any():
                earliest += len(full) - int(full[::-1].argmax())
        if earliest < slot:
            take(n, slot, b"\0")
            slots[n][m] = take_free(n, earliest, slot + length[n])
            count(n, slots[n][m], slot)
    order: list[list[_Number]] = [[] for _ in range(block.ranks)]
    for n, _ in runs():
        if n < 2 * block.stages:
            order[rank[n]].append(n)
    return order, limit


def _weights_put_off(
    block: _Block,
    order: list[list[_Number]],
    limit: int,
    microbatches: int,
    costs: CostModel | None,
) -> tuple[tuple[Action, ...], ...]:
    """The lists with each rank's BACKWARD_WEIGHTs where there is the time for one until its next
    action can run, or where it holds `limit` activations and is to run a FORWARD.

    The rest stays in its order until a rank has run its last FORWARD. Then memory no longer
    decides, and its BACKWARD_INPUTs run as soon as they can; a BACKWARD, being longer, would be in
    the way of a more urgent one. Without costs each action takes its slots.

    Raises SchedirError for costs of other stages or links.
    """
    stages = block.stages
    number = {
        n: WAYS.index((action.kind, False)) * stages + action.stage
        for n, action in block.actions.items()
    }
    weight_of = {number[n - stages]: step for n, step in number.items() if n >= 2 * stages}
    ahead = [deque(number[n] for n in own) for own in order]
    weights: list[deque[int]] = [deque() for _ in order]
    steps = _steps(block, microbatches, costs)
    board, changes = Board.of(steps), steps.changes
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
                    if step in weight_of:
                        weights[rank].append(weight_of[step])
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


def _steps(block: _Block, microbatches: int, costs: CostModel | None) -> Steps:
    """The block's steps. Transfers do not wait for each other, and an activation is held until its
    BACKWARD or BACKWARD_WEIGHT."""
    stages = block.stages
    lasts = {kind: [0.0] * stages for kind, _ in WAYS}
    ways: list[tuple[float, float]] = [(0, 0)] * (2 * stages)
    if costs is None:
        for n, action in block.actions.items():
            lasts[action.kind][action.stage] = block.length[n]
    else:
        lasts = {kind: [*costs.by_stage(kind.cost_name, stages)] for kind in lasts}
        sizes = costs.by_stage("boundary_bytes", stages - 1)
        for n in range(1, 2 * stages):
            source, target = block.rank[n - 1], block.rank[n]
            if source != target:
                size = sizes[min(block.actions[each].stage for each in (n - 1, n))]
                ways[n] = costs.way(source, target, size)[0], 0
    one = [1] * stages
    return steps_of(
        [block.rank[n] for n in range(stages)],
        (microbatches,),
        lasts,
        {"input": ways[:stages], "output gradient": ways[: stages - 1 : -1]},
        {"saved": one, "deferred": one},
    )
