"""List the actions that end a step: sums of gradients over ranks, and updates of the weights.

0F0 0F1 0B0 0B1        0F0 0F1 0B0 0B1 0REDUCE_GRAD 0OPTIM_STEP
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from schedir.ir import (
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    Columns,
    Ints,
    Kind,
    Schedule,
    expect_schedule,
)
from schedir.passes.insertion import inserted


def append_steps(schedule: Schedule) -> Schedule:
    """List an OPTIM_STEP for every stage at the end of its ranks' lists.

    This is for lists from other tools, which leave the update to the caller. A stage with replicas
    also gets a REDUCE_GRAD on each of its ranks, unless it lists one. A stage without backwards
    gets nothing. All REDUCE_GRADs come before the OPTIM_STEPs, both in the order of the stages. The
    schedule stays unchanged if it lists any OPTIM_STEP. Raises TypeError for anything that is not a
    Schedule.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0F1 0B0 0B1"])
    >>> print(*schedir.append_steps(schedule).actions[0])
    0F0 0F1 0B0 0B1 0OPTIM_STEP
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


def insert_reductions(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """List a REDUCE_GRAD for every OPTIM_STEP, after the last gradient that the OPTIM_STEP needs.

    A stage without an OPTIM_STEP gets one REDUCE_GRAD after its last gradient. With replicas, that
    REDUCE_GRAD stands at the end of each rank's list, in the order of the stages, because replicas
    finish at different times and some run no microbatch. A stage that lists a REDUCE_GRAD, or is
    not one of `stages`, stays unchanged.
    """
    columns = schedule.columns
    listed = set(columns.stage[columns.is_kind(Kind.REDUCE_GRAD)].tolist())
    if stages is not None:
        listed |= {*range(schedule.stages)} - {*stages}
    last: dict[tuple[int, int], int] = {}  # of the rank's stage, since its OPTIM_STEP
    completed = []
    steps = columns.is_kind(Kind.OPTIM_STEP)
    stepped = set()
    for place in columns.where(*COMPLETES_GRADIENTS, Kind.OPTIM_STEP).tolist():
        key = int(columns.rank[place]), int(columns.stage[place])
        if key[1] in listed:
            continue
        if not steps[place]:
            last[key] = place
        elif key in last:
            completed.append(last.pop(key))
            stepped.add(key)
    trained = {stage for _, stage in last} - {stage for _, stage in stepped}
    held = enumerate(schedule.placement)
    replicas = {stage for stage, ranks in held if len(ranks) > 1 and stage in trained}
    completed += [
        place for key, place in last.items() if key not in stepped and key[1] not in replicas
    ]
    # After what the gradient sends, too, which somebody may be waiting for.
    made = np.sort(np.array(completed, np.int64))
    summed = inserted(
        schedule,
        Kind.REDUCE_GRAD,
        columns.stage[made],
        np.full(len(made), -1),
        columns.rank[made],
        _last_posts(columns)[columns.last[made]] + 1,
        like=made,
    )
    at_the_end = [holding for holding in schedule.holdings if holding[0] in replicas]
    return appended(summed, [(Kind.REDUCE_GRAD, at_the_end)]) if at_the_end else summed


def _last_posts(columns: Columns) -> Ints:
    """For every place, the last communication that directly follows it, or the place itself."""
    places = np.arange(len(columns))
    goes_on = np.zeros(len(columns), np.bool_)
    goes_on[:-1] = columns.is_kind(*COMMUNICATION)[1:] & (np.diff(columns.rank) == 0)
    return np.minimum.accumulate(np.where(goes_on, len(columns), places)[::-1])[::-1]


def appended(schedule: Schedule, added: list[tuple[Kind, list[tuple[int, int]]]]) -> Schedule:
    """The schedule with stage-wide actions, given as (stage, rank), at the end of the lists."""
    for kind, holdings in added:
        stage, rank = np.array(holdings, np.int64).reshape(-1, 2).T
        ends = schedule.columns.starts[rank + 1]
        schedule = inserted(schedule, kind, stage, np.full(len(rank), -1), rank, ends)
    return schedule
