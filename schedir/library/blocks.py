"""Building blocks: what becomes of one microbatch, and when, which a schedule repeats.

The framework is that of Qi et al. ("Pipeline Parallelism with Controllable Memory", arXiv
2405.15362). As an activation lives equally long in each repetition, the block
alone decides how much memory the schedule takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from schedir.ir import Action, Kind
from schedir.library.authoring import Pipeline

Number: TypeAlias = int
"""An action on the way of a microbatch: 0 to S - 1 are the FORWARDs of the S stages, S to 2S - 1
the backwards from the last stage on, each of which needs the one before it; the BACKWARD_WEIGHT of
backward n is n + S."""

Run: TypeAlias = tuple[Number, int]
"""An action of a block, and the microbatch."""


@attrs.frozen
class Block:
    """What becomes of a microbatch, by number: each action, its rank, and the slots that it takes.

    `starts` are the slots of microbatch 0, in the order of the numbers; the BACKWARD_WEIGHTs have
    none. Microbatch m runs m times `interval` later.
    """

    ranks: int
    stages: int
    interval: int
    actions: dict[Number, Action]
    rank: dict[Number, int]
    length: dict[Number, int]
    starts: list[int]

    def is_forward(self, n: Number) -> bool:
        """Whether action n makes an activation."""
        return n < self.stages

    def need_of(self, n: Number) -> Number:
        """The action that makes the input of action n, which is not the first one."""
        return n - 1 if n < 2 * self.stages else n - self.stages


def block_of(pipe: Pipeline, slots: Mapping[Action, int]) -> Block:
    """The block with the actions of microbatch 0 in these slots, each BACKWARD_INPUT with its
    BACKWARD_WEIGHT. Raises ValueError for one that `repeat_block` refuses."""
    if any(len(ranks) > 1 for ranks in pipe.placement):
        raise ValueError("a block cannot be repeated over a stage on several ranks")
    stages = pipe.stages
    actions = {_number(action, stages): action for action in slots}
    if sorted(actions) != list(range(2 * stages)) or len(actions) != len(slots):
        raise ValueError(
            "a block has the FORWARD and one of BACKWARD and BACKWARD_INPUT of microbatch 0 at "
            f"each of the {stages} stages, and nothing else"
        )
    starts = [slots[actions[n]] for n in range(2 * stages)]
    for n, action in [*actions.items()]:
        if action.kind is Kind.BACKWARD_INPUT:
            actions[n + stages] = attrs.evolve(action, kind=Kind.BACKWARD_WEIGHT)
    rank = {n: pipe.placement[action.stage][0] for n, action in actions.items()}
    length = {n: 2 if action.kind is Kind.BACKWARD else 1 for n, action in actions.items()}
    work = [0] * pipe.ranks
    for n, slots_taken in length.items():
        work[rank[n]] += slots_taken
    block = Block(pipe.ranks, stages, max(work), actions, rank, length, starts)
    _check(block)
    return block


def _number(action: Action, stages: int) -> Number:
    """Where an action stands on the way of its microbatch; -1 for what no block holds."""
    if action.microbatch == 0 and action.version is None:
        if action.kind is Kind.FORWARD:
            return action.stage
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return 2 * stages - 1 - action.stage
    return -1


def _check(block: Block) -> None:
    """Raise ValueError for a block that is out of order, or meets itself when it is repeated."""
    end = 0
    taken: dict[tuple[int, int], Number] = {}
    for n, start in enumerate(block.starts):
        action, rank = block.actions[n], block.rank[n]
        if start < end:
            raise ValueError(f"{action} is in slot {start}, but its input is there in slot {end}")
        end = start + block.length[n]
        for slot in range(start, end):
            other = taken.setdefault((rank, slot % block.interval), n)
            if other != n:
                raise ValueError(
                    f"{block.actions[other]} and {action} meet on rank {rank}, as microbatches "
                    f"run {block.interval} slots apart"
                )
