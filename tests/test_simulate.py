"""The timeline and the counts, against hand-drawn timetables and brute force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Kind, Timeline
from schedir.graph.alive import weight_versions
from schedir.ir import COMPUTE, columns_of
from schedir.render.terminal_timeline import timeline_text
from tests.built_in import NAMES
from tests.literals import CROSSING, SHORT, listed
from tests.timelines import simulated

ROOT = Path(__file__).resolve().parents[1]


STARTS = [0.5, 2, 7, 8.5, 2, 3, 4.5, 7]
ENDS = [2, 2.5, 8, 10, 3, 4.5, 7, 8]
NAN = float("nan")


def times(line: Timeline, *ranks: int) -> dict[str, tuple[float, float]]:
    """When the compute of these ranks, or of all of them, starts and ends."""
    spans = (s for rank in ranks or range(len(line.spans)) for s in line.spans[rank])
    return {str(s.action): (s.start, s.end) for s in spans if s.action.kind in COMPUTE}


def test_1f1b_on_two_ranks_by_hand() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9
    #   rank 0  0F0  0F1            0B0------ 0B1 ------         (0B1 waits for 1B1 at 7)
    #   rank 1       1F0  1B0------ 1F1  1B1------
    line = simulated("1f1b", 2, 2)
    steps = {"0OPTIM_STEP": (9, 9)}, {"1OPTIM_STEP": (7, 7)}
    own = {"0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9)}
    assert times(line, 0) == own | steps[0]
    own = {"1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7)}
    assert times(line, 1) == own | steps[1]
    assert line.makespan == 9
    assert [(r.busy, r.idle, r.span) for r in line.ranks] == [(6, 3, 9), (6, 3, 6)]
    assert line.bubble_fraction == pytest.approx(1 / 3)


def test_a_receive_that_is_listed_late_holds_no_transfer() -> None:
    #   time    0    1    2    3    4    5    6    7
    #   rank 0  0F0  0F1
    #                └────────1RECV_ACT1                         arrives at 3, before 1B0 is done
    #   rank 1            1F0  1B0------ 1F1  1B1------           listed: 1F1 at 6
    costs, before = CostModel(latency=1), {"1F0": (2, 3), "1B0": (3, 5)}
    ahead = schedir.simulate(CROSSING, costs)
    assert times(ahead, 1) == before | {"1F1": (5, 6), "1B1": (6, 8)}
    assert (ahead.spans[0][3].start, ahead.spans[0][3].end) == (2, 3)
    assert (ahead.makespan, type(ahead.makespan)) == (11, int)
    as_listed = schedir.simulate(CROSSING, costs, receives="listed")
    assert times(as_listed, 1) == before | {"1F1": (6, 7), "1B1": (7, 9)}
    assert (as_listed.spans[0][3].start, as_listed.spans[0][3].end) == (5, 6)


def test_a_blocking_schedule_is_refused() -> None:
    blocks = listed(1, "0 1", "0RECV_GRAD0 0F0 0SEND_ACT0 0B0", "1RECV_ACT0 1F0 1B0")
    with pytest.raises(schedir.ScheduleError, match="S302 unmatched: 0RECV_GRAD0 is never sent"):
        schedir.simulate(blocks)


def test_a_timeline_made_by_hand() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9    10
    #   rank 0    0F0-----                                0B0-----
    #   rank 1                1F0-----1B0----------
    line = Timeline(SHORT, STARTS, ENDS)
    assert line.makespan == 10
    assert [(r.busy, r.idle, r.span) for r in line.ranks] == [(3, 7, 9.5), (4, 6, 4)]
    assert [(r.peak_activations, r.weight_versions) for r in line.ranks] == [(1, 1), (1, 1)]
    assert line.bubble_fraction == pytest.approx(1 - 7 / 20)
    assert line.span_bubble_fraction == pytest.approx(1 - 7 / 19)
    assert "bubble 65.0% (63.2% of the longest span)" in timeline_text(line)
    assert times(line, 1) == {"1F0": (3, 4.5), "1B0": (4.5, 7)}
    assert [s.start for rank in line.spans for s in rank] == STARTS


def test_a_timeline_made_by_hand_is_the_simulated_one() -> None:
    for name in NAMES:
        line = schedir.simulate(schedir.build(name))
        starts, ends = line.starts.tolist(), line.ends.tolist()
        made = Timeline(line.schedule, starts, ends)
        assert made == line
        assert (made.bubble_fraction, made.ranks) == (line.bubble_fraction, line.ranks)
        assert type(made.makespan) is int  # as the times are
        ends[-1] += 1
        assert Timeline(line.schedule, starts, ends) != line


def test_what_is_not_known_counts_as_nothing() -> None:
    line = Timeline(SHORT, [0.5, NAN, NAN, NAN, *STARTS[4:]], [2, NAN, NAN, 10, *ENDS[4:]])
    assert line.makespan == 10
    assert [(r.busy, r.idle, r.span) for r in line.ranks] == [(1.5, 8.5, 9.5), (4, 6, 4)]
    assert line == Timeline(SHORT, line.starts, line.ends)
    nothing = Timeline(SHORT, [NAN] * 8, [NAN] * 8)
    assert (nothing.makespan, nothing.bubble_fraction) == (0, 0)
    assert [(r.busy, r.idle, r.span) for r in nothing.ranks] == [(0, 0, 0)] * 2


def test_a_timeline_is_not_written() -> None:
    starts = np.array(STARTS)
    line = Timeline(SHORT, starts, ENDS)
    starts[0] = 1
    assert line.starts[0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        line.starts[0] = 1


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        (STARTS[:-1], ENDS, r"starts must hold one time for each of the 8 actions.*\(7,\)"),
        (STARTS, [*ENDS, 9], r"ends must hold one time for each of the 8 actions.*\(9,\)"),
        (STARTS, [*ENDS[:6], 4, 8], r"rank 1 #2 1B0 is said to run from 4.5 to 4.0"),
        ([-1, *STARTS[1:]], ENDS, r"at least 0: rank 0 #0 0F0 is said to run from -1.0 to 2.0"),
        (STARTS, [*ENDS[:7], float("inf")], r"ends: a time .*rank 1 #3 1SEND_GRAD0 .* to inf"),
    ],
)
def test_times_must_fit_the_schedule(starts: list[float], ends: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline(SHORT, starts, ends)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"unit": "h"}, "unit must be s, ms, us or None, not 'h'"),
        ({"sizes": 3}, "sizes"),
        ({"measured": 3}, "measured"),
    ],
)
def test_what_a_timeline_is_said_to_be_must_be_known(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Timeline(SHORT, STARTS, ENDS, **wrong)


@st.composite
def stage_lists(draw: st.DrawFn) -> list[Action]:
    """One stage on one rank: forwards at versions that exist, their backwards, updates."""
    actions: list[Action] = []
    open_forwards: list[int] = []
    steps = count = 0
    for move in draw(st.lists(st.sampled_from("fbo"), max_size=14)):
        if move == "f":
            version = draw(st.none() | st.integers(0, steps))
            actions.append(schedir.forward(0, count, version))
            open_forwards.append(count)
            count += 1
        elif move == "b" and open_forwards:
            m = open_forwards.pop(draw(st.integers(0, len(open_forwards) - 1)))
            actions.append(schedir.backward(0, m))
        elif move == "o":
            actions.append(schedir.optim_step(0))
            steps += 1
    return actions


def alive_by_brute_force(actions: list[Action]) -> int:
    """Walk the list, and at every place ask of every version whether a later action reads it."""
    newest: list[int] = []
    reads: list[int | None] = []
    of_microbatch: dict[int | None, int] = {}
    for action in actions:
        now = newest[-1] if newest else 0
        if action.kind is Kind.FORWARD:
            of_microbatch[action.microbatch] = now if action.version is None else action.version
        newest.append(now + (action.kind is Kind.OPTIM_STEP))
        reads.append(of_microbatch.get(action.microbatch))
    alive = (
        {now, *(v for v in reads[at:] if v is not None and v <= now)}
        for at, now in enumerate(newest, 1)
    )
    return max(map(len, alive), default=1)


@given(stage_lists())
def test_weight_versions_alive_equal_brute_force(actions: list[Action]) -> None:
    versions = weight_versions(columns_of([actions]), 0)
    assert (versions[0].peak()[0] if versions else 1) == alive_by_brute_force(actions)


@given(st.floats(0.01, 3), st.floats(0.01, 3), st.integers(1, 40))
def test_a_rank_that_never_waits_is_idle_for_exactly_nothing(
    forward: float, backward: float, microbatches: int
) -> None:
    costs = CostModel(forward=forward, backward=backward, optim_step=0.1)
    line = schedir.simulate(schedir.build("1f1b", ranks=1, microbatches=microbatches), costs)
    assert (line.ranks[0].idle, line.bubble_fraction) == (0, 0)
    assert line.ranks[0].busy == line.makespan


def test_costs_are_by_stage_and_by_link() -> None:
    #   time    0         2         4         6         8         10        12
    #   rank 0  0F0 ───                                    ── 0B0-----
    #   rank 1            1F0------             ─── 1B0
    #   rank 2                       ── 2F0 2B0-               boundary 0 takes 4 / 4, and 1 there,
    #                                                          2 back; boundary 1 takes 2 / 4
    costs = CostModel(
        forward=(1, 2, 1),
        backward=(2, 1, 2),
        optim_step=(0, 0, 3),
        boundary_bytes=[4, 2],  # type: ignore[arg-type]
        bandwidth=4,
        latency={(0, 1): 1, (1, 2): 0, (2, 1): 1, (1, 0): 2},
    )
    line = schedir.simulate(schedir.build("1f1b", ranks=3, microbatches=1), costs)
    assert times(line) == {
        "0F0": (0, 1),
        "1F0": (3, 5),
        "2F0": (5.5, 6.5),
        "2B0": (6.5, 8.5),
        "2OPTIM_STEP": (8.5, 11.5),
        "1B0": (10, 11),
        "1OPTIM_STEP": (11, 11),
        "0B0": (14, 16),
        "0OPTIM_STEP": (16, 16),
    }


def test_whole_costs_have_whole_times() -> None:
    built = schedir.build("1f1b", ranks=2, microbatches=4)
    whole = CostModel(latency=1, boundary_bytes=10, bandwidth={(0, 1): float("inf"), (1, 0): 5})
    line = schedir.simulate(built, whole, durations={(0, 0): 2**40 + 1})
    assert line.starts.dtype == np.int64
    assert line.spans[1][0].start == 2**40 + 1
    for costs in (CostModel(bandwidth=4, boundary_bytes=10), CostModel(forward=1.0)):
        assert schedir.simulate(built, costs).starts.dtype == np.float64
    # What no int64 can hold is a float.
    long = CostModel(forward=10**15, backward=10**15)
    many = schedir.build("1f1b", ranks=1, microbatches=5000)
    assert schedir.simulate(many, long).makespan == pytest.approx(1e19)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (CostModel(forward=(1, 2, 3)), "forward has 3 numbers, but 1f1b has 2 stages: give one"),
        (CostModel(weight_bytes=(1,)), "weight_bytes has 1 numbers, but 1f1b has 2 stages"),
        (CostModel(boundary_bytes=(1, 2)), "boundary_bytes has 2 numbers, but 1f1b has 1 boundar"),
        (CostModel(latency={(0, 1): 1}), r"latency has no number for the link \(1, 0\), on which"),
        (CostModel(bandwidth={}), r"bandwidth has no number for the link \(0, 1\)"),
    ],
)
def test_costs_must_fit_the_schedule(costs: CostModel, message: str) -> None:
    with pytest.raises(schedir.SchedirError, match=message):
        schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2), costs)


def test_links_must_be_pairs_of_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"latency must be by \(source rank, target rank\), not by 0"
    ):
        CostModel(latency={0: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"bandwidth of link \(0, 1\) must be above 0"):
        CostModel(bandwidth={(0, 1): 0})


def test_durations_are_those_of_the_lists_as_given() -> None:
    compute = listed(1, "0 1", "0F0 0B0", "1F0 1B0")
    line = schedir.simulate(compute, durations={(0, 1): 10, (1, 0): 4})
    assert times(line) == {"0F0": (0, 1), "1F0": (1, 5), "1B0": (5, 7), "0B0": (7, 17)}
    complete = schedir.insert_communication(compute)
    assert schedir.simulate(complete, durations={(0, 3): 10, (1, 1): 4}) == line


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({(0, 12): 1}, r"durations\[0, 12\] is of no entry of listed: .* \[8, 8\] entries"),
        ({(0, 1): 1, (2, 0): 1}, r"durations\[2, 0\] is of no entry of listed"),
        ({(0, -1): 1}, r"durations\[0, -1\] is of no entry"),
        ({(2**70, 0): 1}, r"durations\[1180591620717411303424, 0\] is of no entry"),
        ({0: 1}, r"durations must be by \(rank, index\), not by 0"),
        ({(0, 0.5): 1}, r"durations must be by \(rank, index\), not by \(0, 0.5\)"),
        ({(0, 1): NAN}, r"durations\[0, 1\], of 0SEND_ACT0, must be finite and >= 0 .* not nan"),
        ({(0, 0): 1, (1, 2): -1}, r"durations\[1, 2\], of 1B0, must be finite and >= 0 .* not -1"),
    ],
)
def test_durations_must_be_times_of_entries(durations: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedir.simulate(CROSSING, durations=durations)
    with pytest.raises(TypeError, match="must be a number, not '1'"):
        schedir.simulate(CROSSING, durations={(0, 0): "1"})  # type: ignore[dict-item]


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match='receives must be "ahead" or "listed", not \'late\''):
        schedir.simulate(CROSSING, receives="late")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="costs must be a CostModel, not 3"):
        schedir.simulate(CROSSING, 3)  # type: ignore[arg-type]


def test_a_new_kind_of_compute_is_a_row_of_the_table(tmp_path: Path) -> None:
    """That costs what its row says. In a process of its own, whose table has the row."""
    row = 'PAUSE = Meaning("PAUSE", "pause", "compute", (), cost=3)'
    program = f"""
from importlib.machinery import SourceFileLoader as Loader
read = Loader.get_data
def get_data(self, path):
    head, first, rest = read(self, path).partition(b"\\n    FORWARD = ")
    return head + (b"\\n    " + {row.encode()!r} + first if first else b"") + rest
Loader.get_data = get_data
import schedir
schedule = schedir.Schedule.of("pausing", [0, 1], ["0F0 0PAUSE0 0B0", "1F0 1PAUSE0 1B0"])
assert schedir.check(schedule).ok
for costs in (None, schedir.CostModel(latency=1)):
    print(schedir.simulate(schedule, costs).makespan)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("9\n11\n", "")
