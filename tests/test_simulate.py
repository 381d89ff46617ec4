"""The timeline and the counts, against hand-drawn timetables and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Kind, Timeline
from schedir.ir import COMPUTE, columns_of, weight_versions
from tests.built_in import NAMES


def times(line: schedir.Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [
        (str(s.action), s.start, s.end)
        for s in line.spans[rank]
        if s.action.kind in COMPUTE and s.action.kind is not Kind.OPTIM_STEP
    ]


def test_1f1b_on_two_ranks_by_hand() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9
    #   rank 0  0F0  0F1            0B0------ 0B1 ------         (0B1 waits for 1B1 at 7)
    #   rank 1       1F0  1B0------ 1F1  1B1------
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    assert times(line, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)]
    assert times(line, 1) == [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]
    assert line.makespan == 9
    assert [(r.busy, r.idle, r.span) for r in line.ranks] == [(6, 3, 9), (6, 3, 6)]
    assert line.bubble_fraction == pytest.approx(1 / 3)


def test_costs_and_communication() -> None:
    costs = CostModel(forward=2, backward=3, communication=0.5, optim_step=1)
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=1), costs)
    assert times(line, 1) == [("1F0", 2.5, 4.5), ("1B0", 4.5, 7.5)]
    assert times(line, 0) == [("0F0", 0, 2), ("0B0", 8, 11)]
    assert line.makespan == 12
    transfer = next(s for s in line.spans[0] if s.action.kind is Kind.SEND_ACT)
    assert (transfer.start, transfer.end) == (2, 2.5)


def test_transfers_of_one_channel_follow_each_other() -> None:
    text = (
        "schedir 1\nname x\nmicrobatches 3\nplacement 0 1\n"
        "rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0F2 0SEND_ACT2 "
        "0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0RECV_GRAD2 0B2\n"
        "rank 1: 1RECV_ACT0 1RECV_ACT1 1RECV_ACT2 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 "
        "1F2 1B2 1SEND_GRAD2\n"
    )
    line = schedir.simulate(schedir.loads(text), CostModel(communication=10))
    sends = [s for s in line.spans[0] if s.action.kind is Kind.SEND_ACT]
    assert [(s.start, s.end) for s in sends] == [(1, 11), (11, 21), (21, 31)]


def test_split_backward_holds_its_activation_until_w() -> None:
    text = "schedir 1\nname x\nmicrobatches 2\nplacement 0\nrank 0: 0F0 0I0 0F1 0I1 0W0 0W1\n"
    line = schedir.simulate(schedir.loads(text))
    assert line.ranks[0].peak_activations == 2
    assert line.makespan == 6


def test_reduce_grad_waits_for_all_replicas() -> None:
    text = (
        "schedir 1\nname x\nmicrobatches 3\nplacement 0,1\n"
        "rank 0: 0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP\n"
        "rank 1: 0F1 0B1 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP\n"
    )
    line = schedir.simulate(schedir.loads(text), CostModel(reduce_grad=1, optim_step=1))
    assert [line.spans[rank][-1].end for rank in (0, 1)] == [8, 8]


def test_a_blocking_schedule_is_refused() -> None:
    text = (
        "schedir 1\nname x\nmicrobatches 1\nplacement 0 1\n"
        "rank 0: 0RECV_GRAD0 0F0 0SEND_ACT0 0B0\nrank 1: 1RECV_ACT0 1F0 1B0\n"
    )
    with pytest.raises(
        schedir.ScheduleError, match="S302 unmatched: 0RECV_GRAD0 is never sent"
    ) as error:
        schedir.simulate(schedir.loads(text))
    assert error.value.diagnostics


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_costs_must_be_durations(cost: float) -> None:
    with pytest.raises(ValueError, match="finite and >= 0"):
        CostModel(forward=cost)
    with pytest.raises(TypeError, match="must be a number"):
        CostModel(forward="1")  # type: ignore[arg-type]


MEASURED = schedir.loads(
    "schedir 1\nname x\nmicrobatches 1\nplacement 0 1\n"
    "rank 0: 0F0 0SEND_ACT0 0RECV_GRAD0 0B0\nrank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0\n"
)
STARTS = [0.5, 2, 7, 8.5, 2, 3, 4.5, 7]
ENDS = [2, 2.5, 8, 10, 3, 4.5, 7, 8]
NAN = float("nan")


def test_a_timeline_made_by_hand() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9    10
    #   rank 0    0F0-----                                0B0-----
    #   rank 1                1F0-----1B0----------
    line = Timeline(MEASURED, STARTS, ENDS)
    assert line.makespan == 10
    assert [(r.busy, r.idle, r.span) for r in line.ranks] == [(3, 7, 9.5), (4, 6, 4)]
    assert [(r.peak_activations, r.weight_versions) for r in line.ranks] == [(1, 1), (1, 1)]
    assert line.bubble_fraction == pytest.approx(1 - 7 / 20)
    assert times(line, 1) == [("1F0", 3, 4.5), ("1B0", 4.5, 7)]
    assert [s.start for rank in line.spans for s in rank] == STARTS


def test_a_timeline_made_by_hand_is_the_simulated_one() -> None:
    for name in NAMES:
        line = schedir.simulate(schedir.build(name))
        starts = [span.start for rank in line.spans for span in rank]
        ends = [span.end for rank in line.spans for span in rank]
        made = Timeline(line.schedule, starts, ends)
        assert made == line
        assert (made.makespan, made.bubble_fraction, made.ranks) == (
            line.makespan,
            line.bubble_fraction,
            line.ranks,
        )
        assert type(made.makespan) is int  # as the times are
        ends[-1] += 1
        assert Timeline(line.schedule, starts, ends) != line


def test_what_is_not_known_counts_as_nothing() -> None:
    line = Timeline(MEASURED, [0.5, NAN, NAN, NAN, *STARTS[4:]], [2, NAN, NAN, 10, *ENDS[4:]])
    assert line.makespan == 10
    assert [(r.busy, r.idle, r.span) for r in line.ranks] == [(1.5, 8.5, 9.5), (4, 6, 4)]
    assert line == Timeline(MEASURED, line.starts, line.ends)
    nothing = Timeline(MEASURED, [NAN] * 8, [NAN] * 8)
    assert (nothing.makespan, nothing.bubble_fraction) == (0, 0)
    assert [(r.busy, r.idle, r.span) for r in nothing.ranks] == [(0, 0, 0)] * 2


def test_a_timeline_is_not_written() -> None:
    starts = np.array(STARTS)
    line = Timeline(MEASURED, starts, ENDS)
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
        Timeline(MEASURED, starts, ends)


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
    newest, reads, of_microbatch = 0, [], {}
    for action in actions:
        if action.kind is Kind.FORWARD:
            of_microbatch[action.microbatch] = newest if action.version is None else action.version
        newest += action.kind is Kind.OPTIM_STEP
        reads.append(None if action.kind is Kind.OPTIM_STEP else of_microbatch[action.microbatch])
    most, newest = 1, 0
    for index, action in enumerate(actions):
        newest += action.kind is Kind.OPTIM_STEP
        most = max(
            most, len({newest} | {v for v in reads[index + 1 :] if v is not None and v <= newest})
        )
    return most


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
