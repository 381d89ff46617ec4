"""Building blocks: the actions of one microbatch and their times, which a schedule repeats.

The framework is that of Qi et al. ("Pipeline Parallelism with Controllable Memory", arXiv
2405.15362). An activation lives equally long in each repetition, so the block alone decides how
much memory the schedule takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from schedir.ir import Action, Kind, backward, backward_input, backward_weight, forward
from schedir.library.authoring import Pipeline

Number: TypeAlias = int
"""An action of a microbatch: 0 to S - 1 are the FORWARDs of the S stages, S to 2S - 1 the backwards
from the last stage on. Each needs the one before it. The BACKWARD_WEIGHT of backward n is n + S."""

Run: TypeAlias = tuple[Number, int]
"""An action of a block, and the microbatch."""

_LENGTH_AND_CHANGE = {
    Kind.FORWARD: (1, 1),
    Kind.BACKWARD: (2, -1),
    Kind.BACKWARD_INPUT: (1, 0),
    Kind.BACKWARD_WEIGHT: (1, -1),
}


@attrs.frozen
class Block:
    """The actions of one microbatch, by number: each action, its rank, how many slots it takes, and
    how many activations it adds on its rank.

    `starts` are the slots of microbatch 0, in the order of the numbers; BACKWARD_WEIGHTs have none.
    Microbatch m runs m times `interval` slots later.
    """

    ranks: int
    stages: int
    interval: int
    actions: dict[Number, Action]
    rank: dict[Number, int]
    length: dict[Number, int]
    change: dict[Number, int]
    starts: list[int]


def block_of(pipe: Pipeline, slots: Mapping[Action, int]) -> Block:
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
    work = [0] * pipe.ranks
    for n, many in length.items():
        work[rank[n]] += many
    interval = max(work)
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
    return Block(pipe.ranks, pipe.stages, interval, actions, rank, length, change, starts)
