"""Clocks that are apart and drift are read within the bound that is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.runtime.trace import Alignment, Reading, reading_of

MS = 1_000_000
delays = st.integers(1_000, 20 * MS)
Lengths: TypeAlias = list[tuple[int, int, int]]


def rounds_of(begin: int, offset: int, drift: float, lengths: Lengths) -> Sequence[Sequence[int]]:
    """Rounds one after the other, of which each message takes its own time; the other clock is
    behind that of process 0 by `offset` at 0."""
    found, true = [], begin
    for there, between, back in lengths:
        arrived, left = true + there, true + there + between
        sent, returned = (round((t - offset) * (1 + drift)) for t in (true, left + back))
        found.append((sent, arrived, left, returned))
        true = left + back
    return found


LENGTHS = st.lists(st.tuples(delays, st.integers(0, MS), delays), min_size=1)
OFFSETS = st.integers(-(10**15), 10**15)


@given(OFFSETS, st.floats(-9e-4, 9e-4), LENGTHS, LENGTHS, st.floats(0, 1))
def test_a_time_is_aligned_within_the_bound(
    offset: int, drift: float, lengths: Lengths, later: Lengths, share: float
) -> None:
    begin = 10**16
    first = reading_of(rounds_of(begin, offset, drift, lengths))
    last = reading_of(rounds_of(begin + 10**10, offset, drift, later))
    alignment = Alignment(first, last)
    own = first.at + round(share * (last.at - first.at))
    true = own / (1 + drift) + offset
    rounding = 16  # of floats so large, and of a clock to whole nanoseconds
    assert abs(int(alignment.aligned(np.array([own]))[0]) - true) <= alignment.error + rounding


def test_the_quickest_message_of_each_direction_sets_the_bound() -> None:
    found = reading_of(rounds_of(0, 7_000, 0.0, [(900, 10, 20_000), (30_000, 10, 700)]))
    assert found.error == pytest.approx((900 + 700) / 2, abs=30)
    assert found.offset == pytest.approx(7_000 + (900 - 700) / 2, abs=30)


def test_a_stamp_that_is_missing_stays_so() -> None:
    alignment = Alignment(Reading(100, 50.0), Reading(200, 60.0))
    assert alignment.aligned(np.array([0, 100, 150, 200])).tolist() == [0, 150, 205, 260]
