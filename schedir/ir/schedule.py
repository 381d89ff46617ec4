"""A schedule: one list of actions per rank, and where each stage lives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import TypeAlias

import attrs

from schedir.ir.actions import COMMUNICATION, MAX_NUMBER, Action, is_number

Placement: TypeAlias = tuple[tuple[int, ...], ...]
"""`placement[stage]`: the ranks that hold the stage, ascending; several for replicas."""


@attrs.frozen
class Source:
    """The line of Python that yielded an action."""

    file: str
    line: int


def _ranks_of_stages(placement: Iterable[int | Iterable[int]]) -> Placement:
    return tuple((held,) if isinstance(held, int) else tuple(sorted(held)) for held in placement)


def _lists(actions: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(rank_actions) for rank_actions in actions)


# Not slotted, so that derived values can be cached beside the fields.
@attrs.frozen(slots=False)
class Schedule:
    """One list of typed actions per rank: what is printed, checked, simulated and executed.

    `placement[stage]` names the ranks that hold the stage (a bare int stands for one rank).
    `sources[rank][index]` is the line of Python behind an action, None where there is none; it
    takes no part in equality or the hash.

    Raises ValueError where the fields can't describe any schedule. Whether the actions make
    sense is for `schedir.check` to say.
    """

    name: str
    microbatches: int
    placement: Placement = attrs.field(converter=_ranks_of_stages)
    actions: tuple[tuple[Action, ...], ...] = attrs.field(converter=_lists, repr=False)
    sources: tuple[tuple[Source | None, ...], ...] = attrs.field(default=(), eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        name = self.name
        if not name or not name.isprintable() or name != name.strip() or "#" in name:
            raise ValueError(f"name must be one printable line without '#', not {name!r}")
        if not is_number(self.microbatches) or self.microbatches < 1:
            raise ValueError(
                f"microbatches must be an int in 1..{MAX_NUMBER}, not {self.microbatches!r}"
            )
        if not self.actions:
            raise ValueError("a schedule needs at least one rank")
        if not self.placement:
            raise ValueError("a schedule needs at least one stage")
        for stage, held in enumerate(self.placement):
            if not held or len(set(held)) < len(held) or not all(map(is_number, held)):
                raise ValueError(f"placement of stage {stage} must name distinct ranks: {held}")
            if held[0] < 0 or held[-1] >= self.ranks:
                raise ValueError(
                    f"placement of stage {stage} names a rank outside 0..{self.ranks - 1}: {held}"
                )
        if self.sources and [len(s) for s in self.sources] != [len(a) for a in self.actions]:
            raise ValueError("sources must have one entry for each action")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, held in enumerate(self.placement) if rank in held)

    def source_of(self, rank: int, index: int) -> Source | None:
        """The line of Python that yielded `actions[rank][index]`, if it is known."""
        return self.sources[rank][index] if self.sources else None

    @cached_property
    def is_complete(self) -> bool:
        """True where the list holds its communication, or needs none."""
        local = len(self.placement[0]) == 1 and len(set(self.placement)) == 1
        return (local or self.stages == 1) or any(
            action.kind in COMMUNICATION for actions in self.actions for action in actions
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the text form, in hex: equal schedules, on any machine, have equal hashes."""
        from schedir.ir.text import dumps

        return hashlib.sha256(dumps(self).encode()).hexdigest()
