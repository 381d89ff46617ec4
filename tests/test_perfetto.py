"""The trace for Perfetto: held against the timeline, and against the rules of its format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, SchedirError, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION
from schedir.render import outputs
from schedir.render.text import plain
from schedir.simulator import Measured
from tests.built_in import NAMES
from tests.command_line import runner
from tests.literals import listed
from tests.timelines import lines, simulated

Event = dict[str, Any]
FACTOR = {"s": 1e6, "ms": 1e3, "us": 1, None: 1e6}
"""From the unit of a timeline to microseconds."""


def delayed(line: Timeline, latency: float) -> Timeline:
    """The same with transfers that arrive so much later, whoever waits for them."""
    transfers = line.schedule.columns.is_kind(*COMMUNICATION)
    return attrs.evolve(line, ends=line.ends + np.where(transfers, latency, 0))


def trace(line: Timeline, against: Timeline | None = None) -> list[Event]:
    events: list[Event] = json.loads(line.perfetto(against))["traceEvents"]
    return events


def slices(events: list[Event]) -> list[Event]:
    """What ranks do."""
    return [event for event in events if event["ph"] == "X" and event["cat"] != "idle"]


def waits(events: list[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") == "idle"]


def names(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == what
    }


def check_tracks(events: list[Event]) -> None:
    """No slice reaches into the next one of its thread."""
    threads = defaultdict(list)
    for event in slices(events) + waits(events):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(times)))
    assert set(threads) == set(names(events, "thread_name"))


def check_arrows(events: list[Event], transfers: int) -> None:
    """Each arrow begins in a send and ends in the receive that the send meets."""
    # Events of one time are read in the order of the file.
    before: dict[tuple[int, int], Event] = {}
    begun: dict[int, Event] = {}
    met = 0
    for event in sorted(events, key=lambda event: event.get("ts", -1)):
        own = event["pid"], event.get("tid", 0)
        if event["ph"] == "X":
            before[own] = event
        elif event["ph"] == "s":
            assert event["id"] not in begun
            begun[event["id"]] = before[own]
        elif event["ph"] == "f":
            assert event["bp"] == "e"
            send, receive = begun.pop(event["id"]), before[own]
            assert receive["ts"] <= event["ts"] <= receive["ts"] + receive["dur"]
            expected = schedir.ir.parse_action(send["name"]).counterpart
            assert receive["name"] == str(expected)
            met += 1
    assert not begun
    assert met == transfers


@given(lines(5, 12))
def test_every_action_is_a_slice_at_its_time(line: Timeline) -> None:
    events = trace(line)
    factor = FACTOR[line.unit]
    found = {(e["pid"], e["args"]["index"]): e for e in slices(events)}
    listed = [(rank, span) for rank, spans in enumerate(line.spans) for span in spans]
    assert len(found) == len(listed) == len(slices(events))
    for rank, span in listed:
        event = found[rank, span.index]
        assert event["name"] == str(span.action)
        assert event["args"]["stage"] == span.action.stage
        assert event["args"].get("microbatch") == span.action.microbatch
        assert event["ts"] == pytest.approx(span.start * factor, abs=1 / 16)
        assert event["ts"] + event["dur"] == pytest.approx(span.end * factor, abs=1 / 16)
    check_tracks(events)
    check_arrows(events, len(graph_of(line.schedule).transfers))


def test_ranks_are_processes_with_a_thread_for_each_peer_and_direction() -> None:
    events = trace(simulated("1f1b", 12, 4))
    processes = [name for _, name in sorted(names(events, "process_name").items())]
    assert processes == [f"rank {rank:02}" for rank in range(12)] == sorted(processes)
    order = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert order == list(range(12))
    threads = names(events, "thread_name")
    assert [name for (pid, _), name in sorted(threads.items()) if pid == 5] == [
        *("compute", "idle", "from rank 4", "from rank 6", "to rank 4", "to rank 6")
    ]
    assert len(threads) == 12 + 4 * 11 + 12
    assert not {tid for _, tid in threads} & set(range(12))


def test_transfers_that_overlap_have_tracks_of_their_own() -> None:
    # Five forwards of 1 follow each other, and each payload is under way for 3.
    events = trace(delayed(simulated("fill-drain", 2, 5), 3))
    check_tracks(events)
    check_arrows(events, 10)
    threads = names(events, "thread_name")
    sends = [n for (pid, _), n in sorted(threads.items()) if pid == 0 and n.startswith("to")]
    assert sends == ["to rank 1", "to rank 1 (2)", "to rank 1 (3)"]


@given(ranks=st.integers(2, 4), microbatches=st.integers(1, 12), latency=st.floats(0, 30))
def test_tracks_hold_any_latency(ranks: int, microbatches: int, latency: float) -> None:
    events = trace(delayed(simulated("1f1b", ranks, microbatches), latency))
    check_tracks(events)
    check_arrows(events, 2 * (ranks - 1) * microbatches)


def test_pairs_are_one_slice_and_batches_several() -> None:
    lists = (
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 (0F2;0B0) (0SEND_ACT2;0RECV_GRAD1) 0B1 "
        "0RECV_GRAD2 0B2 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 (1SEND_GRAD1;1RECV_ACT2) 1F2 1B2 "
        "1SEND_GRAD2 1OPTIM_STEP",
    )
    events = trace(schedir.simulate(listed(3, "0 1", *lists), CostModel(latency=0.5)))
    found = Counter(event["name"] for event in slices(events))
    assert found["(0F2;0B0)"] == found["0SEND_ACT2"] == found["0RECV_GRAD1"] == 1
    assert "0F2" not in found
    (pair,) = (event for event in slices(events) if event["name"] == "(0F2;0B0)")
    args = {"index": 5, "stage": 0, "microbatch": 2, "version": 0, "overlaps": "0B0"}
    assert pair["args"] == args
    check_tracks(events)
    check_arrows(events, 6)


def test_the_version_that_an_action_reads_is_said() -> None:
    line = simulated("pipedream", 4, 8)
    found = {e["name"]: e["args"].get("version") for e in slices(trace(line))}
    # Stage 0's versions by minibatch: Harlap et al. 2018, section 3.3.
    assert [found[f"0B{m}"] for m in range(8)] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert found["0SEND_ACT0"] is None


@given(lines(4, 8))
def test_idle_time_has_its_cause(line: Timeline) -> None:
    factor = FACTOR[line.unit]
    found = waits(trace(line))
    expected = [(rank, idle) for rank, stretches in enumerate(line.idle) for idle in stretches]
    columns = line.schedule.columns
    for event, (rank, idle) in zip(found, expected, strict=True):
        assert (event["pid"], event["name"]) == (rank, str(idle.cause))
        assert event["ts"] == pytest.approx(idle.start * factor, abs=1 / 16)
        assert event["ts"] + event["dur"] == pytest.approx(idle.end * factor, abs=1 / 16)
        for key, place in (
            ("before", idle.entry),
            ("waits for", idle.blamed),
            ("through", idle.transfer),
            ("slower stage", idle.root),
        ):
            assert (key in event["args"]) == (place is not None)
            if place is not None:
                by, index = columns.position(place)
                assert event["args"][key] == f"rank {by} #{index} {columns.action(place)}"


@pytest.mark.parametrize("name", NAMES)
def test_counters_say_what_is_held(name: str) -> None:
    sized = CostModel(activation_bytes=10, weight_bytes=7, latency=0.25, unit="ms")
    for line in (simulated(name, 3, 6), simulated(name, 3, 6, sized)):
        found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for event in trace(line):
            if event["ph"] == "C":
                found[event["pid"], event["name"]].append((event["ts"], event["args"]["live"]))
        curves = {"activations": line.live}
        if line.sizes is not None:
            curves["bytes"] = line.memory
        assert set(found) == {(rank, name) for rank in range(3) for name in curves}
        for (rank, name_of), counted in found.items():
            times, amounts = curves[name_of](rank)
            expected = zip(times * FACTOR[line.unit], amounts, strict=True)
            assert counted == [*expected]


def test_two_timelines_have_processes_side_by_side() -> None:
    line = simulated("1f1b", 3, 4)
    measured = attrs.evolve(line, measured=Measured(step=7), unit="ms")
    events = trace(line, measured)
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    processes = {pid: name for (pid, _), name in names(events, "process_name").items()}
    assert [processes[pid] for pid in sorted(order, key=order.__getitem__)] == [
        f"rank {rank} {which}" for rank in range(3) for which in ("predicted", "measured, step 7")
    ]
    check_tracks(events)
    check_arrows(events, 2 * len(graph_of(line.schedule).transfers))
    for measured_one, unit in ((False, 1e6), (True, 1e3)):
        ends = (e["ts"] + e["dur"] for e in slices(events) if (e["pid"] > 9) == measured_one)
        assert max(ends) == line.makespan * unit


def test_two_timelines_may_have_different_ranks() -> None:
    events = trace(simulated("1f1b", 12, 2), simulated("fill-drain", 3, 2))
    processes = {pid: name for (pid, _), name in names(events, "process_name").items()}
    assert sorted(processes) == [*range(12), 100, 101, 102]
    assert processes[11] == "rank 11 1f1b"
    assert processes[102] == "rank 2 fill-drain"
    assert not {tid for _, tid in names(events, "thread_name")} & set(processes)


def test_what_is_not_known_when_is_left_out_with_a_warning() -> None:
    line = simulated("1f1b", 2, 3)
    sends = line.schedule.columns.is_kind(*COMMUNICATION)
    starts = np.where(sends, np.nan, line.starts)
    unknown = attrs.evolve(line, starts=starts)
    written = outputs.perfetto(unknown)
    assert list(written.left_out) == [
        f"{sends.sum()} of {len(sends)} actions are left out because their times are unknown: "
        "rank 0 #1 0SEND_ACT0 is the first"
    ]
    events = json.loads(plain(written.blocks))["traceEvents"]
    assert len(slices(events)) == len(sends) - sends.sum()
    assert not [event for event in events if event["ph"] in "sf"]
    assert "NaN" not in json.dumps(events)


def test_a_makespan_that_no_trace_can_hold_is_refused() -> None:
    line = simulated("1f1b", 2, 3, CostModel(forward=10**10))
    with pytest.raises(SchedirError, match=r"can't hold a makespan of .* seconds: give the"):
        trace(line)
    assert trace(simulated("1f1b", 2, 3, CostModel(forward=10**10, unit="us")))


def test_export_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    assert runner(capsys)("export", "1f1b", "-o", str(file)) == (0, "", "")
    line = simulated("1f1b", 4, 8)
    assert json.loads(file.read_text())["traceEvents"] == trace(line)
    assert file.read_text().count("\n") == len(trace(line)) + 2  # an event a line
