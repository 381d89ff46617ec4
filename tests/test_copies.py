"""What copies to the host and back cost, by hand; `test_stepped` has random lists."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

import schedir
from schedir import CostModel, Timeline
from schedir.passes import offload
from schedir.render.terminal_timeline import overview_blocks, timeline_text
from schedir.render.text import plain
from schedir.render.why import why_blocks
from schedir.simulator import Cause, how_derived, unmeasured
from tests.command_line import Run
from tests.literals import listed

ALONE = listed(3, "0", "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0B0 0RELOAD1 0B1 0B2")
COSTS = CostModel(activation_bytes=4, host_bandwidth=4)


def copies(line: Timeline, rank: int = 0) -> dict[str, tuple[float, float]]:
    return {str(s.action): (s.start, s.end) for s in line.spans[rank] if "LOAD" in str(s.action)}


def test_copies_go_on_beside_compute() -> None:
    #   time     0    1    2    3    4    5    6    7    8    9    10   11
    #   rank 0   0F0  0F1  0F2       0B0------      0B1------ 0B2------
    #   engine        out0 out1 in0            in1
    line = schedir.simulate(ALONE, COSTS)
    out, back = {"0OFFLOAD0": (1, 2), "0OFFLOAD1": (2, 3)}, {"0RELOAD0": (3, 4), "0RELOAD1": (6, 7)}
    assert copies(line) == out | back
    assert (line.makespan, line.starts.dtype.kind) == (11, "i")
    action = line.schedule.columns.action
    waits = [
        (one.start, one.end, one.cause, str(action(one.blamed or 0)), str(action(one.entry or 0)))
        for one in line.idle[0]
    ]
    first = (3, 4, Cause.COMMUNICATION, "0RELOAD0", "0B0")
    assert waits == [first, (6, 7, Cause.COMMUNICATION, "0RELOAD1", "0B1")]
    assert [str(action(place)) for place in line.critical_path] == [
        *("0F0", "0F1", "0OFFLOAD1", "0RELOAD0", "0B0", "0RELOAD1", "0B1", "0B2")
    ]


def test_memory_is_free_when_a_copy_is_over_and_taken_as_it_starts() -> None:
    line = schedir.simulate(ALONE, COSTS)
    assert [each.tolist() for each in line.memory(0)] == [
        [0, 0, 1, 2, 2, 3, 3, 6, 6, 9, 11],
        [0, 4, 8, 4, 8, 4, 8, 4, 8, 4, 0],
    ]
    assert [each.tolist() for each in line.host_memory(0)] == [[0, 2, 3, 4, 7], [0, 4, 8, 4, 0]]
    (rank,) = line.ranks
    assert (rank.peak_bytes, rank.peak_host_bytes, rank.peak_activations) == (8, 8, 2)
    slow = schedir.simulate(ALONE, attrs.evolve(COSTS, host_bandwidth=1))
    assert slow.ranks[0].peak_bytes == 12  # nothing is away before 0F2 has begun
    free = schedir.simulate(ALONE, attrs.evolve(COSTS, host_bandwidth=math.inf))
    assert set(copies(free).values()) == {(1, 1), (2, 2), (5, 5)}
    assert free.makespan == 9
    plain = schedir.simulate(listed(1, "0", "0F0 0B0"), COSTS)
    assert plain.ranks[0].peak_host_bytes is None
    assert schedir.simulate(ALONE).ranks[0].peak_host_bytes is None


REPLICAS = listed(2, "0,1", *(f"0F{m} 0OFFLOAD{m} 0RELOAD{m} 0B{m} 0REDUCE_GRAD" for m in (0, 1)))


def test_ranks_that_share_an_engine_take_turns() -> None:
    #   time     0    1    2    3    4    5    6    7
    #   rank 0   0F0            0B0------             of copies that are posted at once those of
    #   rank 1   0F1                      0B1------   the lower rank go first
    #   engine        out0 in0  out1 in1
    alone = schedir.simulate(REPLICAS, COSTS)
    for rank in range(2):
        assert [*copies(alone, rank).values()] == [(1, 2), (2, 3)]
    shared = schedir.simulate(REPLICAS, attrs.evolve(COSTS, copy_engine={0: 7, 1: 7}))
    assert copies(shared, 0) == {"0OFFLOAD0": (1, 2), "0RELOAD0": (2, 3)}
    assert copies(shared, 1) == {"0OFFLOAD1": (3, 4), "0RELOAD1": (4, 5)}
    apart = attrs.evolve(COSTS, copy_engine={1: 0})
    assert schedir.simulate(REPLICAS, apart) == alone


def test_an_engine_serves_copies_in_the_order_in_which_ranks_come_to_them() -> None:
    #   time     0    1    2    3    4    5    6    7    8    9
    #   rank 0   0F0------                          0B0------
    #   rank 1   0F1                      0B1------
    #   engine        out1----------- in1  out0 in0
    costs = attrs.evolve(COSTS, copy_engine={0: 0, 1: 0})
    line = schedir.simulate(REPLICAS, costs, durations={(0, 0): 2, (1, 1): 3})
    assert copies(line, 1) == {"0OFFLOAD1": (1, 4), "0RELOAD1": (4, 5)}
    assert copies(line, 0) == {"0OFFLOAD0": (5, 6), "0RELOAD0": (6, 7)}
    assert [str(REPLICAS.columns.action(place)) for place in line.critical_path] == [
        *("0F1", "0OFFLOAD1", "0RELOAD1", "0OFFLOAD0", "0RELOAD0", "0B0", "0REDUCE_GRAD")
    ]


def test_copies_are_fitted_forecast_and_named_where_no_run_has_shown_them() -> None:
    plain = schedir.build("1f1b", ranks=2, microbatches=6)
    away = offload(plain, [0])
    costs = CostModel(forward=(2, 1), activation_bytes=(8, 3), host_bandwidth=2, latency=1)
    seen: Any = CostModel.fit([schedir.simulate(away, costs)] * 6)
    assert seen.host_bandwidth == 2
    assert unmeasured(away, seen) == ()
    assert seen.forward == (2, 1)  # no wait for a copy is work
    makespan = schedir.simulate(away, costs).makespan
    assert schedir.simulate(away, seen).makespan == makespan
    assert schedir.forecast(away, seen).median == pytest.approx(makespan)
    unseen = CostModel.fit([schedir.simulate(plain, costs)] * 6)
    assert unseen.host_bandwidth == math.inf
    assert unmeasured(plain, unseen) == ()
    assert how_derived(unmeasured(away, unseen)) == "host_bandwidth (copies are free)"


def test_timelines_with_copies_are_saved_and_loaded(tmp_path: Path) -> None:
    line = schedir.simulate(ALONE, COSTS)
    line.save(tmp_path / "line.json")
    loaded = Timeline.load(tmp_path / "line.json")
    assert loaded == line
    assert loaded.ranks == line.ranks


AWAY = offload(schedir.build("1f1b", ranks=2, microbatches=3), [0])


def test_a_drawing_has_a_lane_of_the_copy_engine() -> None:
    line = schedir.simulate(AWAY, COSTS)
    assert timeline_text(line).splitlines()[3:9] == [
        "               0              5              10",
        "rank 0         F0 F1       B0--- F2 B1---    B2---*",
        "rank 0 copies        >1          <1",
        "rank 1            F0 B0--- F1 B1--- F2 B2---*",
        "",
        "F forward, B backward, > copy of the activation to the host, < copy of the activation "
        "back, * step of the optimiser; F0 is the forward of microbatch 0",
    ]
    screen = plain(overview_blocks([line], 80, 24))
    assert "\n   0    F0 F1 " in screen
    assert "\ncopies        >1          <1\n" in screen


def test_other_pictures_have_one_too() -> None:
    line = schedir.simulate(AWAY, COSTS)
    picture = line.svg()
    groups = re.findall(r'<g class="copies".*?</g>\n</g>|<g class="copies".*?</g>', picture, re.S)
    assert [group.count("<text") for group in groups] == [2, 0]
    assert "> copy" not in picture
    assert "&gt; copy of the activation to the host" in picture
    trace = json.loads(line.perfetto())
    events = trace["traceEvents"]
    (track,) = (e for e in events if e.get("args") == {"name": "copies to the host and back"})
    shown = [e for e in events if e["ph"] == "X" and e["tid"] == track["tid"]]
    expected = [("0OFFLOAD1", 2e6, 1e6), ("0RELOAD1", 6e6, 1e6)]
    assert [(e["name"], e["ts"], e["dur"]) for e in shown] == expected
    held = [e["args"]["live"] for e in events if e["name"] == "bytes on the host" and not e["pid"]]
    assert held == [0, 4, 0]


def test_why_a_rank_waits_for_a_copy() -> None:
    line = schedir.simulate(ALONE, attrs.evolve(COSTS, host_bandwidth=1))
    told = plain(why_blocks(line, None, None))
    busy = "communication: 0B0 waits for 0OFFLOAD1 on rank 0, with which its copy engine is busy\n"
    assert busy in told
    assert "communication: 0B0 waits for 0RELOAD0 on rank 0\n" in told
    assert "critical path: compute 7 (30.4%), copies 16 (69.6%)\n" in told


def test_costs_of_copies_on_the_command_line(run: Run) -> None:
    Path("alone.sched").write_text(schedir.dumps(ALONE))
    costs = "--cost", "activation_bytes=4", "--cost", "host_bandwidth=4"
    assert json.loads(run("show", "alone.sched", *costs, "--json")[1])["makespan"] == 11
