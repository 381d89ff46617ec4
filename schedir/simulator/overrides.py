"""Single entries of a schedule that take another time than the cost model says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from schedir.ir import COMMUNICATION, Ints, Plan, Schedule, Time
from schedir.simulator.prices import Prices
from schedir.simulator.times import Numbers
from schedir.simulator.values import MOST, expect_number

Durations: TypeAlias = Mapping[tuple[int, int], Time]
"""How long entries take, by (rank, index)."""


def overridden(
    priced: Prices, given: Schedule, complete: Schedule, planned: Plan, durations: Durations
) -> Prices:
    """The prices with those of some entries replaced, located in the lists as they were `given`.

    Raises ValueError for a key that names no entry, ValueError or TypeError for what is no finite
    time >= 0.
    """
    heads, times = _heads(given, durations), _times(given, durations)
    columns = complete.columns
    if complete is not given:
        # Both have the same entries, but for communication.
        heads = np.flatnonzero(~columns.is_kind(*COMMUNICATION))[heads]
    # The time given to the entry of each place, -1 for none.
    by_entry = np.full(int(columns.entry[-1]) + 1, -1, times.dtype)
    by_entry[columns.entry[heads]] = times
    by_place = by_entry[columns.entry]

    own = by_place[planned.compute]
    whole = np.where(planned.last == np.arange(len(own)), own, 0)
    places, exchanges = planned.exchanged
    longest = np.full(len(priced.takes), -1, times.dtype)
    np.maximum.at(longest, exchanges, by_place[places])
    takes = np.where(longest >= 0, longest, priced.takes)
    return Prices(
        compute=np.where(own >= 0, whole, priced.compute),
        takes=takes,
        holds=np.minimum(priced.holds, takes),
    )


def _heads(given: Schedule, durations: Durations) -> Ints:
    """The place of the first action of each entry that is named."""
    heads = given.columns.heads
    first = np.searchsorted(heads, given.columns.starts)
    lengths = np.diff(first).tolist()
    for key in durations:
        if not (isinstance(key, tuple) and len(key) == 2 and all(map(_is_int, key))):
            raise ValueError(f"durations must be by (rank, index), not by {key!r}")
        rank, index = key
        if not 0 <= rank < given.ranks:
            why = f"there are {given.ranks} ranks"
        elif not 0 <= index < lengths[rank]:
            why = f"rank {rank} has {lengths[rank]}"
        else:
            continue
        raise ValueError(f"durations[{rank}, {index}] is of no entry of {given.name}: {why}")
    ranks, indices = np.array([*durations]).T
    found: Ints = heads[first[ranks] + indices]
    return found


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _times(given: Schedule, durations: Durations) -> Numbers:
    times = np.array([*durations.values()])
    if times.dtype.kind not in "iuf" or not ((times >= 0) & (times <= MOST)).all():
        for (rank, index), time in durations.items():
            expect_number(f"durations[{rank}, {index}], of {given.actions[rank][index]},", time)
    return times.astype(np.float64 if times.dtype.kind == "f" else np.int64)
