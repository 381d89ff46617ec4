"""Keep fewer activations on the device between their forward and their backward.

Copied to the host:

    0F0 0F1 0F2 0B0 0B1 0B2        0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2

A rank's copies run beside its compute, in list order. A reload is listed far enough ahead of the
backward that the copy is over by then (SSDTrain, arXiv 2408.10013; PipeOffload, arXiv 2503.01328).

Made again:

    0F0 0F1 0B0 0F2 0I1 0W1          0F0 0F1 0R0 0B0 0F2 0R1 0I1 0W1

Each forward then keeps only its input (Chen et al. 2016, arXiv 1604.06174). An author may list an R
further ahead, to fill a bubble; this pass lists it directly before the backward, so that its
activation lives for the shortest time.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, KIND_INDEX, Kind, Schedule, expect_schedule, is_number
from schedir.ir.schedule import expect_stages
from schedir.passes.communication import (
    as_inserted,
    insert_communication,
    inserted,
    strip_communication,
)


def offload(schedule: Schedule, stages: Collection[int], *, ahead: int = 1) -> Schedule:
    """List an OFFLOAD right after the F of every microbatch of these stages, and its RELOAD `ahead`
    compute entries before its B or I.

    An activation stays on the device if it would come back before the rank has computed anything in
    between, or if its microbatch is recomputed. A microbatch that already has an OFFLOAD stays
    unchanged. Each new action takes the line of Python of its F or B.

    Raises TypeError for anything that is not a Schedule or not a collection of stages, ValueError
    for an unknown stage or an `ahead` below 1, and UnsoundError if the lists are too wrong to match
    forwards with backwards.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0F1 0B1 0B0"])
    >>> print(*schedir.offload(schedule, stages=[0]).actions[0])
    0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0
    """
    expect_schedule(schedule)
    expect_stages(schedule, stages, "offload")
    if not is_number(ahead) or ahead < 1:
        raise ValueError(f"ahead must be a number of entries of at least 1, not {ahead!r}")
    graph, columns = graph_of(schedule), schedule.columns
    wanted = np.isin(np.arange(schedule.stages), [*stages])[:, None]
    made, used = graph.home, graph.where("end", "saved")
    on_the_device = graph.of(Kind.OFFLOAD, Kind.RECOMPUTE) < 0
    stage, microbatch = np.nonzero(wanted & (made >= 0) & (used > made) & on_the_device)
    made, used = made[stage, microbatch], used[stage, microbatch]
    # The entries of compute, and the one that each reload stands before.
    compute = np.flatnonzero(columns.is_kind(*COMPUTE) & ~columns.joined)
    heads = columns.heads[columns.entry[np.stack((made, used))]]
    first, last = np.searchsorted(compute, heads)
    back = last - ahead
    gains = back > first + 1
    stage, microbatch, made, used = (each[gains] for each in (stage, microbatch, made, used))
    # The reloads in the order in which they are needed.
    turn, many = np.argsort(used), len(used)
    both = np.append(np.arange(many), turn)
    return inserted(
        schedule,
        np.repeat([KIND_INDEX[Kind.OFFLOAD], KIND_INDEX[Kind.RELOAD]], many),
        stage[both],
        columns.rank[made][both],
        np.append(columns.last[made] + 1, compute[back[gains]][turn]),
        microbatch[both],
        like=np.append(made, used[turn]),
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
