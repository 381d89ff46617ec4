"""From what ranks have recorded of a step to its timeline.

    rank 0   0F0 ┊ 0SEND_ACT0                        posted at a
    rank 1   1RECV_ACT0 ┊ waits ────────┐ 1F0        posted at b, waited for from c to d

The transfer starts at max(a, b): over gloo as over NCCL nothing moves before both ends are posted.
It ends at d, if the rank has waited for it. Where it was there already, nobody has seen when it
came: its end is NaN. So is all of what was not carried out: of an OPTIM_STEP that the caller sees
to, say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.graph.compile import graph_of
from schedir.ir import Bools, Schedule
from schedir.runtime.processes.clocks import Nanoseconds
from schedir.runtime.trace.recorder import BEGAN, ENDED, FOUND, WAITED
from schedir.simulator import Measured, Sizes, Timeline

_AT_ONCE = 50_000
"""Nanoseconds that it takes at most to find what is there; who waits for longer has to be woken."""


def timeline(
    schedule: Schedule, stamps: Nanoseconds, sizes: Sizes | None, measured: Measured
) -> Timeline:
    """The timeline of a step from the stamps of all places, by one clock; shape [places, 4], 0 for
    none."""
    starts, ends = stamps[:, BEGAN].copy(), stamps[:, ENDED].copy()
    _pair(schedule, starts, ends)
    _transfer(schedule, stamps, starts, ends)
    _reduce(schedule, stamps, starts, ends)
    # Two clocks may differ by more than a transfer takes.
    both = (starts > 0) & (ends > 0)
    starts[both] = np.minimum(starts[both], ends[both])
    begun = starts[starts > 0].min(initial=np.iinfo(np.int64).max)
    return Timeline(
        schedule,
        _seconds(starts, begun),
        _seconds(ends, begun),
        sizes=sizes,
        unit="s",
        measured=measured,
    )


def _seconds(times: Nanoseconds, begun: int) -> NDArray[np.float64]:
    return np.where(times > 0, 1e-9 * (times - begun), np.nan)


def _pair(schedule: Schedule, starts: Nanoseconds, ends: Nanoseconds) -> None:
    """The parts of an overlapped pair run one after the other, and take the time of both."""
    columns = schedule.columns
    for second in np.flatnonzero(columns.joined & (ends > 0)).tolist():
        first = second - 1
        starts[second], ends[first] = starts[first], ends[second]


def _waited(stamps: Nanoseconds) -> Bools:
    """Where an entry had to wait for what it consumes."""
    return stamps[:, FOUND] - stamps[:, WAITED] > _AT_ONCE


def _transfer(
    schedule: Schedule, stamps: Nanoseconds, starts: Nanoseconds, ends: Nanoseconds
) -> None:
    transfers = graph_of(schedule).transfers
    send, receive, user = transfers.send, transfers.receive, transfers.user
    posted = stamps[:, BEGAN]
    start = np.where(
        (posted[send] > 0) & (posted[receive] > 0), np.maximum(posted[send], posted[receive]), 0
    )
    end = np.where(_waited(stamps)[user] & (start > 0), stamps[user, FOUND], 0)
    for side in (send, receive):
        starts[side], ends[side] = start, end


def _reduce(
    schedule: Schedule, stamps: Nanoseconds, starts: Nanoseconds, ends: Nanoseconds
) -> None:
    """Sums start once all ranks have posted them, and end when the first rank that has to wait for
    them, before its OPTIM_STEPs, finds them there."""
    posted, waited, found = stamps[:, BEGAN], _waited(stamps), stamps[:, FOUND]
    for turn in graph_of(schedule).collectives:
        places = np.array(turn)
        known = posted[places].min() > 0
        starts[places] = posted[places].max() if known else 0
        seen = found[places[waited[places]]]
        ends[places] = seen.min() if known and len(seen) else 0
