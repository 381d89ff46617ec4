"""What a search is asked for: checked, and made the tasks that it is about."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import attrs

from schedir.errors import SchedirError
from schedir.finder.bounds import Objective, lower_bound
from schedir.finder.stage_costs import StageCosts
from schedir.finder.task import (
    PLACEMENTS,
    Memory,
    Task,
    memory_in_activations,
    memory_in_bytes,
    placed,
)
from schedir.graph.alive import HELD_UNTIL, HeldUntil
from schedir.ir import expect_channel
from schedir.library import expect_fewer
from schedir.simulator import CostModel

_ALIASES = {"v": "wave"}
PLACEMENT_NAMES = (*PLACEMENTS, *_ALIASES)
"""What a placement may be called."""
OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
"""What may be least."""


def _at_least(least: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        if type(value) is not int:
            raise TypeError(f"{attribute.name} must be an int, not {value!r}")
        if value < least:
            raise ValueError(f"{attribute.name} must be at least {least}, not {value}")

    return check


_NAMES = {Real: "a number", type(None): "None"}


def _a(*types: type) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            names = " or ".join(_NAMES.get(t, t.__name__) for t in types)
            raise TypeError(f"{attribute.name} must be {names}, not {value!r}")

    return check


def _one_of(*names: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in names:
            raise ValueError(f"{attribute.name} must be {' or '.join(names)}, not {value!r}")

    return check


@attrs.frozen(kw_only=True)
class Terms:
    """The work, its costs, its limits, and what is to be least; see `schedir.search`."""

    ranks: int = attrs.field(validator=_at_least(1))
    microbatches: int = attrs.field(validator=_at_least(1))
    chunks: int = attrs.field(validator=_at_least(1))
    costs: CostModel = attrs.field(validator=_a(CostModel))
    placement: str | None = attrs.field(
        validator=attrs.validators.optional(_one_of(*PLACEMENT_NAMES))
    )
    memory_limit: float | None = attrs.field(validator=_a(Real, type(None)))
    max_activations: int | None = attrs.field(validator=_at_least(0))
    held_until: HeldUntil = attrs.field(validator=_one_of(*HELD_UNTIL))
    objective: Objective = attrs.field(validator=_one_of(*OBJECTIVES))
    split: bool = attrs.field(validator=_a(bool))
    recompute: bool | None = attrs.field(validator=_a(bool, type(None)))
    channel: str = attrs.field(validator=lambda _, __, value: expect_channel(value))

    def __attrs_post_init__(self) -> None:
        expect_fewer(self.ranks, self.chunks, self.microbatches)
        if self.memory_limit is not None:
            if self.max_activations is not None:
                raise ValueError("give memory_limit or max_activations, not both")
            if not self.memory_limit >= 0:
                raise ValueError(f"memory_limit must be bytes >= 0, not {self.memory_limit}")
            if not self.costs.sizes.known:
                raise SchedirError(
                    "a memory limit needs bytes to compare with: give the costs activation_bytes, "
                    "weight_bytes and what else is kept"
                )

    @property
    def limit(self) -> float | None:
        """The limit, in whichever unit it is."""
        return self.max_activations if self.memory_limit is None else self.memory_limit

    @property
    def counts_boundaries(self) -> bool:
        """Whether what is sent and received is of the bytes that are limited."""
        sizes = self.costs.boundary_bytes
        return self.memory_limit is not None and bool(
            any(sizes) if isinstance(sizes, tuple) else sizes
        )

    @property
    def placements(self) -> list[str]:
        """The names of the placements to try; of one chunk, or one rank, all are the same."""
        if self.placement is not None:
            return [_ALIASES.get(self.placement, self.placement)]
        return list(PLACEMENTS) if self.chunks > 1 and self.ranks > 1 else ["wrapped"]

    def task(self, named: str, reserved: tuple[float, ...] | None = None) -> Task:
        """The task on a placement; of a limit in bytes, so much is `reserved` on each rank.

        Raises SchedirError for costs of other stages, or that lack a link.
        """
        placement = placed(self.ranks, self.chunks, named)
        memory = self._memory(placement, reserved or (0,) * self.ranks)
        return Task(
            self.microbatches,
            named,
            StageCosts.of(placement, self.costs),
            memory,
            self.objective,
            self.split,
            self._saves(memory),
        )

    def _memory(self, placement: tuple[int, ...], reserved: tuple[float, ...]) -> Memory:
        if self.memory_limit is not None:
            return memory_in_bytes(placement, self.costs, self.memory_limit, reserved)
        most = math.inf if self.max_activations is None else self.max_activations
        return memory_in_activations(len(placement), self.ranks, most, self.held_until)

    def _saves(self, memory: Memory) -> bool:
        """Whether forwards may be run again."""
        if self.recompute is None:
            asked = self.memory_limit is not None
        else:
            asked = self.recompute and memory.limited
        return asked and any(a < b for a, b in zip(memory.lean, memory.full, strict=True))

    def lower_bound(self, task: Task) -> float:
        """What no schedule on a task's placement can be below."""
        return lower_bound(
            task.placement,
            self.microbatches,
            self.costs,
            objective=self.objective,
            split=self.split,
            recompute=task.recompute,
            max_activations=self.max_activations,
            held_until=self.held_until,
            memory_limit=self.memory_limit,
        )
