"""Where stages have replicas, each of these has a lane of its own."""

from __future__ import annotations

import random
import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir.ir import COMPUTE
from schedir.render.drawing import rows_of
from schedir.render.lanes import has_replicas, lanes_of
from schedir.render.terminal_timeline import overview_blocks, timeline_text
from schedir.render.text import plain
from tests.joined import joined
from tests.literals import listed
from tests.test_random import drawn
from tests.timelines import simulated


def test_a_rank_says_which_replica_it_has() -> None:
    sums = "0REDUCE_GRAD 0OPTIM_STEP"
    lists = f"0F0 0B0 {sums}", f"0F1 0B1 {sums}", "1F0 1F1 1B0 1B1 1OPTIM_STEP"
    text = timeline_text(schedir.simulate(listed(2, "0,1 2", *lists)))
    found = re.findall(r"(rank +\d stage \d)  ", text)
    assert found == ["rank 0 stage 0", "rank 1 stage 0", "rank 2 stage 1"]
    assert "F0 is the forward of microbatch 0" in text  # the lane says of which stage


def test_both_parts_of_a_pair_are_in_their_lanes() -> None:
    text = timeline_text(simulated("dualpipe", 2, 4))
    assert re.findall(r"rank 0 stage.*", text) == [
        "rank 0 stage 0  F0    F1       B0------       I1 W1*",
        "rank 0 stage 1     F2    B2--- F3------ B3---      *",
    ]


def test_schedules_without_replicas_keep_a_lane_for_each_rank() -> None:
    line = simulated("dualpipev", 2, 4)
    assert [row.head for row in rows_of(line, range(2), named)] == ["0", "1"]
    assert "0F3;3B1" in timeline_text(line)


def test_beside_a_schedule_without_replicas() -> None:
    one, other = simulated("chimera", 2, 2), simulated("1f1b", 2, 2)
    text = plain(overview_blocks([one, other], 80, 40))
    assert "rank  stage  0" in text
    assert "\n   1      1     F0 B0---      *\n" in text
    assert "\n   0         F0 F1" in text


def test_an_overview_leaves_out_whole_ranks() -> None:
    text = plain(overview_blocks([simulated("chimera", 8, 8)], 100, 24))
    rows = re.findall(r"^ +(\d+) +(\d+)  ", text, re.MULTILINE)
    ranks = Counter(int(rank) for rank, _ in rows)
    assert set(ranks.values()) == {2}
    assert set(ranks) < set(range(8))
    hidden = 8 - len(ranks)
    assert f"{hidden} ranks left out" in text
    assert text.index("left out") > text.index("\n   0 ")
    assert len(text.splitlines()) <= 24


def named(rank: int, stage: int | None, copies: bool) -> str:
    return f"{rank}" if stage is None else f"{rank} {stage}"


@given(st.integers(0, 1 << 32))
def test_lanes_hold_what_their_ranks_compute(seed: int) -> None:
    line = schedir.simulate(schedir.insert_communication(drawn(random.Random(seed))))
    schedule = line.schedule
    for rank, actions in enumerate(schedule.flat):
        rows = list(rows_of(line, [rank], named))
        assert rows  # one that has no stage is idle
        found = [span.action for row in rows for span in row.spans]
        assert Counter(found) == Counter(a for a in actions if a.kind in COMPUTE)
        for row in rows:
            if has_replicas(schedule) and schedule.stages_of(rank):
                assert {f"{rank} {span.action.stage}" for span in row.spans} <= {row.head}


@given(st.integers(0, 1 << 32), st.booleans())
def test_cells_stay_in_their_lanes(seed: int, paired: bool) -> None:
    schedule = drawn(random.Random(seed))
    if paired:
        schedule = joined(schedule, random.Random(seed))
    complete = schedir.check(schedule, "async").schedule
    if complete is None:  # a pair that needs itself
        return
    line, schedule = schedir.simulate(complete), complete
    for rank in range(schedule.ranks):
        cells = lanes_of(line).of(2 * rank)
        stages = schedule.stages_of(rank)
        within = max(1, len(stages)) if has_replicas(schedule) else 1
        turns = [stages.index(s) for s in schedule.columns.stage[cells.place].tolist()]
        for turn, top, height in zip(turns, cells.top, cells.height, strict=True):
            lane = turn if within > 1 else 0
            assert lane / within - 1e-9 <= top
            assert top + height <= (lane + 1) / within + 1e-9
        # Only what runs together in one lane shares it.
        pairs = [
            {a.stage for a in entry.actions}
            for entry in schedule.actions[rank]
            if isinstance(entry, schedir.Together) and entry.actions[0].kind in COMPUTE
        ]
        halves = 2 * sum(within == 1 or len(stages) == 1 for stages in pairs)
        assert (cells.height < 0.9 / within).sum() == cells.paired.sum() == halves


def test_a_picture_names_the_stages_where_there_is_room() -> None:
    picture = simulated("chimera", 4, 4).svg()
    assert len(re.findall(r">stage \d<", picture)) == 8
    assert ">stage " not in simulated("chimera", 64, 64).svg()
    assert ">stage 1<" not in simulated("1f1b", 4, 4).svg()
