"""When every entry of a schedule happens, and what it had waited for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs
import numpy as np

from schedir.graph.compile import Graph, graph_of
from schedir.graph.paths import waits
from schedir.ir import COMMUNICATION, COMPUTE, Columns, Ints, Kind, Schedule
from schedir.passes import split_batches
from schedir.simulator.values import Numbers

CHANNEL = "edge"
"""The channel model that schedules are simulated on."""


def as_run(schedule: Schedule) -> Schedule:
    """A complete schedule as it is simulated: with its batches split if they block."""
    columns = schedule.columns
    if not (columns.joined & columns.is_kind(*COMMUNICATION)).any():
        return schedule
    known = schedule.memo.get(as_run)
    if not isinstance(known, Schedule):
        blocks = waits(schedule, CHANNEL).stuck.any()
        known = schedule.memo[as_run] = split_batches(schedule) if blocks else schedule
    return known


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Moments:
    """When every place begins and ends, as floats; one more NaN stands for no place (-1).

    NaN stands for an unknown time. Both ends of a transfer have the same times. If only the start
    of a transfer or of a sum is known, nobody waited for its end, and it counts as over at once.
    """

    schedule: Schedule
    begins: Numbers
    ends: Numbers

    @property
    def columns(self) -> Columns:
        """The lists."""
        return self.schedule.columns

    @property
    def graph(self) -> Graph:
        """What the lists mean."""
        return graph_of(self.schedule)

    @cached_property
    def compute_before(self) -> Ints:
        """For every place, that of the last compute before its entry on its rank, -1 for none."""
        return last_before(self.columns, COMPUTE)

    @property
    def ahead(self) -> bool:
        """True where a transfer begins before its receive is listed, so that the receive was posted
        earlier."""
        receive = self.graph.transfers.receive
        before = np.where(receive >= 0, self.compute_before[receive], -1)
        return bool((self.begins[receive] < self.ends[before]).any())


def last_before(columns: Columns, kinds: Iterable[Kind]) -> Ints:
    """For every place, the last place of these kinds before its entry on its rank, -1 for none."""
    places = np.where(columns.is_kind(*kinds), np.arange(len(columns)), -1)
    before = np.maximum.accumulate(np.append(-1, places))[:-1]
    if columns.together:
        before = before[columns.heads][columns.entry]
    return np.where(before < columns.starts[columns.rank], -1, before)


def moments_of(schedule: Schedule, starts: Numbers, ends: Numbers) -> Moments:
    """The moments of a timeline. Raises UnsoundError if the lists are too wrong to match
    actions."""
    transfers, computes = graph_of(schedule).transfers, schedule.columns.is_kind(*COMPUTE)
    found = []
    for known in (starts, ends):
        times = np.append(known.astype(np.float64), np.nan)
        sent, received = times[transfers.send], times[transfers.receive]
        times[transfers.send] = times[transfers.receive] = np.where(
            np.isnan(received), sent, received
        )
        times[-1] = np.nan
        found.append(times)
    begins, over = found
    at_once = np.isnan(over) & ~np.append(computes, True)
    return Moments(schedule, begins, np.where(at_once, begins, over))
