"""Any schedule → one whose stages keep activations on the host while nobody needs them.

    0F0 0F1 0F2 0B0 0B1 0B2        0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2

A rank's copies go on beside its compute, in list order. A reload is listed so much ahead of the
backward that the copy is over by then (SSDTrain, arXiv 2408.10013; PipeOffload, arXiv 2503.01328).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, Kind, Schedule, expect_schedule, is_number
from schedir.passes.insertion import expect_stages, inserted


def offload(schedule: Schedule, stages: Collection[int], *, ahead: int = 1) -> Schedule:
    """The schedule with an OFFLOAD right after the F of every microbatch of these stages, and its
    RELOAD `ahead` entries of compute before its B or I.

    What would come back before the rank has computed anything in between stays where it is, and so
    does what is recomputed, of which nothing is kept. A microbatch that has an OFFLOAD is left as
    it is. Both have the line of Python of their F or B.

    Raises TypeError for what is no Schedule or no collection of stages, ValueError for a stage that
    there is none of and an `ahead` below 1, UnsoundError where the lists are too wrong to tell what
    belongs to what.
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
    listed = inserted(schedule, Kind.OFFLOAD, stage, microbatch, rank, out, like=made)
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
        microbatch[turn],
        rank[turn],
        before[turn],
        like=moved[used][turn],
    )
