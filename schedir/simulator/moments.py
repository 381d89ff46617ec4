"""When every entry of a schedule happens, and what it had waited for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs
import numpy as np

from schedir.graph.compile import Graph, graph_of
from schedir.graph.paths import Waits, compute_before, waits
from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    Columns,
    Ints,
    Kind,
    Schedule,
    channel_model,
    is_number,
)
from schedir.passes import split_batches
from schedir.passes.receives import posted_after
from schedir.simulator.values import Numbers

CHANNEL = "edge"
"""The channel model that schedules are simulated on if none is named."""


@attrs.frozen
class Posting:
    """How the transfers of a run are posted: under which `channel` model, and with `room` for how
    many receive buffers on each rank (see `schedir.advance_receives`). None for receives that stay
    where they are listed."""

    channel: str = attrs.field(converter=channel_model)
    room: int | None = attrs.field()

    @room.validator
    def _check_room(self, attribute: object, value: object) -> None:
        if value is not None and not is_number(value):
            raise ValueError(f"room must be a number of buffers or None, not {value!r}")

    @property
    def stays(self) -> bool:
        """Whether receives are posted where they are listed."""
        return self.room is None or self.channel == "host"

    def after(self, schedule: Schedule) -> Ints:
        """For every place of a complete schedule, the compute after which it is posted, -1 for
        none."""
        if self.room is None or self.stays:
            return compute_before(schedule.columns)
        return posted_after(schedule, self.channel, self.room)

    def waits(self, schedule: Schedule, channel: str | None = None) -> Waits:
        """What waits for what as a complete schedule runs, posted like this, under another
        `channel` model if one is named."""
        after = self.after(schedule)
        return waits(schedule, channel or self.channel, posted=after, by_ends=True)


def as_run(schedule: Schedule) -> Schedule:
    """A complete schedule as it is simulated: with its batches split if they block."""
    columns = schedule.columns
    if not (columns.joined & columns.is_kind(*COMMUNICATION)).any():
        return schedule

    def split() -> Schedule:
        return split_batches(schedule) if waits(schedule, CHANNEL).stuck.any() else schedule

    return schedule.once("as run", split)


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
    posting: Posting | None = None

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

    @cached_property
    def waits(self) -> Waits:
        """What waits for what. Without a known posting, receives are posted where they are listed,
        or ahead if a transfer begins before that."""
        if self.posting is not None:
            return self.posting.waits(self.schedule)
        receive = self.graph.transfers.receive
        before = np.where(receive >= 0, self.compute_before[receive], -1)
        ahead = bool((self.begins[receive] < self.ends[before]).any())
        return waits(as_run(self.schedule), CHANNEL, ahead=ahead)


def last_before(columns: Columns, kinds: Iterable[Kind]) -> Ints:
    """For every place, the last place of these kinds before its entry on its rank, -1 for none."""
    places = np.where(columns.is_kind(*kinds), np.arange(len(columns)), -1)
    before = np.maximum.accumulate(np.append(-1, places))[:-1]
    if columns.together:
        before = before[columns.heads][columns.entry]
    return np.where(before < columns.starts[columns.rank], -1, before)


def moments_of(
    schedule: Schedule, starts: Numbers, ends: Numbers, posting: Posting | None = None
) -> Moments:
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
    return Moments(schedule, begins, np.where(at_once, begins, over), posting)
