"""Clocks that are apart and drift are read within the bound that is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedir.runtime.accelerator import Host, Mark
from schedir.runtime.recorder import Anchor, Recorder, Taken
from schedir.runtime.trace import Reading, by_rank_0, reading_of

MS = 1_000_000
RECORDER = Recorder(Host(torch.device("cpu")), traces=True)
delays = st.integers(1_000, 20 * MS)
Lengths: TypeAlias = list[tuple[int, int, int]]


def at(time: int) -> Mark:
    """A mark at a time, in nanoseconds."""
    mark = Mark()
    mark._seconds = time / 1e9
    return mark


def aligned_by(first: Reading, last: Reading, *marks: Mark | None) -> tuple[Any, float]:
    """Marks by process 0's clock, and the error, between two readings."""
    ends = (by_rank_0(each, Anchor(each.at, 0.0, at(each.at))) for each in (first, last))
    (found,), error = RECORDER.read([(at(first.at), Taken(marks, ()))], *ends)
    return found, error


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
    begin = 10**14
    first = reading_of(rounds_of(begin, offset, drift, lengths))
    last = reading_of(rounds_of(begin + 10**10, offset, drift, later))
    own = first.at + round(share * (last.at - first.at))
    true = own / (1 + drift) + offset
    (aligned,), error = aligned_by(first, last, at(own))
    rounding = 16  # of floats so large, and of a clock to whole nanoseconds
    assert abs(int(aligned) - true) <= error + rounding


def test_the_quickest_message_of_each_direction_sets_the_bound() -> None:
    found = reading_of(rounds_of(0, 7_000, 0.0, [(900, 10, 20_000), (30_000, 10, 700)]))
    assert found.error == pytest.approx((900 + 700) / 2, abs=30)
    assert found.offset == pytest.approx(7_000 + (900 - 700) / 2, abs=30)


def test_a_stamp_that_is_missing_stays_so() -> None:
    marks = None, at(100), at(150), at(200)
    found, _ = aligned_by(Reading(100, 50.0), Reading(200, 60.0), *marks)
    assert found.tolist() == [0, 150, 205, 260]
