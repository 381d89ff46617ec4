"""The lanes of a drawing: one for each rank or, where stages have replicas, for each of these.

    rank 0 stage 0  F0 F1
    rank 0 stage 3        F2 B2---
    rank 1 stage 1     F0 F1

A replica's lane shows which copy of a stage runs what. An overlapped pair of two stages is in the
lanes of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from schedir.ir import Schedule
from schedir.render.cells import ComputeSpan, Labels, Row, rows_of
from schedir.simulator import Timeline


@attrs.frozen
class Lane:
    """A row of a drawing: what is drawn of a rank, or of its replica of a stage."""

    rank: int
    stage: int | None
    row: Row


def has_replicas(schedule: Schedule) -> bool:
    """Whether some stage is on several ranks."""
    return any(len(held) > 1 for held in schedule.placement)


def lanes_of(timeline: Timeline, ranks: Iterable[int]) -> list[Lane]:
    """The lanes of the `ranks`, from the top."""
    ranks = list(ranks)
    rows = zip(ranks, rows_of(timeline, ranks), strict=True)
    if not has_replicas(timeline.schedule):
        return [Lane(rank, None, row) for rank, row in rows]
    lanes = []
    for rank, row in rows:
        if not row.chunks:  # it has nothing to do
            lanes.append(Lane(rank, None, row))
        for stage in row.chunks:
            lanes.append(Lane(rank, stage, Row(list(_of_stage(row, stage)), row.chunks)))
    return lanes


def lanes_per_rank(schedule: Schedule) -> int:
    """How many lanes a rank has at most."""
    if not has_replicas(schedule):
        return 1
    return max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))


def labels_of(timelines: Iterable[Timeline]) -> Labels:
    """The labels of the actions in the lanes: a replica's own lane says its stage."""
    schedules = [line.schedule for line in timelines]
    return Labels.of_schedules(schedule for schedule in schedules if not has_replicas(schedule))


def _of_stage(row: Row, stage: int) -> Iterator[ComputeSpan]:
    """The part of a rank's row that is of one stage."""
    for span in row.spans:
        beside = span.beside
        if span.action.stage == stage:
            alone = beside is not None and beside.stage != stage
            yield span._replace(beside=None) if alone else span
        elif beside is not None and beside.stage == stage:
            yield span._replace(action=beside, beside=None)
