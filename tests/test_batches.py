"""`batch_communication`: where batches help, they are made, and nowhere else."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Kind, Schedule, Together, batch_communication
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, Entry, flat
from tests.joined import drawn_joined, joined
from tests.literals import CROSSING, listed
from tests.test_check import naive


def tokens(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, entries)) for entries in schedule.actions]


def runs_in_order(schedule: Schedule) -> bool:
    """Whether each rank gets through its sends, receives and sums in list order, standing at each
    entry until all of it has happened."""
    lists = [[[*flat([entry])] for entry in entries] for entries in schedule.actions]
    at = [0] * len(lists)
    posted: set[tuple[int, object]] = set()
    turns: Counter[object] = Counter()
    names: list[list[list[tuple[int, object]]]] = []
    for rank, entries in enumerate(lists):
        names.append([])
        for parts in entries:
            meets: list[tuple[int, object]] = []
            for action in parts:
                if action.kind is Kind.REDUCE_GRAD:
                    turns[rank, action] += 1
                    meets.append((rank, (action, turns[rank, action])))
                elif action.kind in COMMUNICATION:
                    meets.append((rank, action))
            names[-1].append(meets)

    def happened(rank: int, what: object) -> bool:
        if isinstance(what, tuple):
            return all((other, what) in posted for other in schedule.placement[what[0].stage])
        assert isinstance(what, schedir.Action)
        return (graph_of(schedule).peer(what), what.counterpart) in posted

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(names):
            while at[rank] < len(own):
                posted.update(own[at[rank]])
                if not all(happened(*name) for name in own[at[rank]]):
                    break
                at[rank] += 1
                moved = True
    return all(place == len(entries) for place, entries in zip(at, names, strict=True))


def test_textbook_1f1b_sent_one_by_one() -> None:
    batched = batch_communication(CROSSING)
    assert tokens(batched) == [
        "0F0 0SEND_ACT0 0F1 (0SEND_ACT1;0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1B0 (1SEND_GRAD0;1RECV_ACT1) 1F1 1B1 1SEND_GRAD1",
    ]
    assert batch_communication(batched) is batched


def test_one_side_is_enough_where_the_other_computes_between() -> None:
    first, second = tokens(CROSSING)
    second = second.replace("1SEND_GRAD0", "1SEND_GRAD0 1OPTIM_STEP")
    schedule = listed(2, "0 1", first, second)
    assert tokens(batch_communication(schedule)) == [
        "0F0 0SEND_ACT0 0F1 (0SEND_ACT1;0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1",
        second,
    ]


def test_what_lies_between_is_joined_as_well() -> None:
    # Each rank sends two, then receives two: it has to post its receives while it sends.
    schedule = listed(
        4,
        "0 1",
        "0F0 0F1 0SEND_ACT0 0SEND_ACT1 0F2 0F3 0SEND_ACT2 0SEND_ACT3 0RECV_GRAD0 0RECV_GRAD1 "
        "0B0 0B1 0RECV_GRAD2 0RECV_GRAD3 0B2 0B3",
        "1RECV_ACT0 1RECV_ACT1 1F0 1B0 1F1 1B1 1SEND_GRAD0 1SEND_GRAD1 1RECV_ACT2 1RECV_ACT3 "
        "1F2 1B2 1F3 1B3 1SEND_GRAD2 1SEND_GRAD3",
    )
    first, second = tokens(batch_communication(schedule))
    assert "0SEND_ACT1 0F2 0F3 (0SEND_ACT2;0SEND_ACT3;0RECV_GRAD0;0RECV_GRAD1) 0B0" in first
    assert "1B1 (1SEND_GRAD0;1SEND_GRAD1;1RECV_ACT2;1RECV_ACT3) 1F2" in second
    assert first.endswith("0RECV_GRAD2 0RECV_GRAD3 0B2 0B3")


def test_what_is_clean_or_beyond_help_stays_as_it_is() -> None:
    for name in ("fill-drain", "1f1b", "interleaved-1f1b", "pipedream"):
        built = schedir.build(name)
        assert batch_communication(built) is built
    compute = schedir.passes.strip_communication(schedir.build("1f1b"))
    assert batch_communication(compute) is compute
    # 0B0 stands before 0F1 here, and 1B0 after 1F1: compute is in the way, not an order of sends.
    first = "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0F1 0SEND_ACT1 0RECV_GRAD1 0B1"
    second = "1RECV_ACT0 1F0 1RECV_ACT1 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1"
    stuck = listed(2, "0 1", first, second)
    assert batch_communication(stuck) is stuck
    unmatched = listed(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0")
    assert batch_communication(unmatched) is unmatched
    more = [CROSSING.flat[0], (*CROSSING.flat[1], schedir.send_grad(1, 0))]
    one_more = Schedule("x", 2, [0, 1], more)
    assert batch_communication(one_more) is one_more
    first = "0F0 0F1 0SEND_ACT0 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1"
    second = "1RECV_ACT1 1RECV_ACT0 1F0 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1"
    crossed = listed(2, "0 1", first, second)
    assert batch_communication(crossed) is crossed
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        batch_communication("1f1b")  # type: ignore[arg-type]


def all_joined(schedule: Schedule) -> Schedule:
    """All neighbouring communication as batches."""
    lists: list[list[Entry]] = []
    for entries in schedule.actions:
        result: list[Entry] = []
        for entry in entries:
            before = [*flat(result[-1:])]
            parts = [*flat([entry])]
            if before and all(a.kind in COMMUNICATION for a in (*before, *parts)):
                result[-1] = Together((*before, *parts))
            else:
                result.append(entry)
        lists.append(result)
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, lists)


def shuffled(schedule: Schedule, chance: random.Random) -> Schedule:
    """Stretches of communication in another order, but for what one channel brings."""
    lists = []
    for actions in schedule.flat:
        moved = [*actions]
        for _ in range(len(moved)):
            index = chance.randrange(max(1, len(moved) - 1))
            pair = moved[index : index + 2]
            if len(pair) == 2 and all(action.kind in COMMUNICATION for action in pair):
                moved[index : index + 2] = pair[::-1]
        lists.append(moved)
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, lists)


def verdict(schedule: Schedule) -> str:
    batched = batch_communication(schedule)
    if runs_in_order(schedule):
        assert batched is schedule
        assert "S301" not in {found.code for found in schedir.check(schedule).errors}
        return "clean"
    apart = Schedule("apart", schedule.microbatches, schedule.placement, schedule.flat)
    if any(found.code != "S301" for found in schedir.check(apart).errors):
        assert batched is schedule
        return "unmatched"
    if not runs_in_order(all_joined(schedule)):
        assert batched is schedule
        return "beyond help"
    assert batched.flat == schedule.flat
    assert runs_in_order(batched)
    assert schedir.check(batched).ok
    # What was one entry still is, and none grows beyond the communication around it.
    most = all_joined(schedule).columns.joined
    joins = batched.columns.joined
    assert (joins >= schedule.columns.joined).all()
    assert (joins <= most).all()
    assert batch_communication(batched) is batched
    return "helped"


@given(st.integers(0, 1 << 32))
def test_batches_are_made_where_they_help(seed: int) -> None:
    chance = random.Random(seed)
    verdict(joined(shuffled(drawn_joined(chance), chance), chance, chance.choice([0, 0.3])))


def test_the_cases_that_are_drawn() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100, 160):
        chance = random.Random(seed)
        drawn = shuffled(drawn_joined(chance), chance)
        seen[verdict(joined(drawn, chance, chance.choice([0, 0.3])))] += 1
    assert min(seen[case] for case in ("clean", "beyond help", "helped")) > 2, seen


def one_by_one(ranks: int, microbatches: int) -> Schedule:
    """Textbook 1F1B, each send right after its compute and each receive right before."""
    return naive(schedir.build("1f1b", ranks=ranks, microbatches=microbatches))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 8), (8, 5)])
def test_1f1b_sent_one_by_one_at_every_size(ranks: int, microbatches: int) -> None:
    assert verdict(one_by_one(ranks, microbatches)) == "helped"


def test_it_takes_linear_time() -> None:
    def lines(microbatches: int) -> int:
        """How many lines of Python run."""
        schedule, counted = one_by_one(8, microbatches), Counter[str]()
        _ = graph_of(schedule)

        def count(frame: FrameType, event: str, argument: object) -> Any:
            counted[event] += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            assert batch_communication(schedule) is not schedule
        finally:
            sys.settrace(before)
        return counted["line"]

    assert lines(128) < 5 * lines(32)
