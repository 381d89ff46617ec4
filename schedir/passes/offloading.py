"""Keep activations on the host between their forward and their backward.

    0F0 0F1 0F2 0B0 0B1 0B2        0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2

A rank's copies run beside its compute, in list order. A reload is listed far enough ahead of the
backward that the copy is over by then (SSDTrain, arXiv 2408.10013; PipeOffload, arXiv 2503.01328).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, Kind, Schedule, expect_schedule, is_number
from schedir.ir.schedule import expect_stages
from schedir.passes.communication import inserted


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
    wanted = wanted & (made >= 0) & (used > made) & (graph.of(Kind.OFFLOAD) < 0)
    stage, microbatch = np.nonzero(wanted & (graph.of(Kind.RECOMPUTE) < 0))
    made, used = made[stage, microbatch], used[stage, microbatch]
    # The entries of compute, and the one that each reload stands before.
    compute = np.flatnonzero(columns.is_kind(*COMPUTE) & ~columns.joined)
    heads = columns.heads[columns.entry[np.stack((made, used))]]
    first, last = np.searchsorted(compute, heads)
    back = last - ahead
    gains = back > first + 1
    stage, microbatch, made, used = (each[gains] for each in (stage, microbatch, made, used))
    rank = columns.rank[made]
    out = columns.last[made] + 1
    listed = inserted(schedule, Kind.OFFLOAD, stage, rank, out, microbatch, like=made)
    # Each place has moved on by the offloads before it.
    moved = np.arange(len(columns)) + np.searchsorted(
        np.sort(out), np.arange(len(columns)), side="right"
    )
    before = moved[compute[back[gains]]]
    turn = np.argsort(used)
    return inserted(
        listed,
        Kind.RELOAD,
        stage[turn],
        rank[turn],
        before[turn],
        microbatch[turn],
        like=moved[used][turn],
    )
