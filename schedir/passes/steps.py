"""List the actions that end a step, sums of gradients over ranks and updates of the weights; or
leave them out with the backwards, for evaluation.

0F0 0F1 0B0 0B1        0F0 0F1 0B0 0B1 0REDUCE_GRAD 0OPTIM_STEP
"""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np

from schedir.ir import (
    COMMUNICATION,
    COMPLETES_GRADIENTS,
    GATHERS,
    RELEASES,
    Columns,
    Kind,
    Schedule,
    expect_schedule,
    starts_of,
)
from schedir.passes.communication import inserted, past

_EVALUATED = tuple(kind for kind in Kind if kind.meaning.evaluates)


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
    trained = _stages_with(columns, *COMPLETES_GRADIENTS)
    summed = trained & _replicated(schedule) - _stages_with(columns, Kind.REDUCE_GRAD)
    schedule = _appended(schedule, Kind.REDUCE_GRAD, summed)
    return _appended(schedule, Kind.OPTIM_STEP, trained)


def insert_reductions(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """List a REDUCE_GRAD for every OPTIM_STEP, after the last gradient that the OPTIM_STEP needs.

    A stage without an OPTIM_STEP gets one REDUCE_GRAD after its last gradient. With replicas, that
    REDUCE_GRAD stands at the end of each rank's list, in the order of the stages, because replicas
    finish at different times and some run no microbatch. A stage that lists a REDUCE_GRAD, or is
    not one of `stages`, stays unchanged.
    """
    columns = schedule.columns
    wanted = {*(range(schedule.stages) if stages is None else stages)}
    wanted -= _stages_with(columns, Kind.REDUCE_GRAD)
    # The gradients and steps of each rank's stages, in list order.
    places = columns.where(*COMPLETES_GRADIENTS, Kind.OPTIM_STEP)
    places = places[np.isin(columns.stage[places], [*wanted])]
    holding = columns.rank[places] * schedule.stages + columns.stage[places]
    order = np.argsort(holding, kind="stable")
    places, holding = places[order], holding[order]
    stage, step = columns.stage[places], columns.is_kind(Kind.OPTIM_STEP)[places]
    goes_on = np.diff(holding, append=-1) == 0
    stepped = ~step & goes_on & np.append(step, False)[1:]
    last = ~step & ~goes_on
    at_the_end = _replicated(schedule) & {*stage[last].tolist()} - {*stage[stepped].tolist()}
    last &= ~np.isin(holding, holding[stepped]) & ~np.isin(stage, [*at_the_end])
    # After what the gradient sends, too, which somebody may be waiting for.
    made = np.sort(places[stepped | last])
    summed = inserted(
        schedule,
        Kind.REDUCE_GRAD,
        columns.stage[made],
        columns.rank[made],
        past(columns, COMMUNICATION)[made],
        like=made,
    )
    return _appended(summed, Kind.REDUCE_GRAD, at_the_end)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a complete schedule and their transfers, in its order, at the newest weights;
    of sharded stages the weights that they use are gathered.

    It can't deadlock if the schedule doesn't, because it keeps only a part of the waits.
    """
    columns = schedule.columns
    kept = columns.where(*_EVALUATED)
    # A gathering goes that is given up with no forward in between.
    used = kept[columns.is_kind(*GATHERS, *RELEASES, Kind.FORWARD)[kept]]
    used = used[np.lexsort((columns.stage[used], columns.rank[used]))]
    gathers, releases = (columns.is_kind(*kinds)[used] for kinds in (GATHERS, RELEASES))
    unused = np.flatnonzero(gathers[:-1] & releases[1:])
    kept = np.setdiff1d(kept, used[np.append(unused, unused + 1)])
    forwards = schedule.take(kept, starts_of(columns.rank[kept], schedule.ranks))
    newest = attrs.evolve(forwards.columns, version=np.full(len(kept), -1))
    return attrs.evolve(forwards, actions=newest)


def _stages_with(columns: Columns, *kinds: Kind) -> set[int]:
    """The stages that list one of these kinds."""
    return {*columns.stage[columns.where(*kinds)].tolist()}


def _replicated(schedule: Schedule) -> set[int]:
    """The stages on several ranks."""
    return {stage for stage, held in enumerate(schedule.placement) if len(held) > 1}


def _appended(schedule: Schedule, kind: Kind, stages: Collection[int]) -> Schedule:
    """The schedule with an action of each of these stages at the end of its ranks' lists."""
    holdings = [holding for holding in schedule.holdings if holding[0] in stages]
    stage, rank = np.array(holdings, np.int64).reshape(-1, 2).T
    return inserted(schedule, kind, stage, rank, schedule.columns.starts[rank + 1])
