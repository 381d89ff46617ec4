"""What an asynchronous schedule costs once full, against brute force and by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Kind, Timeline, backward, forward, optim_step, simulate, steady_state
from schedir.library import built_in
from schedir.simulator.steady_state import steady_state_of
from tests.command_line import Run, runner
from tests.stepped import Stepped
from tests.sweeps import examples, sweep
from tests.test_golden import GOLDEN, compare

ASYNCHRONOUS: list[tuple[str, int, dict[str, Any]]] = [
    ("pipedream", 1, {}),
    ("pipedream", 2, {}),
    ("pipedream", 5, {"vertical_sync": True}),
    ("pipedream-2bw", 3, {}),
    ("pipedream-2bw", 4, {"gradient_accumulation": 6}),
    ("1f1b-rr", 3, {"flush": False, "replicas": "2,1"}),
    ("1f1b-rr", 4, {"flush": False, "replicas": "1,2,1"}),
    ("1f1b-rr", 5, {"flush": False, "replicas": "3,2"}),
]
GROUPS = """\
from schedir import backward, forward, optim_step, schedule

@schedule("groups")
def groups(pipe, rank, *, size=3):
    (stage,) = pipe.stages_of(rank)
    for first in range(0, pipe.microbatches, size):
        group = range(first, min(first + size, pipe.microbatches))
        yield from (forward(stage, m) for m in group)
        yield from (backward(stage, m) for m in group)
        yield optim_step(stage)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("groups.py").write_text(GROUPS)
    return runner(capsys)


def found(target: Any, costs: Any = None, **shape: Any) -> schedir.SteadyState:
    steady = steady_state(target, costs, **shape)
    assert steady is not None
    return steady


MORE = 300
"""Hundreds of microbatches more than it took to find it, far from both ends."""


def measured(line: Timeline, since: int, apart: int) -> float:
    """The time between two backwards of stage 0 that are as many microbatches `apart`."""
    columns = line.schedule.columns
    backwards = columns.is_kind(Kind.BACKWARD) & (columns.stage == 0)
    first, last = (line.ends[backwards & (columns.microbatch == m)] for m in (since, since + apart))
    return float((last - first).item())


def busy_part(line: Timeline, since: float, until: float) -> float:
    """The part of the time between two moments in which ranks compute."""
    computes = line.schedule.columns.where(Kind.FORWARD, Kind.BACKWARD, Kind.OPTIM_STEP)
    spans = zip(line.starts[computes].tolist(), line.ends[computes].tolist(), strict=True)
    busy: float = sum(max(0.0, min(end, until) - max(start, since)) for start, end in spans)
    return busy / (line.schedule.ranks * (until - since))


def assert_as_measured(steady: schedir.SteadyState, line: Timeline) -> None:
    """In a longer list a period later all repeats, any number of times, and the bubble is so."""
    since = steady.microbatches
    assert line.schedule.microbatches >= since + MORE
    apart, several = steady.period_microbatches, 200 // steady.period_microbatches
    for times in (1, 3, several):
        took = measured(line, since, times * apart)
        assert took == pytest.approx(times * steady.period, rel=1e-9)
    begin = steady.start
    busy = busy_part(line, begin, begin + several * steady.period)
    assert steady.bubble_fraction == pytest.approx(1 - busy, abs=1e-6)


whole = st.integers(0, 9)
parts = st.integers(0, 999).map(lambda n: n / 100)


@examples(60)
@given(
    st.sampled_from(ASYNCHRONOUS),
    st.data(),
    st.sampled_from([whole, parts]),
    st.sampled_from([8, 12, 30]),
)
def test_random_costs(
    case: tuple[str, int, dict[str, Any]], data: st.DataObject, number: Any, microbatches: int
) -> None:
    name, ranks, parameters = case
    shape = {"ranks": ranks, "microbatches": microbatches, **parameters}
    stages = schedir.build(name, **shape).stages
    by_stage = st.tuples(*[number] * stages)
    costs = CostModel(
        forward=data.draw(by_stage),
        backward=data.draw(st.tuples(*[number.map(lambda n: n + 1)] * stages)),
        optim_step=data.draw(number),
        reduce_grad=data.draw(number),
        latency=data.draw(number),
        bandwidth=data.draw(st.sampled_from([math.inf, 1, 4])),
        boundary_bytes=data.draw(st.sampled_from([0, 4, 8])),
    )
    steady = steady_state(name, costs, **shape)
    if name == "pipedream-2bw" and not parameters:
        # What a batch is follows from the microbatches: as many as the list has that was asked for.
        size = min(n for n in range(ranks, microbatches + 1) if microbatches % n == 0)
        parameters = {"gradient_accumulation": size}
    assume(steady is not None)  # it may take too long until stages that are nearly as slow differ
    assert steady is not None
    many = steady.microbatches + MORE
    long = schedir.build(name, ranks=ranks, microbatches=many, **parameters)
    assert_as_measured(steady, simulate(long, costs))


@examples(25)
@given(st.sampled_from(ASYNCHRONOUS), st.data())
def test_a_list_that_is_too_short_shows_nothing_wrong(
    case: tuple[str, int, dict[str, Any]], data: st.DataObject
) -> None:
    """Whatever is found in any list, however short, is what goes on in a long one."""
    name, ranks, parameters = case
    if name == "pipedream-2bw":
        parameters = {"gradient_accumulation": 6}
    stages = schedir.build(name, ranks=ranks, **parameters).stages
    few = st.tuples(*[st.integers(1, 4)] * stages)
    # Of the larger boundaries so few receives are posted ahead.
    size = data.draw(st.sampled_from([0, 2**18, 2**20]))
    costs = CostModel(
        forward=data.draw(few),
        backward=data.draw(few),
        latency=data.draw(whole),
        boundary_bytes=size,
    )
    channel = data.draw(st.sampled_from([None, *schedir.CHANNELS]))
    long = schedir.build(name, ranks=ranks, microbatches=40 + MORE, **parameters)
    line = simulate(long, costs, channel=channel)
    for microbatches in range(1, 40):
        made = schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)
        steady = steady_state_of(simulate(made, costs, channel=channel))
        if steady is not None:
            assert_as_measured(steady, line)


@sweep("name, ranks, parameters", ASYNCHRONOUS[1:], quick=[ASYNCHRONOUS[at] for at in (1, 3, 5)])
def test_a_simulator_that_steps_agrees(name: str, ranks: int, parameters: dict[str, Any]) -> None:
    costs = CostModel(forward=2, backward=3, optim_step=1, reduce_grad=1, latency=2)
    if name == "pipedream-2bw":
        parameters = {"gradient_accumulation": 4}
    steady = found(name, costs, ranks=ranks, **parameters)
    schedule = schedir.build(name, ranks=ranks, microbatches=100, **parameters)
    times = Stepped(schedule, {}, costs, "ahead").run()
    assert times is not None
    apart = steady.period_microbatches
    for rank, text in [(0, "0B72"), (schedule.ranks - 1, f"{schedule.stages - 1}B72")]:
        held = schedule.placement[schedule.stages - 1 if rank else 0]
        first, later = (text, text.replace("72", str(72 + apart)))
        (began,) = [times[r, first][0][1] for r in held if (r, first) in times]
        (ended,) = [times[r, later][0][1] for r in held if (r, later) in times]
        assert ended - began == steady.period


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [2, 8, 64])
def test_pipedream_at_the_textbooks_costs_has_no_bubble(ranks: int, microbatches: int) -> None:
    steady = found("pipedream", ranks=ranks, microbatches=microbatches)
    assert (steady.time_per_microbatch, steady.bubble_fraction) == (3, 0)
    assert (steady.period, steady.period_microbatches, steady.unit) == (3, 1, None)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_latency_is_on_the_way_down_and_up_of_as_many_microbatches_as_are_in_flight(
    ranks: int,
) -> None:
    """The longest circle: a forward down all ranks and a backward up again, of ranks microbatches;
    3 each, and a latency for each of the 2 (ranks - 1) links."""
    costs = CostModel(latency=1, unit="ms")
    steady = found("pipedream", costs, ranks=ranks)
    each = Fraction(3 * ranks + 2 * (ranks - 1), ranks)
    assert steady.time_per_microbatch == pytest.approx(float(each))
    assert steady.bubble_fraction == pytest.approx(1 - float(3 / each))
    assert steady.unit == "ms"


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = CostModel(forward=(1, 2, 1, 1), backward=(2, 3, 1, 2))
    steady = found("pipedream", lambda stages: costs)
    assert steady.time_per_microbatch == 5
    assert steady.bubble_fraction == pytest.approx(1 - (3 + 5 + 2 + 3) / 20)


def test_replicas_take_turns() -> None:
    """6 a microbatch over two ranks, beside 3 on one: no rank is idle."""
    costs = CostModel(forward=(2, 1), backward=(4, 2))
    shape: dict[str, Any] = {"ranks": 3, "replicas": "2,1", "flush": False}
    steady = found("1f1b-rr", costs, **shape)
    assert (steady.period, steady.period_microbatches, steady.bubble_fraction) == (6, 2, 0)
    uneven = found("1f1b-rr", **shape)  # 3 on each: those of stage 0 are idle half of the time
    assert (uneven.period, uneven.period_microbatches) == (6, 2)
    assert uneven.bubble_fraction == pytest.approx(1 / 3)


def test_an_update_counts_once_a_batch() -> None:
    """10 microbatches are batches of 5 on 4 ranks, and so are those of longer lists: 20 would be
    batches of 4."""
    steady = found("pipedream-2bw", CostModel(optim_step=1), microbatches=10)
    assert (steady.period, steady.period_microbatches) == (16, 5)
    assert steady.microbatches % 20


def test_a_drain_in_each_group_is_part_of_the_period(run: Run) -> None:
    """A user's own, in a file: 3 forwards and 3 backwards on 2 ranks take 12, of which 9 are
    busy."""
    steady = found("groups.py", ranks=2)
    assert (steady.period, steady.period_microbatches) == (12, 3)
    assert steady.bubble_fraction == 0.25
    larger = found("groups.py", ranks=2, microbatches=4, size=1)
    assert (larger.time_per_microbatch, larger.bubble_fraction) == (6, 0.5)


def test_what_overlaps_is_busy_once() -> None:
    """The pairs of two ranks wait for each other: 2 on the one, then 4 on the other."""

    def overlapping(pipe: schedir.Pipeline, rank: int) -> Iterator[schedir.ir.Entry]:
        (stage,), ahead = pipe.stages_of(rank), pipe.ranks - rank
        for m in range(ahead):
            yield forward(stage, m)
        for m in range(pipe.microbatches):
            last = backward(stage, m)
            more = m + ahead < pipe.microbatches
            yield schedir.together(forward(stage, m + ahead), last) if more else last
            yield optim_step(stage)

    steady = found(overlapping, CostModel(overlapped=(2, 4)), ranks=2)
    assert (steady.period, steady.period_microbatches, steady.bubble_fraction) == (6, 1, 0.5)


def in_pairs(pipe: schedir.Pipeline, rank: int) -> Iterator[schedir.Action]:
    """Two forwards and two backwards, which take 9 on 2 ranks."""
    (stage,) = pipe.stages_of(rank)
    for m in range(0, pipe.microbatches, 2):
        for each in (forward, backward):
            yield from (each(stage, m), each(stage, m + 1))
        yield optim_step(stage)


def test_a_period_is_one_of_the_order_too() -> None:
    """All takes as long for every microbatch, and every other update comes before the forward."""

    def alternating(pipe: schedir.Pipeline, rank: int) -> Iterator[schedir.Action]:
        yield forward(0, 0)
        for m in range(pipe.microbatches - 1):
            yield backward(0, m)
            turn = (forward(0, m + 1), optim_step(0))
            yield from turn if m % 2 else reversed(turn)
        yield from (backward(0, pipe.microbatches - 1), optim_step(0))

    steady = found(alternating, CostModel(forward=0), ranks=1)
    assert (steady.period, steady.period_microbatches) == (4, 2)


def test_a_list_that_is_another_when_it_is_longer_says_nothing_of_a_shorter_one() -> None:
    def changing(pipe: schedir.Pipeline, rank: int) -> Iterator[schedir.Action]:
        if pipe.microbatches == 4:
            yield from in_pairs(pipe, rank)
            return
        (stage,) = pipe.stages_of(rank)
        for m in range(pipe.microbatches):
            yield from (forward(stage, m), backward(stage, m), optim_step(stage))

    assert found(in_pairs, ranks=2, microbatches=4).time_per_microbatch == 4.5
    assert steady_state(changing, ranks=2, microbatches=4) is None


def test_a_list_that_can_be_no_longer_shows_what_it_shows() -> None:
    def limited(pipe: schedir.Pipeline, rank: int) -> Iterator[schedir.Action]:
        if pipe.microbatches > 4:
            raise ValueError("too many")
        return in_pairs(pipe, rank)

    assert steady_state(limited, ranks=2, microbatches=4) is None
    with pytest.raises(schedir.LoadError, match="too many"):
        steady_state(limited, ranks=2, microbatches=5)


@pytest.mark.parametrize("generator", built_in(), ids=lambda generator: generator.name)
def test_all_but_the_asynchronous_ones_have_none(generator: schedir.Generator) -> None:
    asynchronous = generator.name in ("pipedream", "pipedream-2bw")
    built = schedir.build(generator, microbatches=12)
    assert built.is_asynchronous == asynchronous
    assert (steady_state(generator, microbatches=12) is not None) == asynchronous


def test_a_list_shows_it_where_it_is_long_enough(run: Run) -> None:
    for microbatches, shows in ((8, False), (32, True)):
        made = schedir.build("pipedream", microbatches=microbatches)
        Path("list.sched").write_text(schedir.dumps(made))
        for target in (made, "list.sched", Path("list.sched")):
            steady = steady_state(target)
            assert (steady is not None) == shows
    assert found("list.sched").time_per_microbatch == 3


SLOW_LINKS: dict[str, Any] = {"backward": 1, "latency": 6, "bandwidth": 1, "boundary_bytes": 8}
"""At which circles of transfers are nearly as long as one that an update is part of."""


def test_a_long_transient_is_no_steady_state() -> None:
    """For 240 microbatches every twelfth is quicker, by 1 of 265."""
    shape: dict[str, Any] = {"ranks": 4, "gradient_accumulation": 6}
    costs = CostModel(forward=0, **SLOW_LINKS, optim_step=1)
    steady = found("pipedream-2bw", costs, **shape)
    assert (steady.period, steady.period_microbatches, steady.microbatches) == (265, 12, 512)
    long = schedir.build("pipedream-2bw", microbatches=1000, **shape)
    line = simulate(long, costs)
    assert_as_measured(steady, line)
    assert measured(line, 100, 12) == 264


@sweep("most, microbatches", [(200_000, 8192), (25_000, 1024)], quick=[(25_000, 1024)])
def test_what_does_not_repeat_within_the_bound_is_not_guessed(
    run: Run, most: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedir.simulator.steady_state._MOST_ACTIONS", most)
    costs = {"forward": 0, **SLOW_LINKS, "optim_step": 0.01}
    options = [word for name, cost in costs.items() for word in ("--cost", f"{name}={cost}")]
    options += ["--set", "gradient_accumulation=6"]
    code, out, err = run("show", "pipedream-2bw", "--steady", *options)
    assert (code, out) == (2, "")
    assert f"pipedream-2bw shows no steady state: in {microbatches} microbatches its" in err


def test_what_is_wrong_is_said() -> None:
    for name in ("pipedream", "1f1b"):
        with pytest.raises(schedir.SchedirError, match="forward has 3 numbers"):
            steady_state(name, CostModel(forward=(1, 2, 3)))
    with pytest.raises(schedir.LoadError, match="no schedule is named"):
        steady_state("pipedreem")
    with pytest.raises(schedir.LoadError, match="has no parameter"):
        steady_state("pipedream", replicas=2)


def test_a_list_is_simulated_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its own times are asked for, and those of the steady state."""
    simulated: list[int] = []

    def counted(schedule: schedir.Schedule, costs: CostModel, *, channel: str | None) -> Timeline:
        simulated.append(schedule.microbatches)
        return simulate(schedule, costs, channel=channel)

    for module in ("finder.comparing", "cli.timelines", "simulator.steady_state"):
        monkeypatch.setattr(f"schedir.{module}.simulate", counted)
    for command in (["compare", "groups.py"], ["show", "groups.py", "--steady"]):
        simulated.clear()
        run.prints(*command, "--ranks", "2", "--microbatches", "4")
        assert simulated[0] == 4 < simulated[-1]
        assert len(set(simulated)) == len(simulated)


def test_compare_takes_the_unit_of_the_others(run: Run) -> None:
    made = schedir.build("pipedream", microbatches=64)
    for costs, other in (
        (CostModel(forward=0.001, backward=0.002, unit="s"), CostModel(unit="ms")),
        (CostModel(forward=1, backward=2, unit="ms"), CostModel(unit="s")),
    ):
        line = simulate(made, other)
        table = schedir.compare([line, "pipedream"], microbatches=64, costs=costs)
        (steady,) = [row.steady for row in table.rows if row.steady is not None]
        assert (table.unit, steady.unit) == ("s", "s")
        assert steady.time_per_microbatch == pytest.approx(0.003)


def test_the_table(run: Run, request: pytest.FixtureRequest) -> None:
    _, out, _ = run("compare", "1f1b", "pipedream", "groups.py", "--microbatches", "9")
    compare(GOLDEN / "steady" / "compare.txt", out, request)


def test_the_keys_of_the_json(run: Run) -> None:
    wanted = {"period_microbatches": 3, "time_per_microbatch": 4.0, "bubble_fraction": 0.25}
    _, out, _ = run("compare", "1f1b", "groups.py", "--ranks", "2", "--json")
    rows = {row["target"]: row["steady"] for row in json.loads(out)["rows"]}
    assert rows == {"1f1b": None, "groups.py": wanted}
    shown = json.loads(run("show", "groups.py", "--ranks", "2", "--steady", "--json")[1])
    assert list(shown) == ["makespan", "bubble_fraction", "ranks", "steady"]
    assert shown["steady"] == wanted
    _, out, _ = run("show", "groups.py", "--json")
    assert "steady" not in json.loads(out)


def test_show_draws_two_periods(run: Run, request: pytest.FixtureRequest) -> None:
    _, out, _ = run("show", "pipedream", "--steady", "--ranks", "2", "--microbatches", "64")
    compare(GOLDEN / "steady" / "show.txt", out, request)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_what_show_draws_fits(run: Run, width: int) -> None:
    options = ["--cost", "latency=0.37", "--ranks", "6", "--width", str(width)]
    code, out, _ = run("show", "pipedream", "--steady", *options)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    rows = [line for line in out.splitlines() if line.startswith("rank ")]
    assert len(rows) == 6
    assert all("F" in row and "B" in row for row in rows)


def test_show_says_why_there_is_none(run: Run) -> None:
    Path("short.sched").write_text(schedir.dumps(schedir.build("pipedream")))
    Path("run.json").write_text("[]")
    for target, said in (
        ("1f1b", "1f1b has no steady state: in 8 microbatches no stage works after its"),
        ("short.sched", "short.sched shows no steady state: in 8 microbatches"),
        ("run.json", "--steady is for schedules"),
    ):
        code, out, err = run("show", target, "--steady")
        assert (code, out) == (2, "")
        assert said in err
    for option in ("--full", "--why", "--actions", "--compute-only"):
        code, _, err = run("show", "pipedream", "--steady", option)
        assert code == 2
        assert f"--steady draws two periods: leave out {option}" in err
