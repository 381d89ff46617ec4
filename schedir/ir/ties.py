"""Ties: groups of stages that share parameters, such as the embeddings of the first and the last
stage.

The gradient of a tied parameter is the sum over its stages, taken before any of them steps. So the
k-th OPTIM_STEPs of all stages of a group happen together, on every rank that holds one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from schedir.errors import UnsoundError
from schedir.ir.action import is_number
from schedir.ir.kinds import STEPS
from schedir.ir.schedule import Schedule

Ties: TypeAlias = tuple[tuple[int, ...], ...]
"""The groups, each of two or more different stages; a stage may be in several."""


def ties_of(schedule: Schedule, groups: Iterable[Iterable[int]]) -> Ties:
    """The groups of stages as ties of the schedule. Raises ValueError for a group that can't be
    one."""
    return tuple(_tie(schedule.stages, group) for group in groups)


def _tie(stages: int, group: Iterable[int]) -> tuple[int, ...]:
    tie = tuple(group) if isinstance(group, Iterable) else ()
    if len(tie) < 2 or not all(map(is_number, tie)):
        raise ValueError(f"a tie is a group of two or more stages, such as (0, 3), not {group!r}")
    for stage in tie:
        if stage >= stages:
            raise ValueError(f"the tie {tie} names stage {stage}; the stages are 0..{stages - 1}")
    if len(set(tie)) < len(tie):
        raise ValueError(f"the tie {tie} names a stage twice")
    return tie


def tied_steps(schedule: Schedule, ties: Ties) -> list[tuple[int, ...]]:
    """The places of the OPTIM_STEPs that happen together: the k-th ones of all stages of a tie, on
    all their ranks. Ties that share a stage count as one tie.

    If some stage has fewer OPTIM_STEPs, the turns that it lacks are left out. Raises UnsoundError
    for an OPTIM_STEP on a rank that does not hold its stage.
    """
    if not ties:
        return []
    columns = schedule.columns
    steps: dict[tuple[int, int], list[int]] = {holding: [] for holding in schedule.holdings}
    for place in columns.where(*STEPS).tolist():
        holding = int(columns.stage[place]), int(columns.rank[place])
        if holding not in steps:
            raise UnsoundError(f"rank {holding[1]} updates stage {holding[0]}, not its own")
        steps[holding].append(place)
    return [
        turn
        for group in joined_ties(ties)
        for turn in zip(
            *(steps[stage, rank] for stage in group for rank in schedule.placement[stage]),
            strict=False,
        )
    ]


def shared_steps(schedule: Schedule, ties: Ties) -> list[int]:
    """The places of the tied OPTIM_STEPs at which ranks communicate to add up their gradients."""
    rank = schedule.columns.rank
    turns = tied_steps(schedule, ties)
    return [place for turn in turns if len({*rank[list(turn)].tolist()}) > 1 for place in turn]


def joined_ties(ties: Ties) -> list[list[int]]:
    """The groups of stages that are tied to each other, directly or through other ties."""
    groups: list[set[int]] = []
    for tie in ties:
        joins = [group for group in groups if not group.isdisjoint(tie)]
        groups = [group for group in groups if group.isdisjoint(tie)]
        groups.append(set(tie).union(*joins))
    return [sorted(group) for group in groups]
