"""Run forwards again instead of keeping their activations.

    0F0 0F1 0B0 0F2 0I1 0W1          0F0 0F1 0R0 0B0 0F2 0R1 0I1 0W1

Each forward then keeps only its input (Chen et al. 2016, arXiv 1604.06174). An author may list an R
further ahead, to fill a bubble; this pass lists it directly before the backward, so that its
activation lives for the shortest time.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from schedir.ir import Kind, Schedule, expect_schedule
from schedir.ir.schedule import expect_stages
from schedir.passes.communication import (
    as_inserted,
    insert_communication,
    inserted,
    strip_communication,
)


def recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """List an R directly before the B or I of every microbatch of these stages.

    If the B or I is part of an overlapped pair, the R stands before the pair. A microbatch that
    already has an R stays unchanged. Each R reads the weight version of its F, and takes the line
    of Python of its B or I. Communication stays in place, unless it is exactly what
    `insert_communication` makes: then it is inserted again, because its order follows the new
    times. Raises TypeError for anything that is not a Schedule or not a collection of stages, and
    ValueError for an unknown stage, and for a microbatch whose activation is offloaded.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0F1 0B0 0B1"])
    >>> print(*schedir.recompute(schedule, stages=[0]).actions[0])
    0F0 0F1 0R0 0B0 0R1 0B1
    """
    expect_schedule(schedule)
    expect_stages(schedule, stages, "recompute")
    columns = schedule.columns
    backwards = columns.where(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    backwards = backwards[np.isin(columns.stage[backwards], [*stages])]
    known = columns.alike(backwards, columns.where(Kind.RECOMPUTE))
    backwards = backwards[~known]
    if not len(backwards):
        return schedule
    offloaded = backwards[columns.alike(backwards, columns.where(Kind.OFFLOAD))]
    if len(offloaded):
        action = columns.action(int(offloaded[0]))
        raise ValueError(
            f"stage {action.stage} of {schedule.name} can't be recomputed: the activation of "
            f"microbatch {action.microbatch} is offloaded, so there is nothing to make again; "
            "recompute first, and offload what is left"
        )
    listed = inserted(
        schedule,
        Kind.RECOMPUTE,
        columns.stage[backwards],
        columns.rank[backwards],
        columns.heads[columns.entry[backwards]],
        columns.microbatch[backwards],
        like=backwards,
    )
    if not as_inserted(schedule):
        return listed
    return insert_communication(strip_communication(listed))
