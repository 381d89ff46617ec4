"""Append what ends a synchronous step: the sums over replicas, then the updates of the weights.

0F0 0F1 0B0 0B1        0F0 0F1 0B0 0B1 0REDUCE_GRAD 0OPTIM_STEP
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.ir.columns import KIND_INDEX, Columns, Ints
from schedir.ir.kinds import COMPLETES_GRADIENTS, Kind
from schedir.ir.schedule import Schedule, Sources, expect_schedule, starts_of


def append_steps(schedule: Schedule) -> Schedule:
    """The schedule with an OPTIM_STEP for every stage at the end of its ranks' lists.

    For lists from elsewhere, which leave the update to the caller. A stage with replicas gets a
    REDUCE_GRAD before it, on each of its ranks, where none is listed; what no backward belongs to
    gets nothing. Both come in the order of the stages, all REDUCE_GRADs first. Unchanged where any
    OPTIM_STEP is listed already. Raises TypeError for what is no Schedule.
    """
    expect_schedule(schedule)
    columns = schedule.columns
    if columns.is_kind(Kind.OPTIM_STEP).any():
        return schedule
    trained = set(columns.stage[columns.where(*COMPLETES_GRADIENTS)].tolist())
    summed = set(columns.stage[columns.where(Kind.REDUCE_GRAD)].tolist())
    steps = [(stage, rank) for stage, rank in schedule.holdings if stage in trained]
    sums = [
        (stage, rank)
        for stage, rank in steps
        if len(schedule.placement[stage]) > 1 and stage not in summed
    ]
    return appended(schedule, [(Kind.REDUCE_GRAD, sums), (Kind.OPTIM_STEP, steps)])


def appended(schedule: Schedule, added: list[tuple[Kind, list[tuple[int, int]]]]) -> Schedule:
    """The schedule with stage-wide actions, given as (stage, rank), at the end of the lists."""
    columns, sources = schedule.columns, schedule.sources
    kinds = [KIND_INDEX[kind] for kind, holdings in added for _ in holdings]
    stages = [stage for _, holdings in added for stage, _ in holdings]
    rank = np.append(columns.rank, [rank for _, holdings in added for _, rank in holdings])
    rank = rank.astype(np.int64)
    order = np.argsort(rank, kind="stable")
    none = np.full(len(kinds), -1)

    def merged(own: Ints, new: Ints | list[int]) -> Ints:
        both: Ints = np.append(own, np.array(new, np.int64))[order]
        return both

    return attrs.evolve(
        schedule,
        actions=Columns(
            starts_of(rank[order], schedule.ranks),
            merged(columns.kind, kinds),
            merged(columns.stage, stages),
            merged(columns.microbatch, none),
            merged(columns.version, none),
            np.append(columns.joined, none > 0)[order],
        ),
        sources=None if sources is None else Sources(sources.lines, merged(sources.line_of, none)),
    )
