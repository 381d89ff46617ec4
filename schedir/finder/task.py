"""What a search is about, in the numbers that its inner loops use.

All microbatches of a stage cost the same, so two of them that change places make the same schedule
by other names: the k-th FORWARD of a stage in its rank's list is that of microbatch k, and so is
its k-th backward. An order is then, for each rank, a list of *steps*, and a step is one number for
kind and stage, `kind * stages + stage`, its kind one of those below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import attrs

from schedir.finder.bounds import Objective
from schedir.finder.stage_costs import StageCosts, by_stage
from schedir.graph.board import WAYS, Steps, steps_of
from schedir.ir import Placement
from schedir.library import Pipeline, wave, wrapped
from schedir.simulator import CostModel

FORWARD, LEAN, BACKWARD, INPUT, WEIGHT, RECOMPUTE = range(6)
"""Kinds of step: F, an F that is to be run again, B, I, W, R."""

PLACEMENTS: dict[str, Callable[[Pipeline], Placement]] = {
    "wrapped": wrapped,
    "wave": wave,
}


@attrs.frozen(eq=False)
class Memory:
    """What a rank keeps: a number for each stage, and the most for each rank.

    A (stage, microbatch) keeps `full` from its FORWARD on, or `lean` until it is run again, and
    `rest` between its I and its W. A stage keeps `gradient` from its first gradients on. `limit` is
    what is left for these.
    """

    full: tuple[float, ...]
    lean: tuple[float, ...]
    rest: tuple[float, ...]
    gradient: tuple[float, ...]
    limit: tuple[float, ...]

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return min(self.limit) < math.inf


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Task:
    """Which work is to be put in order: what it takes, and what may be kept.

    Backwards may be split where `split`, forwards run again where `recompute`.
    """

    microbatches: int
    named: str
    costs: StageCosts
    memory: Memory
    objective: Objective
    split: bool
    recompute: bool

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return self.costs.placement

    @cached_property
    def stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(self.placement)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank, ascending."""
        return [self.costs.stages_of(rank) for rank in range(self.ranks)]

    @cached_property
    def actions(self) -> int:
        """How many F, I and W there are."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def period(self) -> float:
        """The time that the busiest rank takes for a microbatch."""
        costs = self.costs
        whole = [
            min(b, i + w) if self.split else b
            for b, i, w in zip(
                costs.backward, costs.backward_input, costs.backward_weight, strict=True
            )
        ]
        return max(sum(costs.forward[s] + whole[s] for s in held) for held in self.stages_of) or 1

    @cached_property
    def steps(self) -> Steps:
        """What each step takes, waits for, and changes."""
        costs, memory = self.costs, self.memory
        return steps_of(
            self.placement,
            self.microbatches,
            {kind: getattr(costs, kind.name.lower()) for kind, _ in WAYS},
            {
                "input": list(zip(costs.down, costs.down_holds, strict=True)),
                "output gradient": list(zip(costs.up, costs.up_holds, strict=True)),
            },
            {
                "saved": memory.full,
                "kept": memory.lean,
                "deferred": memory.rest,
                "gradient": memory.gradient,
            },
        )

    @cached_property
    def steps_after(self) -> list[list[float]]:
        """What the OPTIM_STEPs of each rank take, in their order."""
        return [[self.costs.optim_step[s] for s in held] for held in self.stages_of]


def placed(ranks: int, chunks: int, named: str) -> tuple[int, ...]:
    """The rank of every stage of a placement that has a name."""
    shape = Pipeline(ranks, 1, chunks, placement=())
    return tuple(held[0] for held in PLACEMENTS[named](shape))


def memory_in_activations(stages: int, ranks: int, most: float, held_until: str) -> Memory:
    """The memory that counts activations of a (stage, microbatch), each held until its "W" or its
    "I"; one that is run again is none before."""
    one, none = (1,) * stages, (0,) * stages
    return Memory(one, none, one if held_until == "W" else none, none, (most,) * ranks)


def memory_in_bytes(
    placement: tuple[int, ...], costs: CostModel, limit: float, reserved: tuple[float, ...]
) -> Memory:
    """The memory that counts bytes; of what a rank may keep, so much is `reserved`."""
    stages, ranks = len(placement), 1 + max(placement)

    def each(name: str) -> tuple[float, ...]:
        return by_stage(name, getattr(costs, name), stages)

    base = list(reserved)
    for stage, rank in enumerate(placement):
        base[rank] += each("weight_bytes")[stage] + each("optimizer_bytes")[stage]
    full = each("activation_bytes")
    return Memory(
        full,
        each("input_bytes"),
        full if costs.deferred_bytes is None else each("deferred_bytes"),
        each("gradient_bytes"),
        tuple(limit - base[rank] for rank in range(ranks)),
    )
