"""Why ranks are idle, against timetables drawn by hand and brute force."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Kind, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE
from schedir.simulator import Cause, Measured
from tests.built_in import NAMES
from tests.literals import SHORT, listed
from tests.timelines import as_if_measured, drawn_timeline

NAN = math.nan
seeds = st.integers(0, 1 << 32)


def said(line: Timeline, rank: int) -> list[str]:
    """What is said of a rank's idle time, in words."""

    def action(place: int | None) -> str:
        return "-" if place is None else str(line.schedule.columns.action(place))

    return [
        f"{i.start:g}..{i.end:g} {i.cause}: {action(i.entry)} for {action(i.blamed)} through "
        f"{action(i.transfer)}, root {action(i.root)}"
        for i in line.idle[rank]
    ]


def test_warmup_drain_and_what_is_done() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9
    #   rank 0  0F0  0F1            0B0------ 0B1 ------
    #   rank 1       1F0  1B0------ 1F1  1B1------
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    assert said(line, 0) == [
        "2..4 warmup: 0B0 for 1B0 through 0RECV_GRAD0, root -",
        "6..7 drain: 0B1 for 1B1 through 0RECV_GRAD1, root -",
    ]
    assert said(line, 1) == [
        "0..1 warmup: 1F0 for 0F0 through 1RECV_ACT0, root -",
        "7..9 done: - for - through -, root -",
    ]


def test_a_wait_for_compute_and_then_for_its_transfer() -> None:
    #   time    0    1    2    3    4    5    6    7    8
    #   rank 0  0F0  |-0SEND_ACT0-|              0B0------
    #   rank 1                    1F0  1B0------
    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    line = schedir.simulate(schedule, CostModel(latency=3))
    assert said(line, 1) == [
        "0..1 warmup: 1F0 for 0F0 through 1RECV_ACT0, root -",
        "1..4 communication: 1F0 for 0SEND_ACT0 through 1RECV_ACT0, root -",
        "7..12 done: - for - through -, root -",
    ]


def test_a_send_that_is_listed_late_waits_for_what_stands_before_it() -> None:
    schedule = listed(2, "0 1", "0F0 0F1 0SEND_ACT0 0SEND_ACT1", "1RECV_ACT0 1F0 1RECV_ACT1 1F1")
    line = Timeline(schedule, [0, 1, 2, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 3, 2, 4])
    assert said(line, 1) == ["0..2 warmup: 1F0 for 0F1 through 1RECV_ACT0, root -"]


def test_a_slower_stage_is_the_root_of_waits_through_others() -> None:
    #   stage 2 takes twice as long: in the steady state ranks 0, 1 and 3 wait for it alone
    costs = CostModel(forward=(1, 1, 2, 1), backward=(2, 2, 4, 2))
    line = schedir.simulate(schedir.build("1f1b", microbatches=32), costs)
    columns = line.schedule.columns
    for rank in (0, 1, 3):
        slower = [one for one in line.idle[rank] if one.cause is Cause.SLOWER]
        assert sum(one.end - one.start for one in slower) > 0.8 * line.ranks[rank].idle
        assert {int(columns.stage[one.root]) for one in slower if one.root is not None} == {2}
    assert all(one.cause is not Cause.SLOWER for one in line.idle[2])
    blamed = {str(columns.action(i.blamed))[:2] for i in line.idle[0] if i.blamed is not None}
    assert blamed == {"1B"}  # what it waits for itself


def test_a_slightly_slower_stage_does_not_explain_all_waits() -> None:
    costs = CostModel(forward=(1, 1, 1, 1.05), backward=(2, 2, 2, 2.1))
    line = schedir.simulate(schedir.build("1f1b", microbatches=16), costs)
    share = line.idle_columns.by_cause()[:, list(Cause).index(Cause.SLOWER)]
    # Each forward and backward on the last rank takes 0.15 longer.
    assert share.tolist() == pytest.approx([12 * 0.15, 13 * 0.15, 14 * 0.15, 0])


def test_a_sum_over_replicas() -> None:
    #   time    0    1    2    3    4    5    6    7
    #   rank 0  0F0  0B0------                sum  0OPTIM_STEP
    #   rank 1  0F1  0B1------ 0F2  0B2------ sum  0OPTIM_STEP
    schedule = listed(
        3, "0,1", "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", "0F1 0B1 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP"
    )
    line = schedir.simulate(schedule, CostModel(reduce_grad=1, optim_step=1))
    assert said(line, 0) == [
        "3..6 slower: 0OPTIM_STEP for 0B2 through 0REDUCE_GRAD, root 0B2",
        "6..7 collective: 0OPTIM_STEP for 0REDUCE_GRAD through 0REDUCE_GRAD, root -",
    ]
    assert said(line, 1) == [
        "6..7 collective: 0OPTIM_STEP for 0REDUCE_GRAD through 0REDUCE_GRAD, root -"
    ]
    bare = listed(3, "0,1", "0F0 0B0 0REDUCE_GRAD", "0F1 0B1 0F2 0B2 0REDUCE_GRAD")
    line = schedir.simulate(bare, CostModel(reduce_grad=1))
    assert said(line, 1) == ["6..7 collective: - for 0REDUCE_GRAD through 0REDUCE_GRAD, root -"]


def test_a_transfer_that_seems_to_end_after_its_consumer_has_started() -> None:
    late = 3 + 4e-6
    line = Timeline(
        SHORT,
        [0.5, 2, 7, 8.5, 2, 3, 4.5, 7],
        [2, late, 8, 10, late, 4.5, 7, 8],
        unit="s",
        measured=Measured(0, 1e-5),
    )
    assert said(line, 1)[1] == ("2..3 communication: 1F0 for 0SEND_ACT0 through 1RECV_ACT0, root -")


def test_what_is_not_known() -> None:
    starts, ends = [0.5, 2, 7, 8.5, 2, 3, 4.5, 7], [2, 2.5, 8, 10, 2.5, 4.5, 7, 8]
    # Of the transfers nothing is known: they may take all the time that nothing else explains.
    bare = Timeline(
        SHORT, [0.5, NAN, NAN, 8.5, NAN, 3, 4.5, NAN], [2, NAN, NAN, 10, NAN, 4.5, 7, NAN]
    )
    assert said(bare, 1)[:2] == [
        "0..2 warmup: 1F0 for 0F0 through 1RECV_ACT0, root -",
        "2..3 communication: 1F0 for 0SEND_ACT0 through 1RECV_ACT0, root -",
    ]
    # Where only the start is known, nobody waited: it was there.
    found = Timeline(SHORT, [0.5, 2, NAN, 8.5, 2, 3, 4.5, NAN], [2, NAN, NAN, 10, NAN, 4.5, 7, NAN])
    assert said(found, 1)[:2] == [
        "0..2 warmup: 1F0 for 0F0 through 1RECV_ACT0, root -",
        "2..3 overhead: 1F0 for - through -, root -",
    ]
    # Of compute that lies in the gap, or that the gap may have waited for.
    hole = Timeline(SHORT, [NAN, 2, 7, 8.5, 2, NAN, 4.5, 7], [NAN, 2.5, 8, 10, 2.5, NAN, 7, 8])
    assert said(hole, 0)[0] == "0..8.5 unknown: 0B0 for - through -, root -"
    assert said(hole, 1)[0] == "0..4.5 unknown: 1B0 for - through -, root -"
    nothing = Timeline(SHORT, [NAN] * 8, [NAN, NAN, NAN, 10, *[NAN] * 4])
    assert said(nothing, 0) == ["0..10 unknown: - for - through -, root -"]
    assert Timeline(SHORT, [NAN] * 8, [NAN] * 8).idle == ((), ())  # of no length
    tail = Timeline(SHORT, [*starts[:3], NAN, *starts[4:]], [*ends[:3], NAN, *ends[4:]])
    assert said(tail, 0)[-1] == "2..8 unknown: - for - through -, root -"


def covered(line: Timeline, rank: int) -> None:
    """The rank's idle time and its compute are all of its time, without overlap."""
    own = [span for span in line.spans[rank] if span.action.kind in COMPUTE]
    known = [(s.start, s.end) for s in own if s.start == s.start and s.end == s.end]
    idle = [(one.start, one.end) for one in line.idle[rank]]
    assert all(start < end for start, end in idle)
    assert all(a[1] <= b[0] for a, b in pairwise(idle))
    cuts = sorted({0, line.makespan, *(t for pair in known + idle for t in pair)})
    assert cuts[-1] == line.makespan
    busy = 0.0
    for start, end in pairwise(cuts):
        computes = any(s <= start and end <= e for s, e in known)
        assert computes != any(s <= start and end <= e for s, e in idle), (start, end)
        busy += (end - start) * computes
    assert line.ranks[rank].busy == pytest.approx(busy, abs=1e-9)
    assert line.ranks[rank].busy + line.ranks[rank].idle == pytest.approx(line.makespan)
    assert sum(e - s for s, e in idle) == pytest.approx(line.ranks[rank].idle, abs=1e-9)


@given(seeds)
def test_idle_time_and_compute_are_all_of_the_time(seed: int) -> None:
    chance = random.Random(seed)
    line = drawn_timeline(chance)
    measured = [as_if_measured(line, chance, unknown) for unknown in (0.0, 0.3)]
    for each in (line, *measured):
        for rank in range(line.schedule.ranks):
            covered(each, rank)
        busy = sum(one.busy for one in each.ranks)
        whole = each.schedule.ranks * each.makespan
        assert each.bubble_fraction == pytest.approx(1 - busy / whole if whole else 0)
    if line.starts.dtype == np.int64:
        assert [sum(one.end - one.start for one in own) for own in line.idle] == [
            one.idle for one in line.ranks
        ]


def test_compute_that_overlaps_counts_once() -> None:
    schedule = listed(2, "0", "0F0 0F1 0B0 0B1")
    line = Timeline(schedule, [0, 1, 9, 5], [4, 3, 10, 7])
    assert (line.ranks[0].busy, line.ranks[0].idle) == (7, 3)
    assert [(one.start, one.end) for one in line.idle[0]] == [(4, 5), (7, 9)]


@given(seeds)
def test_every_moment_of_a_simulated_gap_equals_brute_force(seed: int) -> None:
    """Asked at each moment alone: has what makes the payload, and all before its send, ended?"""
    line = drawn_timeline(random.Random(seed), batches=False)
    spans = {(r, str(s.action)): s for r, own in enumerate(line.spans) for s in own}
    ranks = graph_of(line.schedule).runs
    columns = line.schedule.columns
    waits = (Cause.WARMUP, Cause.SLOWER, Cause.DRAIN, Cause.DATA)
    for own in line.idle:
        for one in own:
            assert one.cause not in (Cause.OVERHEAD, Cause.UNKNOWN)
            if one.entry is None or one.transfer is None or one.cause is Cause.COLLECTIVE:
                continue
            receive = columns.action(one.transfer)
            if receive.kind is Kind.REDUCE_GRAD:
                continue
            send = receive.counterpart
            assert send is not None
            source = int(ranks[send.stage, send.microbatch])
            index = line.schedule.flat[source].index(send)
            before = [s.end for s in line.spans[source][:index] if s.action.kind in COMPUTE]
            if one.cause in waits:
                assert one.end <= max(before)
            else:
                assert one.start >= max(before)
                assert one.end <= spans[source, str(send)].end


@given(seeds)
def test_a_rank_waits_for_what_runs_meanwhile(seed: int) -> None:
    line = drawn_timeline(random.Random(seed))
    for rank, own in enumerate(line.idle):
        for one in own:
            if one.cause is Cause.DONE:
                assert (one.end, one.entry) == (line.makespan, None)
            elif one.entry is not None:
                assert line.schedule.columns.rank[one.entry] == rank
                assert line.starts[one.entry] >= one.end
            if one.blamed is not None:
                assert line.ends[one.blamed] >= one.end


@pytest.mark.parametrize("name", NAMES)
def test_idle_time_of_built_in_schedules_is_fill_and_drain(name: str) -> None:
    line = schedir.simulate(schedir.build(name, ranks=4, microbatches=8))
    causes = {one.cause for own in line.idle for one in own}
    assert causes <= {Cause.WARMUP, Cause.DRAIN, Cause.DONE, Cause.DATA}
