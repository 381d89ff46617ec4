"""The tracks of a trace: what a rank does side by side, one track for each kind of it.

A rank computes, it sends to and receives from each of its peers, and copies to its host and back.
Slices of one track never overlap: where transfers do, as they may on a link with latency, the track
gets another one below.

    to rank 1        0SEND_ACT0--   0SEND_ACT2--
    to rank 1 (2)          0SEND_ACT1--
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise

import attrs
import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, GROUPS, RECEIVES, SENDS, Ints, Schedule


class Doing(IntEnum):
    """What the slices of a track are, in the order in which a rank's tracks are shown."""

    COMPUTE = 0
    SUM = 1
    RECEIVE = 2
    SEND = 3
    COPY = 4


@attrs.frozen
class Track:
    """The slices of a rank that never overlap: their places, by time.

    `peer` is the rank at the other end of a transfer, -1 for none; `lane` counts the tracks that
    overlapping slices of one kind take.
    """

    rank: int
    doing: Doing
    peer: int
    lane: int
    places: Ints

    @property
    def name(self) -> str:
        """What is on it."""
        names = {
            Doing.COMPUTE: "compute",
            Doing.SUM: "gradient sums",
            Doing.RECEIVE: f"from rank {self.peer}",
            Doing.SEND: f"to rank {self.peer}",
            Doing.COPY: "copies to the host and back",
        }
        return names[self.doing] + (f" ({self.lane + 1})" if self.lane else "")


def tracks_of(schedule: Schedule, starts: Ints, ends: Ints, known: Ints) -> list[Track]:
    """The tracks of all ranks, by rank and kind; `known` are the places to be shown.

    `starts` and `ends` hold a time for every place, shape [actions]. An overlapped pair is shown
    at the place of its first part.
    """
    columns = schedule.columns
    doing = np.full(len(columns), -1)
    for kinds, what in (
        (COMPUTE, Doing.COMPUTE),
        (GROUPS, Doing.SUM),
        (RECEIVES, Doing.RECEIVE),
        (SENDS, Doing.SEND),
        (COPIES, Doing.COPY),
    ):
        doing[columns.is_kind(*kinds)] = what
    doing[columns.joined & (doing == Doing.COMPUTE)] = -1
    shown = known[doing[known] >= 0]
    keys = columns.rank[shown], doing[shown], graph_of(schedule).peers[shown]
    order = np.lexsort((shown, starts[shown], *reversed(keys)))
    places = shown[order]
    ordered = np.stack([key[order] for key in keys])
    changes = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
    tracks = []
    for first, end in pairwise([0, *changes.tolist(), len(places)] if len(places) else [0]):
        own = places[first:end]
        rank, what, peer = ordered[:, first].tolist()
        tracks += [
            Track(rank, Doing(what), peer, lane, slices)
            for lane, slices in enumerate(_lanes(own, starts[own], ends[own]))
        ]
    return tracks


def _lanes(places: Ints, starts: Ints, ends: Ints) -> Sequence[Ints]:
    """The places, which ascend by start, on as few lanes as keep them from overlapping."""
    if (starts[1:] >= ends[:-1]).all():
        return [places]
    lanes: list[list[int]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for place, start, end in zip(places.tolist(), starts.tolist(), ends.tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        lanes[lane].append(place)
        heapq.heappush(busy, (end, lane))
    return [np.array(lane, np.int64) for lane in lanes]
