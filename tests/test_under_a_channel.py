"""What a list takes under a channel model: in numbers, tables and words, and in files.

`tests.test_stepped` compares the times with a simulation that steps through time.
"""

from __future__ import annotations

import json
import random
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, SchedirError, Timeline, finder
from schedir.checker import CHANNELS
from schedir.ir import enforces
from schedir.simulator import in_unit
from schedir.simulator.moments import Posting
from tests.command_line import DEADLOCK, Run
from tests.pages import ROOT
from tests.test_stepped import some_costs, some_schedule
from tests.torch_schedules import dumped

EARLY = schedir.loads((ROOT / "examples/broken/8_slower_than_drawn.sched").read_text())
SLOW = CostModel(latency=1, boundary_bytes=2, bandwidth=4, unit="ms")


def test_exposed_communication_costs_what_check_says() -> None:
    for channel, makespan in (("nccl", 18), ("gloo", 17)):
        (found,) = (d for d in schedir.check(EARLY, channel).diagnostics if d.code == "S506")
        assert (found.facts["makespan"], found.facts["possible"]) == (makespan, 15)
    line = schedir.simulate(EARLY, channel="nccl")
    assert (line.channel, line.makespan, line.edge_makespan) == ("rank", 18, 17)
    assert schedir.simulate(EARLY, channel="gloo").makespan == 17
    assert schedir.simulate(EARLY).makespan == 17


@given(st.integers(0, 1 << 32))
def test_each_model_is_no_quicker_than_one_that_enforces_less(seed: int) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    clean = schedir.check(schedule, "async").clean_channels
    # A batch that blocks under `edge` runs as its parts without a model.
    assume("edge" in clean and "host" in clean)
    costs = some_costs(schedule, chance)
    lines = {
        channel: schedir.simulate(schedule, costs, receives="listed", channel=channel)
        for channel in clean
    }
    for stricter, laxer in combinations(clean, 2):
        # Under `direction` gradients have links of their own.
        if stricter != "direction" and enforces(stricter, laxer):
            assert (lines[stricter].starts >= lines[laxer].starts).all()
    # `async` has a batch wait for nothing as a whole; without a model it is as under `edge`.
    without = schedir.simulate(schedule, costs)
    assert (lines["edge"].starts >= without.starts).all()


def test_a_front_loaded_list_is_not_the_best_under_nccl(run: Run) -> None:
    Path("front.csv").write_text(dumped("ScheduleInterleaved1F1B", 8, 16))
    targets = ["front.csv", "interleaved-1f1b", "--add-steps", "-r", "8", "-m", "16"]
    rows = json.loads(run("compare", *targets, "--json", "--channel", "nccl")[1])["rows"]
    assert [(row["makespan"], row["edge_makespan"]) for row in rows] == [(58.5, 58.5), (86, 58.5)]
    assert rows[1]["target"] == "front.csv"
    rows = json.loads(run("compare", *targets, "--json")[1])["rows"]
    assert [(row["makespan"], row.get("edge_makespan", 0)) for row in rows] == [(58.5, 0)] * 2
    _, table, _ = run("compare", *targets, "--channel", "nccl")
    assert "Timed under rank, without buffers: a bound from above." in table
    assert "under edge" in table.splitlines()[0]


def test_show_names_the_model_and_how_soon_edge_is_done(run: Run) -> None:
    Path("early.sched").write_text(schedir.dumps(EARLY))
    show = "show", "early.sched", "--channel"
    assert "makespan 18 under rank (17 under edge)," in run.prints(*show, "nccl")
    assert "makespan 17 under async," in run.prints(*show, "gloo")
    figures = json.loads(run.prints(*show, "nccl", "--json"))
    assert (figures["channel"], figures["makespan"], figures["edge_makespan"]) == ("rank", 18, 17)
    assert "channel" not in json.loads(run.prints("show", "early.sched", "--json"))
    # The activation is made at 6, and stands behind one that is made and posted at 15.
    why = run.prints(*show, "nccl", "--why", "--cost", "forward=5,1,1")
    assert "2F0 waits behind 0SEND_ACT1 on rank 0 on the same queue" in why
    picture = run.prints("export", *show[1:], "nccl", "--format", "svg", "--against", "early.sched")
    assert "makespan 18 under rank (17 under edge)" in picture


def test_what_blocks_under_the_model_is_not_timed(run: Run) -> None:
    Path("dead.sched").write_text(DEADLOCK)
    assert run("show", "dead.sched")[0] == 0
    code, out, err = run("show", "dead.sched", "--channel", "nccl")
    assert (code, out) == (1, "")
    assert "S301" in err
    with pytest.raises(schedir.ScheduleError, match="S301"):
        schedir.simulate(schedir.loads(DEADLOCK), channel="rank")


def test_what_has_run_takes_no_channel(run: Run) -> None:
    schedir.simulate(EARLY).save("run.json")
    assert "a measured timeline" in run.refuses("show", "run.json", "--channel", "nccl")
    assert "sched does not take it" in run.refuses("export", "1f1b", "--channel", "nccl")


def test_a_timeline_keeps_how_it_was_posted(tmp_path: Path) -> None:
    line = schedir.simulate(EARLY, SLOW, channel="nccl")
    assert line.posting == Posting("rank", room=12)
    line.save(tmp_path / "line.json")
    assert Timeline.load(tmp_path / "line.json") == line
    least, seconds = line.edge_makespan, in_unit(line, "s").edge_makespan
    assert least is not None
    assert seconds == pytest.approx(least / 1000)
    written = json.loads((tmp_path / "line.json").read_text())
    for key in ("posting", "edge_makespan"):
        written["timelines"][0].pop(key)  # as before there were any
    (tmp_path / "older.json").write_text(json.dumps(written))
    assert Timeline.load(tmp_path / "older.json").posting is None
    written["timelines"][0]["posting"] = {"channel": "telegraph", "room": 1}
    (tmp_path / "wrong.json").write_text(json.dumps(written))
    with pytest.raises(schedir.LoadError, match="unknown channel model 'telegraph'"):
        Timeline.load(tmp_path / "wrong.json")


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("megabytes", [0, 0.3])
def test_a_steady_state_under_a_model_is_that_of_long_lists(channel: str, megabytes: float) -> None:
    costs = CostModel(forward=(1, 2, 1), latency=0.5, boundary_bytes=megabytes * 2**20)
    steady = schedir.steady_state("pipedream", costs, ranks=3, channel=channel)
    assert steady is not None
    ends = [
        schedir.simulate(
            schedir.build("pipedream", ranks=3, microbatches=many), costs, channel=channel
        ).makespan
        for many in (120, 120 + steady.period_microbatches)
    ]
    assert steady.period == pytest.approx(ends[1] - ends[0])


def test_a_search_under_a_model_finds_what_is_quick_there() -> None:
    forward = (1.25, 1, 1, 1)
    costs = CostModel(
        forward=forward,
        backward=(2.5, 2, 2, 2),
        backward_input=forward,
        backward_weight=forward,
        latency=1,
    )
    work: dict[str, Any] = {"ranks": 4, "microbatches": 5, "costs": costs, "seconds": 0.3}
    under, without = (finder.find(**work, channel=channel) for channel in ("nccl", None))
    assert under.timeline.channel == "rank"
    assert under.value == schedir.simulate(under.schedule, costs, channel="rank").makespan
    assert under.value < schedir.simulate(without.schedule, costs, channel="rank").makespan
    assert under.lower_bound == without.lower_bound
    assert "none can be quicker" not in str(under)


@given(st.integers(0, 1 << 32))
def test_check_judges_at_the_costs_given_as_at_the_textbooks(seed: int) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    channel = chance.choice(CHANNELS)
    usual, given = (
        [
            (each.code, each.locations, {**each.facts, "times": ""})
            for each in schedir.check(schedule, channel, costs=costs).diagnostics
        ]
        for costs in (None, CostModel())
    )
    assert usual == given


def test_check_finds_what_only_such_costs_show(run: Run) -> None:
    # Rank 1 needs the gradient that it receives early long after it could have sent its activation.
    Path("late.sched").write_text(schedir.dumps(EARLY))
    figures = {}
    for cost in ("latency=0", "latency=2"):
        _, out, _ = run("check", "late.sched", "--channel", "nccl", "--cost", cost)
        figures[cost] = re.findall(r"the step takes (\S+) rather than", out)
        assert "times are at the costs given" in out
    costs = CostModel(latency=2)
    listed = schedir.simulate(EARLY, costs, receives="listed", channel="rank").makespan
    assert figures == {"latency=0": ["18"], "latency=2": [f"{listed:g}"]}
    with pytest.raises(SchedirError, match="forward has 2 numbers"):
        schedir.check(EARLY, costs=CostModel(forward=(1, 2)))


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("name", ["1f1b", "zbv", "1f1b-rr"])
def test_entries_that_take_longer_are_as_costs(name: str, channel: str) -> None:
    ranks = 3 if name == "1f1b-rr" else 4
    schedule = schedir.build(name, ranks=ranks, microbatches=8)
    usual = CostModel(reduce_grad=2, optim_step=1, latency=1)
    durations = {
        (rank, span.index): 3 * (span.end - span.start)
        for rank, spans in enumerate(schedir.simulate(schedule, usual).spans)
        for span in spans
    }
    line = schedir.simulate(schedule, usual, durations=durations, channel=channel)
    assert line.makespan == 3 * schedir.simulate(schedule, usual, channel=channel).makespan


@pytest.mark.parametrize("limit", [33, 36, 40])
def test_a_search_keeps_the_limit_with_gradients_that_an_input_part_adds(limit: int) -> None:
    costs = CostModel(
        activation_bytes=10, deferred_bytes=2, gradient_bytes=20, early_gradient_bytes=20
    )
    found = finder.find(ranks=2, microbatches=4, costs=costs, memory_limit=limit, seconds=0.2)
    assert max(rank.peak_bytes or 0 for rank in found.timeline.ranks) <= limit


def test_a_forecast_under_a_model_is_that_of_the_simulation_there() -> None:
    line = schedir.simulate(EARLY, attrs.evolve(SLOW, unit="ms"))
    costs = CostModel.fit([line] * 10)
    for channel in ("nccl", "gloo"):
        under = schedir.simulate(EARLY, costs, channel=channel).makespan
        assert schedir.forecast(EARLY, costs, channel=channel).median == pytest.approx(under)


def test_costs_of_another_number_of_stages_or_none(run: Run) -> None:
    code, out, _ = run("check", "1f1b", "interleaved-1f1b", "-r", "4", "--cost", "forward=1,1,1,2")
    assert (code, out.count("clean under rank")) == (0, 2)
    with pytest.raises(TypeError, match="costs must be a CostModel, not 3"):
        schedir.check(EARLY, costs=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="edge_makespan must be a number"):
        attrs.evolve(schedir.simulate(EARLY), edge_makespan="17")  # type: ignore[arg-type]
