"""What a timeline says of memory, against a walk over each rank's list."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Kind, Schedule
from schedir.graph.alive import peak_activations
from schedir.graph.compile import graph_of
from schedir.ir import READS_WEIGHTS, flat
from schedir.simulator import Sizes
from schedir.simulator.memory import live_bytes
from tests.built_in import NAMES
from tests.command_line import runner
from tests.literals import listed
from tests.timelines import as_if_measured, drawn_timeline

seeds = st.integers(0, 1 << 32)


def drawn_sizes(chance: random.Random, stages: int) -> Sizes:
    def per(many: int) -> tuple[int, ...]:
        return tuple(chance.choice([0, 1, 10, 100]) for _ in range(many))

    names = ("input", "activation", "deferred", "weight", "gradient", "optimizer")
    sizes: Any = {name: per(stages) for name in names}
    if chance.random() < 0.5:
        sizes["deferred"] = None
    if chance.random() < 0.5:
        sizes["early_gradient"] = tuple(
            chance.choice([0, g // 2, 2 * g]) for g in sizes["gradient"]
        )
    return Sizes(boundary=per(stages - 1) or 0, **sizes)


class Walk:
    """Carries a rank's list out in the mind, holding things by name, and notes the most it held."""

    def __init__(self, schedule: Schedule, sizes: Sizes, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.sizes = attrs.asdict(sizes)
        early = self.sizes["early_gradient"] or (0,) * schedule.stages
        self.sizes["early_gradient"] = tuple(map(min, early, self.sizes["gradient"]))
        self.runs = graph_of(schedule).runs
        self.held: dict[object, float] = {}
        self.seen: list[float] = []
        self.live: list[int] = []
        self.live_until_i: list[int] = []
        self.deferred: set[object] = set()
        own = [stage for stage, held in enumerate(schedule.placement) if rank in held]
        flat_list = schedule.flat[rank]
        for stage in own:
            self.hold(("weight", stage), "weight", stage)
            self.hold(("optimizer", stage), "optimizer", stage)
            count = copies_of(flat_list, stage)
            if count:
                self.held["copies", stage] = count * self.sizes["weight"][stage]
            mine = {a.kind for a in flat_list if a.stage == stage}
            if Kind.OPTIM_STEP not in mine and mine & {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}:
                self.hold(("gradient", stage), "gradient", stage)
        self.note()
        passes = [self.free_first, self.take_first, self.take_last]
        passes += [self.free_activation, self.take_gradient, self.free_last]
        for entry in schedule.actions[rank]:
            for change in passes:
                for part in flat([entry]):
                    change(part)
                self.note()

    def note(self) -> None:
        self.seen.append(sum(self.held.values()))
        live = {name for name in self.held if isinstance(name, tuple) and name[0] == "activation"}
        self.live.append(len(live))
        self.live_until_i.append(len(live - self.deferred))

    def hold(self, name: object, what: str, number: int) -> None:
        self.held[name] = self.sizes[what][number]

    def peer(self, stage: int, m: int) -> int:
        """The rank that runs a stage on a microbatch, -1 beyond either end."""
        return int(self.runs[stage, m]) if 0 <= stage < len(self.runs) else -1

    def free_first(self, a: Action) -> None:
        m = a.microbatch
        if a.kind is Kind.FORWARD:
            self.held.pop(("input", a.stage, m), None)
        if a.kind is Kind.RECOMPUTE:
            del self.held["to run again", a.stage, m]
        if a.kind is Kind.OPTIM_STEP:
            self.held.pop(("sum", a.stage), None)
        for name in arrived(self.schedule, self.rank, a):
            self.held.pop(name, None)

    def take_first(self, a: Action) -> None:
        s, m = a.stage, a.microbatch
        own = self.schedule.flat[self.rank]
        if a.kind is Kind.FORWARD and schedir.recompute_forward(s, m or 0) in own:
            self.hold(("to run again", s, m), "input", s)
        elif a.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            self.hold(("activation", s, m), "activation", s)
        elif a.kind is Kind.RECV_ACT:
            self.hold(("input", s, m), "boundary", s - 1)
        elif a.kind is Kind.RECV_GRAD:
            self.hold(("grad", s, m), "boundary", s)
        elif a.kind is Kind.REDUCE_GRAD and schedir.optim_step(s) in own[own.index(a) :]:
            self.held["sum", s] = self.sizes["gradient"][s] * (len(self.schedule.placement[s]) > 1)

    def take_last(self, a: Action) -> None:
        s, m = a.stage, a.microbatch
        if m is None:
            return
        if a.kind is Kind.FORWARD and s + 1 < len(self.runs):
            here = self.peer(s + 1, m) == self.rank
            self.hold(("input", s + 1, m) if here else ("sent", s, m), "boundary", s)
        if a.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and s:
            here = self.peer(s - 1, m) == self.rank
            self.hold(("grad", s - 1, m) if here else ("sent grad", s, m), "boundary", s - 1)

    def free_activation(self, a: Action) -> None:
        activation = ("activation", a.stage, a.microbatch)
        if a.kind is Kind.BACKWARD_INPUT:
            self.deferred.add(activation)
            if self.sizes["deferred"] is not None:
                self.hold(activation, "deferred", a.stage)
        if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.held.pop(activation, None)

    def take_gradient(self, a: Action) -> None:
        if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.hold(("gradient", a.stage), "gradient", a.stage)
        # Without a step gradients are there from the beginning.
        if a.kind is Kind.BACKWARD_INPUT and ("gradient", a.stage) not in self.held:
            self.hold(("gradient", a.stage), "early_gradient", a.stage)

    def free_last(self, a: Action) -> None:
        s, m = a.stage, a.microbatch
        if a.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self.held.pop(("grad", s, m), None)
        if a.kind is Kind.OPTIM_STEP:
            self.held.pop(("gradient", s), None)


def copies_of(actions: tuple[Action, ...], stage: int) -> int:
    """The most versions at once that somebody reads after the step that replaces them."""
    of_microbatch: dict[int | None, int] = {}
    made, last = [-1], [-1]  # by version: where it is made, and where it is read last
    for index, a in enumerate(actions):
        if a.stage != stage:
            continue
        if a.kind is Kind.FORWARD:
            of_microbatch[a.microbatch] = len(made) - 1 if a.version is None else a.version
        if a.kind is Kind.OPTIM_STEP:
            made.append(index)
            last.append(-1)
        elif a.kind in READS_WEIGHTS and a.microbatch in of_microbatch:
            last[of_microbatch[a.microbatch]] = index
    older = [v for v in range(len(made) - 1) if last[v] > made[v + 1]]
    return max(sum(made[v] <= at <= last[v] for v in older) for at in range(-1, len(actions)))


RECEIVED = {
    Kind.FORWARD: Kind.RECV_ACT,
    Kind.BACKWARD: Kind.RECV_GRAD,
    Kind.BACKWARD_INPUT: Kind.RECV_GRAD,
}


def arrived(schedule: Schedule, rank: int, a: Action) -> list[object]:
    """What the rank has sent and knows to have arrived when it uses the input of an action."""
    runs = graph_of(schedule).runs
    receive = a.kind in RECEIVED and Action(RECEIVED[a.kind], a.stage, a.microbatch)
    if not receive or receive not in schedule.flat[rank]:
        return []
    send = receive.counterpart
    assert send is not None
    theirs = schedule.flat[int(runs[send.stage, send.microbatch])]
    found: list[object] = []
    for used in theirs[: theirs.index(send)]:
        name, source = None, -1
        if used.kind is Kind.FORWARD and used.stage:
            name, source = ("sent", used.stage - 1, used.microbatch), used.stage - 1
        elif used.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and used.stage + 1 < len(runs):
            name, source = ("sent grad", used.stage + 1, used.microbatch), used.stage + 1
        if name and runs[source, used.microbatch] == rank:
            found.append(name)
    return found


@example(16)  # a gradient is sent after the step
@given(seeds)
def test_peaks_equal_a_walk_over_the_list(seed: int) -> None:
    chance = random.Random(seed)
    line = drawn_timeline(chance)
    sizes = drawn_sizes(chance, line.schedule.stages)
    line = attrs.evolve(line, sizes=sizes)
    graph = graph_of(line.schedule)
    for rank, stats in enumerate(line.ranks):
        walk = Walk(line.schedule, sizes, rank)
        times, amounts = line.memory(rank)
        assert stats.peak_bytes == max(amounts) == max(walk.seen)
        assert amounts[-1] == sum(walk.held.values())
        assert (times[0], amounts[0]) == (0, walk.seen[0])
        assert stats.peak_activations == peak_activations(graph)[rank][0] == max(walk.live)
        assert peak_activations(graph, "I")[rank][0] == max(walk.live_until_i)


@pytest.mark.parametrize("name", NAMES)
def test_peaks_of_built_in_schedules_equal_a_walk(name: str) -> None:
    for microbatches in (1, 3, 8):
        schedule = schedir.build(name, ranks=3, microbatches=microbatches)
        sizes = drawn_sizes(random.Random(microbatches), schedule.stages)
        line = attrs.evolve(schedir.simulate(schedule), sizes=sizes)
        walks = [Walk(schedule, sizes, rank) for rank in range(3)]
        assert [one.peak_bytes for one in line.ranks] == [max(walk.seen) for walk in walks]


@given(seeds)
def test_curves_go_on_in_time_and_count_activations(seed: int) -> None:
    chance = random.Random(seed)
    simulated = drawn_timeline(chance)
    for line in (simulated, as_if_measured(simulated, chance, 0.3)):
        for rank in range(line.schedule.ranks):
            times, live = line.live(rank)
            assert times.shape == live.shape
            assert (np.diff(times) >= 0).all()
            assert (times[0], live[0], live[-1]) == (0, 0, 0)
            assert live.max() == line.ranks[rank].peak_activations


def test_activations_of_1f1b_by_hand() -> None:
    #   time    0    1    2    3    4    5    6    7    8    9
    #   rank 0  0F0  0F1            0B0------ 0B1 ------
    #   live    1    2    2                   1          0
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    times, live = line.live(0)
    assert (times.tolist(), live.tolist()) == ([0, 0, 1, 6, 9], [0, 1, 2, 1, 0])


def test_bytes_by_hand() -> None:
    costs = CostModel(
        activation_bytes=10, boundary_bytes=1, weight_bytes=100, gradient_bytes=200, latency=1
    )
    line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=1), costs)
    #   rank 1: 1RECV_ACT0 at 0, 1F0 from 2 to 3, 1B0 to 5, 1SEND_GRAD0, 1OPTIM_STEP at 5
    times, held = line.memory(1)
    assert list(zip(times.tolist(), held.tolist(), strict=True)) == [
        (0, 100),
        (0, 101),  # 1RECV_ACT0
        (2, 100),  # which becomes part of
        (2, 110),  # the activation of 1F0
        (5, 111),  # 1B0 makes what is sent: nothing comes back that would say that it has arrived
        (5, 101),  # and gradients
        (5, 301),  # in the place of the activation
        (5, 101),  # 1OPTIM_STEP
    ]
    assert [one.peak_bytes for one in line.ranks] == [301, 301]
    assert [held.tolist() for _, held in live_bytes(line._moments, line.sizes, host=True)] == [
        [0]
    ] * 2
    assert all(isinstance(one.peak_bytes, float) for one in line.ranks)


def test_what_runs_again_and_what_is_deferred_by_hand() -> None:
    costs = CostModel(activation_bytes=10, input_bytes=3, deferred_bytes=4)
    #   time   0    1    2    3    4    5    6    7
    #   rank   0F0  0F1  0R0  0I0  0B1----- 0W0
    alone = listed(2, "0", "0F0 0F1 0R0 0I0 0B1 0W0")
    line = schedir.simulate(alone, costs)
    times, held = line.memory(0)
    assert list(zip(times.tolist(), held.tolist(), strict=True)) == [
        (0, 0),
        (0, 3),  # 0F0 keeps its input alone
        (1, 13),
        (2, 10),  # 0R0 has it
        (2, 20),
        (4, 14),  # 0I0 leaves what 0W0 needs
        (6, 4),
        (7, 0),
    ]
    assert line.ranks[0].peak_bytes == 20
    whole = schedir.simulate(alone, attrs.evolve(costs, deferred_bytes=None))
    assert whole.memory(0)[1].tolist() == [0, 3, 13, 10, 20, 20, 10, 0]


def eager(ranks: int, microbatches: int) -> Schedule:
    """In the manner of ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2.2): as many forwards
    ahead as keep a rank busy until the first gradient is back, each W after the next forward."""
    lists = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - rank) - 1, microbatches)
        own = [f"{rank}F{m}" for m in range(ahead)]
        for m in range(microbatches):
            own.append(f"{rank}I{m}")
            own += [f"{rank}F{m + ahead}"] if m + ahead < microbatches else []
            own.append(f"{rank}W{m}")
        lists.append(" ".join(own))
    return listed(microbatches, " ".join(map(str, range(ranks))), *lists)


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_the_published_limit_of_zb_h2(ranks: int) -> None:
    """2 p - 1 activations, of which the last stage's is a single one: none counts after its I."""
    built = eager(ranks, 3 * ranks)
    most = 2 * ranks - 1
    assert schedir.check(built, max_activations=most, held_until="I").ok
    (finding,) = schedir.check(built, max_activations=most).errors
    assert finding.message == f"rank 0 holds {most + 1} activations at once; the limit is {most}"
    assert finding.notes == ()
    (finding,) = schedir.check(built, max_activations=most - 1, held_until="I").errors
    assert finding.message == f"rank 0 holds {most} activations at once; the limit is {most - 1}"
    assert finding.notes == ("an activation counts until its I",)
    # In bytes as well.
    costs = CostModel(activation_bytes=100, deferred_bytes=1)
    assert schedir.simulate(built, costs).ranks[0].peak_bytes == 100 * most + 1


def test_until_when_is_said_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "eager.sched"
    file.write_text(schedir.dumps(eager(4, 8)))
    run = runner(capsys)
    limit = "check", str(file), "--max-activations", "7"
    code, out, _ = run(*limit)
    assert (code, "rank 0 holds 8 activations at once; the limit is 7" in out) == (1, True)
    assert run(*limit, "--held-until", "I")[0] == 0
    for deferred, most in ("none", 8.0), ("256KiB", 7.25):
        sizes = "--cost", "activation_bytes=1MiB", "--cost", f"deferred_bytes={deferred}"
        _, out, _ = run("compare", str(file), *sizes, "--json")
        assert json.loads(out)["rows"][0]["peak_bytes"] == most * 2**20
    with pytest.raises(ValueError, match="held_until must be 'W' or 'I', not 'B'"):
        schedir.check(eager(2, 2), held_until="B")  # type: ignore[arg-type]


def test_sizes_that_are_not_known_or_do_not_fit() -> None:
    line = schedir.simulate(schedir.build("1f1b"))
    assert [one.peak_bytes for one in line.ranks] == [None] * 4
    with pytest.raises(ValueError, match="the timeline has no sizes"):
        line.memory(0)
    with pytest.raises(schedir.SchedirError, match="weight has 2 numbers, but 1f1b has 4 stages"):
        attrs.evolve(line, sizes=Sizes(weight=(1, 2)))
    assert math.isfinite(line.live(0)[0][-1])
