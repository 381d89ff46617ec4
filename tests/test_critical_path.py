"""The critical path, against brute force over the dependencies of each entry."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import pairwise, product

import attrs
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Kind, Timeline
from schedir.checker import CHANNELS
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, CONSUMES, RECEIVES, SENDS
from schedir.simulator import Cause, Measured
from tests.built_in import NAMES
from tests.literals import listed
from tests.stepped import of_link, of_stage
from tests.test_stepped import copied, some_costs, some_durations, some_schedule
from tests.timelines import as_if_measured, drawn_run, drawn_timeline

seeds = st.integers(0, 1 << 32)


def path(line: Timeline) -> str:
    return " ".join(str(line.schedule.columns.action(place)) for place in line.critical_path)


def test_1f1b_by_hand() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9
    #   rank 0  0F0  0F1            0B0------ 0B1 ------
    #   rank 1       1F0  1B0------ 1F1  1B1------
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    assert path(line) == "0F0 1RECV_ACT0 1F0 1B0 1F1 1B1 0RECV_GRAD1 0B1 0OPTIM_STEP"


def test_a_path_through_batches_by_hand() -> None:
    #   time    0    5    10   15   20   25   30   35   40     each transfer takes 5
    #   rank 0  FFF                                 B B
    #   rank 1         F     ─────   F         BB              1SEND_GRAD0, 2 and 1 are sent at 18,
    #   rank 2                F F F BB BB BB                   20, 22; they wait for 0RECV_GRAD0's
    schedule = listed(
        3,
        "0 1 2",
        "0F0 0SEND_ACT0 0F2 0SEND_ACT2 0F1 (0SEND_ACT1;0RECV_GRAD0) 0B0 0RECV_GRAD1 0RECV_GRAD2 "
        "0B1 0B2",
        "1RECV_ACT0 1RECV_ACT2 1F2 1SEND_ACT2 1RECV_ACT1 1F1 1SEND_ACT1 1F0 "
        "(1SEND_ACT0;1RECV_GRAD0) 1RECV_GRAD2 1B0 1SEND_GRAD0 1RECV_GRAD1 1B1 1SEND_GRAD1 1B2 "
        "1SEND_GRAD2",
        "2RECV_ACT2 2F2 2RECV_ACT1 2F1 2RECV_ACT0 2F0 2B0 2SEND_GRAD0 2B2 2SEND_GRAD2 2B1 "
        "2SEND_GRAD1",
    )
    costs = CostModel(latency=5)
    line = schedir.simulate(schedule, costs)
    assert steps(line, costs) == line.makespan == 39
    # What 1RECV_GRAD2 is queued behind is over with its batch, when 1RECV_GRAD0 has arrived.
    assert path(line) == (
        "0F0 0F2 1RECV_ACT2 1F2 2RECV_ACT2 2F2 2F1 2F0 2B0 1RECV_GRAD0 1RECV_GRAD2 1RECV_GRAD1 1B1 "
        "0RECV_GRAD1 0B1 0B2"
    )


def steps(line: Timeline, costs: CostModel) -> float:
    """Checks that the path is a chain without gaps from 0 on; how long it is."""
    places = list(line.critical_path)
    assert line.starts[places[0]] == 0
    for one, other in pairwise(places):
        if line.ends[one] != line.starts[other]:
            # The channel is free before what it carried has arrived.
            actions = [line.schedule.columns.action(place) for place in (one, other)]
            assert {action.kind for action in actions} <= RECEIVES
            assert line.starts[other] == line.starts[one] + holds(line, costs, one)
    assert len(set(places)) == len(places)
    return float(line.ends[places[-1]])


@given(seeds)
def test_the_path_is_as_long_as_the_timeline(seed: int) -> None:
    run = drawn_run(random.Random(seed), batches=True)
    line = schedir.simulate(**run)
    assert steps(line, run["costs"]) == line.makespan


@given(seeds)
def test_the_path_through_batches_copies_and_changed_durations_has_no_gap(seed: int) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    if chance.random() < 0.5:
        schedule = copied(schedule, chance)
    engines = {rank: rank // 2 for rank in range(schedule.ranks)}
    costs = attrs.evolve(some_costs(schedule, chance), copy_engine=chance.choice([None, engines]))
    free = attrs.evolve(costs, bandwidth=math.inf)
    durations = some_durations(schedule, chance)
    for each, longer in ((costs, {}), (free, durations)):
        for receives in ("ahead", "listed"):
            line = schedir.simulate(schedule, each, durations=longer, receives=receives)
            assert steps(line, each) == line.makespan


def test_a_path_behind_a_send_of_a_batch_by_hand() -> None:
    #   time    0    1    2    3    4    ...  11   12   ...  20   21   22
    #   rank 1            F0 | 1SEND_ACT0 ════════ F1              (its bytes are gone)
    #   rank 2                                          F0        F1
    schedule = listed(
        2,
        "0 1 2",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 (1SEND_ACT0;1RECV_ACT1) 1F1 1SEND_ACT1 1RECV_GRAD0 1B0 1SEND_GRAD0 "
        "1RECV_GRAD1 1B1 1SEND_GRAD1",
        "2RECV_ACT0 2F0 2RECV_ACT1 2F1 2B0 2SEND_GRAD0 2B1 2SEND_GRAD1",
    )
    costs = CostModel(latency=1, bandwidth=1, boundary_bytes=(0, 8))
    line = schedir.simulate(schedule, costs, channel="edge")
    assert path(line).startswith("0F0 1RECV_ACT0 1F0 2RECV_ACT0 1F1 2RECV_ACT1 2F1 ")


@given(seeds, st.sampled_from(CHANNELS))
def test_the_path_under_a_channel_model_has_no_gap(seed: int, channel: str) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    assume(channel in schedir.check(schedule, channel).clean_channels)
    costs = some_costs(schedule, chance)
    line = schedir.simulate(schedule, costs, channel=channel)
    places = [*line.critical_path]
    assert (line.starts[places[0]], line.ends[places[-1]]) == (0, line.makespan)
    for one, other in pairwise(places):
        assert line.starts[one] <= line.starts[other] <= line.ends[one]
    causes = {one.cause for own in line.idle for one in own}
    assert not causes & {Cause.OVERHEAD, Cause.UNKNOWN}
    costs = attrs.evolve(costs, latency=0)  # an end is free as the payload arrives
    line = schedir.simulate(schedule, costs, channel=channel)
    assert steps(line, costs) == line.makespan


@given(seeds)
def test_the_path_is_the_longest_of_all(seed: int) -> None:
    """All chains of dependencies of a small schedule, by exhaustion."""
    run = drawn_run(random.Random(seed), batches=False)
    line = schedir.simulate(**run)
    before = dependencies(line, run["costs"], as_listed(line))
    longest: dict[int, float] = {}

    def start(node: int) -> float:
        if node not in longest:
            longest[node] = max((start(n) + takes for n, takes in before[node].items()), default=0)
        return longest[node]

    durations = (line.ends - line.starts).tolist()
    chains = [start(node) + durations[node] for node in range(len(durations))]
    assert max(chains, default=0) == pytest.approx(line.makespan)
    for one, other in pairwise(line.critical_path):
        assert start(other) == pytest.approx(start(one) + before[other][one]), (one, other)


def as_listed(line: Timeline) -> bool:
    """Whether the times are such that receives may have been posted where they are listed."""
    for spans in line.spans:
        ended = 0.0
        for span in spans:
            if span.action.kind in COMPUTE:
                ended = span.end
            elif span.action.kind in CONSUMES.values() and span.start < ended:
                return False
    return True


def dependencies(
    line: Timeline, costs: CostModel, listed_receives: bool
) -> dict[int, dict[int, float]]:
    """By place, what it waits for, and how long after that starts. A transfer is at its receive."""
    columns, runs = line.schedule.columns, graph_of(line.schedule).runs
    durations = (line.ends - line.starts).tolist()
    actions = [columns.action(place) for place in range(len(columns))]
    where = {(int(columns.rank[p]), action): p for p, action in reversed([*enumerate(actions)])}
    found: dict[int, dict[int, float]] = defaultdict(dict)
    reduces: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def add(place: int, waits_for: int | None) -> None:
        if waits_for is not None:
            found[place][waits_for] = durations[waits_for]

    for rank in range(columns.ranks):
        last: int | None = None
        sums: dict[int, list[int]] = defaultdict(list)
        sent: dict[int, int] = {}
        for place in range(int(columns.starts[rank]), int(columns.starts[rank + 1])):
            action = actions[place]
            if action.kind in COMPUTE:
                add(place, last)
                last = place
                if action.kind in CONSUMES:
                    receive = schedir.Action(CONSUMES[action.kind], action.stage, action.microbatch)
                    add(place, where.get((rank, receive)))
                elif action.kind is Kind.OPTIM_STEP and sums[action.stage]:
                    add(place, sums[action.stage][-1])
            elif action.kind is Kind.REDUCE_GRAD:
                turn = len(sums[action.stage])
                reduces[action.stage, turn].append((place, -1 if last is None else last))
                sums[action.stage].append(place)
            elif action.kind in SENDS:
                other = action.counterpart
                assert other is not None
                target = int(runs[other.stage, other.microbatch])
                receive_place = where[target, other]
                add(receive_place, last)
                if target in sent:
                    found[receive_place][sent[target]] = holds(line, costs, sent[target])
                sent[target] = receive_place
            elif listed_receives:
                add(place, last)
    for (stage, turn), group in reduces.items():
        for place, _ in group:
            for _, last_one in group:
                add(place, last_one if last_one >= 0 else None)
            for earlier, _ in reduces.get((stage, turn - 1), ()):
                add(place, earlier)
    return found


def holds(line: Timeline, costs: CostModel, receive: int) -> float:
    """How long the transfer of a receive occupies its channel."""
    columns, runs = line.schedule.columns, graph_of(line.schedule).runs
    action = columns.action(receive)
    send = action.counterpart
    assert send is not None
    link = int(runs[send.stage, send.microbatch]), int(columns.rank[receive])
    size = of_stage(costs.boundary_bytes, min(action.stage, send.stage))
    return float(size / of_link(costs.bandwidth, link))


def test_the_path_of_built_in_schedules() -> None:
    costs = CostModel(latency=0.3, boundary_bytes=2, bandwidth=4)
    for name, cost in product(NAMES, (CostModel(), costs)):
        line = schedir.simulate(schedir.build(name, ranks=3, microbatches=7), cost)
        assert steps(line, cost) == line.makespan


@given(seeds)
def test_the_path_of_a_measured_run_goes_on_in_time(seed: int) -> None:
    """But for clocks that are a little wrong."""
    chance = random.Random(seed)
    line = drawn_timeline(chance)
    for unknown in (0.0, 0.3):
        measured = as_if_measured(line, chance, unknown)
        places = list(measured.critical_path)
        assert len(set(places)) == len(places)
        known = measured.starts[places]
        known = known[~np.isnan(known)]
        assert (np.diff(known) >= -0.02).all()
        if not unknown and places:
            assert measured.ends[places[-1]] >= measured.makespan - 0.02


def test_gaps_of_a_measured_run_are_bridged() -> None:
    schedule = listed(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0")
    whole = "0F0 1RECV_ACT0 1F0 1B0 0RECV_GRAD0 0B0"
    starts, ends = [0.5, 2.1, 7.1, 8.5, 2.1, 3, 4.6, 7.1], [2, 2.5, 8, 10, 2.5, 4.5, 7, 8]
    line = Timeline(schedule, starts, ends)
    assert path(line) == whole
    starts[1] = starts[4] = 1.99
    ends[1] = ends[4] = 3.01
    late = attrs.evolve(line, starts=starts, ends=ends, measured=Measured(0, 0.02))
    assert path(late) == whole
    nan = math.nan
    bare = [nan if place in (1, 2, 4, 7) else time for place, time in enumerate(starts)]
    known = [nan if place in (1, 2, 4, 7) else time for place, time in enumerate(ends)]
    assert path(Timeline(schedule, bare, known)) == whole
    assert Timeline(schedule, [nan] * 8, [nan] * 8).critical_path == ()


def test_a_transfer_that_nobody_waited_for_is_not_on_the_path() -> None:
    #   time    0    1    2    3    4    5    6
    #   rank 0  0F0  0F1
    #   rank 1       1F0---------------- 1F1       its input has long been there
    schedule = listed(2, "0 1", "0F0 0SEND_ACT0 0F1 0SEND_ACT1", "1RECV_ACT0 1F0 1RECV_ACT1 1F1")
    nan = math.nan
    starts, ends = [0, 1, 1, 2, 1, 1, 2, 5.01], [1, 1, 2, nan, 1, 5, nan, 6]
    assert path(Timeline(schedule, starts, ends)) == "0F0 1RECV_ACT0 1F0 1F1"
