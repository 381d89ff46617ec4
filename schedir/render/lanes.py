"""The lanes of a drawing: one for each rank or, where stages have replicas, for each of these; and
one for each copy engine that has something to do.

    rank 0 stage 0  F0 F1
    rank 0 stage 3        F2 B2---
    rank 0 copies      >0    <0
    rank 1 stage 1     F0 F1

A replica's lane shows which copy of a stage runs what. An overlapped pair of two stages is in the
lanes of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from schedir.ir import COPIES, Schedule
from schedir.render.cells import ComputeSpan, Labels, Row, rows_of
from schedir.simulator import Timeline


@attrs.frozen
class Lane:
    """A row of a drawing: what is drawn of a rank, of its replica of a stage, or of its copies to
    the host and back."""

    rank: int
    stage: int | None
    row: Row
    copies: bool = False


def has_replicas(schedule: Schedule) -> bool:
    """Whether some stage is on several ranks."""
    return any(len(held) > 1 for held in schedule.placement)


def has_copies(schedule: Schedule) -> bool:
    """Whether anything is copied to the host and back."""
    return bool(schedule.columns.is_kind(*COPIES).any())


def lanes_of(timeline: Timeline, ranks: Iterable[int]) -> list[Lane]:
    """The lanes of the `ranks`, from the top."""
    ranks, replicas = list(ranks), has_replicas(timeline.schedule)
    rows = zip(ranks, rows_of(timeline, ranks), rows_of(timeline, ranks, COPIES), strict=True)
    lanes = []
    for rank, row, copies in rows:
        if not replicas or not row.chunks:  # or it has nothing to do
            lanes.append(Lane(rank, None, row))
        for stage in row.chunks if replicas else ():
            lanes.append(Lane(rank, stage, Row(list(_of_stage(row, stage)), row.chunks)))
        if copies.spans:
            lanes.append(Lane(rank, None, copies, copies=True))
    return lanes


def lanes_per_rank(schedule: Schedule) -> int:
    """How many lanes of compute a rank has at most."""
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
