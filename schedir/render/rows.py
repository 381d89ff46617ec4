"""The lanes of a drawing: one for each rank, or, if stages have replicas, one for each replica; and
one for each copy engine that is used.

    rank 0 stage 0  F0 F1
    rank 0 stage 3        F2 B2---
    rank 0 copies      >0    <0
    rank 1 stage 1     F0 F1

A replica's lane shows what that copy of the stage runs. An overlapped pair of two stages is in the
lanes of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from schedir.ir import COMPUTE, COPIES, Action, Kind, Schedule, starts_of
from schedir.simulator import Timeline


class ComputeSpan(NamedTuple):
    """A compute action and its time. It is lighter than a `Span`, because there may be millions.

    `beside` is the other part of an overlapped pair.
    """

    action: Action
    start: float
    end: float
    beside: Action | None = None


@attrs.frozen
class Lane:
    """A row of a drawing, in list order: the compute of a rank, of its replica of a `stage`, or its
    `copies` to the host and back. `turns` numbers the rank's stages."""

    rank: int
    spans: Sequence[ComputeSpan]
    turns: Mapping[int, int]
    stage: int | None = None
    copies: bool = False


def has_replicas(schedule: Schedule) -> bool:
    """Whether some stage is on several ranks."""
    return any(len(held) > 1 for held in schedule.placement)


def has_copies(schedule: Schedule) -> bool:
    """Whether anything is copied to the host and back."""
    return bool(schedule.columns.is_kind(*COPIES).any())


def most_stages(schedule: Schedule) -> int:
    """The most stages of any rank."""
    return max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))


def lanes_per_rank(schedule: Schedule) -> int:
    """The most lanes of compute of any rank."""
    return most_stages(schedule) if has_replicas(schedule) else 1


def labels_say_stages(timelines: Iterable[Timeline]) -> bool:
    """Whether some lane has several stages, so that labels must name them."""
    schedules = [line.schedule for line in timelines]
    return any(most_stages(each) > 1 for each in schedules if not has_replicas(each))


def lanes_of(timeline: Timeline, ranks: Iterable[int]) -> list[Lane]:
    """The lanes of the `ranks`, from the top."""
    ranks, replicas = list(ranks), has_replicas(timeline.schedule)
    both = zip(
        ranks, _spans(timeline, ranks, COMPUTE), _spans(timeline, ranks, COPIES), strict=True
    )
    lanes = []
    for rank, spans, copies in both:
        turns = {stage: turn for turn, stage in enumerate(timeline.schedule.stages_of(rank))}
        if not replicas or not turns:  # or nothing, if the rank has nothing to do
            lanes.append(Lane(rank, spans, turns))
        for stage in turns if replicas else ():
            lanes.append(Lane(rank, list(_of_stage(spans, stage)), turns, stage))
        if copies:
            lanes.append(Lane(rank, copies, turns, copies=True))
    return lanes


def _spans(
    timeline: Timeline, ranks: Iterable[int], kinds: Iterable[Kind]
) -> Iterator[list[ComputeSpan]]:
    """The actions with known times that occupy each of the `ranks`, or its copy engine."""
    columns = timeline.schedule.columns
    kept = np.flatnonzero(columns.is_kind(*kinds) & ~columns.joined & timeline.known)
    bounds = starts_of(columns.rank[kept], columns.ranks)
    chosen = columns.take(kept, bounds)
    for rank in ranks:
        places = kept[bounds[rank] : bounds[rank + 1]]
        times = timeline.starts[places].tolist(), timeline.ends[places].tolist()
        spans = list(map(ComputeSpan, chosen.of_rank(rank), *times))
        for turn in np.flatnonzero(columns.shared[places]).tolist():
            spans[turn] = spans[turn]._replace(beside=columns.action(places[turn] + 1))
        yield spans


def _of_stage(spans: Iterable[ComputeSpan], stage: int) -> Iterator[ComputeSpan]:
    """The spans of one stage of a rank."""
    for span in spans:
        beside = span.beside
        if span.action.stage == stage:
            alone = beside is not None and beside.stage != stage
            yield span._replace(beside=None) if alone else span
        elif beside is not None and beside.stage == stage:
            yield span._replace(action=beside, beside=None)
