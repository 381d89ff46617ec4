"""Sum every stage's gradients over its data-parallel group, as soon as they are complete."""

from __future__ import annotations

import attrs
import numpy as np

from schedir.ir.columns import KIND_INDEX, Columns, Ints
from schedir.ir.kinds import COMMUNICATION, COMPLETES_GRADIENTS, Kind
from schedir.ir.schedule import Schedule, starts_of
from schedir.passes.steps import appended


def insert_reductions(schedule: Schedule) -> Schedule:
    """The schedule with a REDUCE_GRAD for every OPTIM_STEP, after the last gradient that it needs.

    One after a stage's last gradient where it has no OPTIM_STEP; of replicas at the end of their
    ranks' lists, in the order of the stages, as they may be done at very different times, and some
    run no microbatch. Stages that list a REDUCE_GRAD are left as they are.
    """
    columns = schedule.columns
    listed = set(columns.stage[columns.is_kind(Kind.REDUCE_GRAD)].tolist())
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
    # After what the gradient sends, too, which somebody may be waiting for. A new action is made
    # from its gradient's entry, for the stage and the line of Python.
    number = len(columns)
    origin = np.concatenate((np.arange(number), np.array(completed, np.int64)))
    stands_at = np.concatenate((np.arange(number), _last_posts(columns)[columns.last[completed]]))
    order = np.argsort(stands_at, kind="stable")
    new, origin = order >= number, origin[order]
    taken = schedule.take(origin, starts_of(columns.rank[origin], schedule.ranks))
    summed = attrs.evolve(
        taken,
        actions=Columns(
            taken.columns.starts,
            np.where(new, KIND_INDEX[Kind.REDUCE_GRAD], taken.columns.kind),
            taken.columns.stage,
            np.where(new, -1, taken.columns.microbatch),
            np.where(new, -1, taken.columns.version),
            taken.columns.joined,
        ),
    )
    at_the_end = [holding for holding in schedule.holdings if holding[0] in replicas]
    return appended(summed, [(Kind.REDUCE_GRAD, at_the_end)]) if at_the_end else summed


def _last_posts(columns: Columns) -> Ints:
    """For every place, the last of the communication directly after it, or itself."""
    places = np.arange(len(columns))
    goes_on = np.zeros(len(columns), np.bool_)
    goes_on[:-1] = columns.is_kind(*COMMUNICATION)[1:] & (np.diff(columns.rank) == 0)
    return np.minimum.accumulate(np.where(goes_on, len(columns), places)[::-1])[::-1]
