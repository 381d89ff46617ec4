"""The lanes of a drawing: one table of what is drawn where, which every picture reads.

    rank 0  compute  F0 F1       B0---
            copies      >0    <0
    rank 1  compute     F0 B0---

A rank has one lane for each of the `tracks` of a drawing, by default its compute and its copies to
the host and back. If stages have replicas, the height of a lane of compute is divided among the
rank's stages. The two parts of an overlapped pair of one stage, or of a rank without replicas,
stand one above the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs
import numpy as np

from schedir.ir import COMPUTE, COPIES, Bools, Ints, Kind, Schedule
from schedir.simulator import Timeline
from schedir.simulator.values import Numbers

SHADES = 4
"""The colours of a kind: the stages of a rank have them in turn."""


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
    """The most stages of any rank that have parts of its lane of compute."""
    return most_stages(schedule) if has_replicas(schedule) else 1


def labels_say_stages(timelines: Iterable[Timeline]) -> bool:
    """Whether some lane has several stages, so that labels must name them."""
    schedules = [line.schedule for line in timelines]
    return any(most_stages(each) > 1 for each in schedules if not has_replicas(each))


# Not slotted, because cached properties need a __dict__.
@attrs.frozen(eq=False, slots=False)
class Lanes:
    """The drawn actions by lane, start and place; all arrays have the shape [actions].

    `lane` counts the lanes of all ranks. `top` and `height` are parts of the lane's height;
    `paired` says if an action shares its part with the other part of an overlapped pair. `colour`
    is the kind times `SHADES`, plus the shade of the stage.
    """

    place: Ints
    start: Numbers
    end: Numbers
    lane: Ints
    top: Numbers
    height: Numbers
    paired: Bools
    colour: Ints

    def __len__(self) -> int:
        return len(self.place)

    @cached_property
    def length(self) -> Numbers:
        """How long each action takes."""
        return self.end - self.start

    def where(self, chosen: Bools | Ints | slice) -> Lanes:
        """Some of the actions."""
        return Lanes(*(column[chosen] for column in attrs.astuple(self, recurse=False)))

    def of(self, lane: int) -> Lanes:
        """The actions of one lane."""
        return self.where(slice(*np.searchsorted(self.lane, [lane, lane + 1])))

    def between(self, since: float, until: float) -> Lanes:
        """The actions that run between two times, and those without duration at either edge."""
        inside = (self.end > since) & (self.start < until)
        at_edge = (self.start == self.end) & ((self.start == since) | (self.start == until))
        return self.where(inside | at_edge)


def lanes_of(timeline: Timeline, tracks: Sequence[Iterable[Kind]] = (COMPUTE, COPIES)) -> Lanes:
    """The actions of these tracks whose times are known."""
    schedule, columns = timeline.schedule, timeline.schedule.columns
    track = np.full(len(columns), -1)
    for number, kinds in enumerate(tracks):
        track[columns.is_kind(*kinds)] = number
    place = np.flatnonzero((track >= 0) & timeline.known)
    start, lane = timeline.starts[place], columns.rank[place] * len(tracks) + track[place]
    order = np.lexsort((place, start, lane))
    place, start, lane = place[order], start[order], lane[order]
    rank, stage, joined = columns.rank[place], columns.stage[place], columns.joined[place]
    computes = columns.is_kind(*COMPUTE)[place]
    # Every (rank, stage) is a number, and those of a rank follow each other.
    held = np.sort([on * schedule.stages + own for own, on in schedule.holdings])
    first = np.searchsorted(held, np.arange(schedule.ranks + 1) * schedule.stages)
    turn = np.searchsorted(held, rank * schedule.stages + stage) - first[rank]
    paired, part, parts = columns.shared[place] & computes, np.array(0), np.array(1)
    if has_replicas(schedule):
        parts = np.where(computes, np.maximum(np.diff(first), 1)[rank], 1)
        part = np.where(computes, turn, 0)
        paired &= stage == columns.stage[place + np.where(joined, -1, 1) * paired]
    return Lanes(
        place,
        start,
        timeline.ends[place],
        lane,
        (part + np.where(paired & joined, 0.5, 0.0)) / parts,
        np.where(paired, 0.5, 1.0) / parts,
        paired,
        columns.kind[place] * SHADES + turn % SHADES,
    )
