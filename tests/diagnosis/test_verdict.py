"""Who is to blame: every rank is stopped at every place; the verdict names it and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

import schedir
from schedir import Position, Schedule, diagnose
from schedir.diagnosis.verdict import GATHER, HANDSHAKE
from schedir.passes import forward_only
from tests.built_in import EVERY
from tests.diagnosis.standing import at_rest, position
from tests.sweeps import sweep

SHAPES = [(name, 4, 4 if name == "chimera" else 8) for name in EVERY if name != "1f1b-rr"]
SHAPES.append(("1f1b", 3, 2))
QUICK = ("1f1b", "interleaved-1f1b", "pipedream", "dualpipe", "zb")
"""With chunks, several updates, replicas and backwards in two parts."""


def expect_it_is_the_root(schedule: Schedule, **given: Any) -> int:
    """Stop each rank at each place. Returns at how many another rank waits for it."""
    blamed = 0
    for rank, entries in enumerate(schedule.actions):
        for index in range(len(entries)):
            at = at_rest(schedule, {rank: index}, **given)
            assert at[rank] == (0, index, "running")
            waits = any(phase == "waiting" for _, _, phase in at)
            found = diagnose(schedule, at, **given)
            assert [root.rank for root in found.roots] == [rank] * waits, (rank, index, at)
            if waits:
                blamed += 1
                (root,) = found.roots
                assert (root.call, root.index) == (0, index)
                assert str(root.action) in str(entries[index])
                assert found.chain[-1] == rank
    return blamed


@sweep("name, ranks, microbatches", SHAPES, quick=lambda shape: shape[0] in QUICK)
@pytest.mark.parametrize("clips", [False, True])
def test_a_stopped_rank_is_the_root(name: str, ranks: int, microbatches: int, clips: bool) -> None:
    schedule = schedir.build(name, ranks=ranks, microbatches=microbatches)
    blamed = expect_it_is_the_root(schedule, clips=clips)
    if name == "1f1b" and ranks == 4:
        # Nobody waits for the last update of rank 1: it passes no announcement on.
        assert blamed == sum(map(len, schedule.actions)) - 1


@pytest.mark.parametrize("ties", [(), ((0, 1),)])
def test_with_ties_and_sums_the_root_is_named(ties: tuple[tuple[int, ...], ...]) -> None:
    own = "{0}F{1} {0}B{1} {0}REDUCE_GRAD {0}OPTIM_STEP"
    lists = [own.format(stage, m) for m in (0, 1) for stage in (0, 1)]
    replicas = Schedule.of("replicas", [(0, 2), (1, 3)], lists, microbatches=2)
    assert expect_it_is_the_root(schedir.insert_communication(replicas), ties=ties)


SCHEDULE = schedir.build("1f1b", ranks=4, microbatches=8)


def names(*at: Any) -> list[int]:
    return [root.rank for root in diagnose(SCHEDULE, at).roots]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("state", ["gone", "silent"])
def test_one_that_is_gone_or_silent_is_named_wherever_it_stands(rank: int, state: str) -> None:
    for index in range(len(SCHEDULE.actions[rank])):
        at = [position(each, "alive") for each in at_rest(SCHEDULE, {rank: index})]
        at[rank] = Position(0, index, "running", state)  # type: ignore[arg-type]
        assert names(*at) == [rank]


def test_two_that_are_gone_are_both_named() -> None:
    at = [position(each, "alive") for each in at_rest(SCHEDULE, {1: 6, 2: 9})]
    at[1] = Position(0, 6, state="gone", cause="killed by SIGKILL")
    at[2] = Position(0, 9, state="gone")
    roots = diagnose(SCHEDULE, at).roots
    assert [str(root) for root in roots] == [
        "rank 1 #6 1RECV_ACT2: killed by SIGKILL",
        f"rank 2 #9 {SCHEDULE.actions[2][9]}: gone",
    ]


def test_one_that_was_told_that_it_waits_in_vain_is_no_root() -> None:
    at = [position(each, "alive") for each in at_rest(SCHEDULE, {2: 5})]
    at[1] = Position(0, at[1].index, "waiting", "ended")
    assert names(*at) == [2]


def test_one_that_was_stopped_while_it_waited_is_named_with_the_end_of_its_wait() -> None:
    at = [position(each, "alive") for each in at_rest(SCHEDULE, {3: 4})]
    assert at[1].phase == "waiting"
    at[1] = Position(0, at[1].index, "waiting", "silent")
    assert names(*at) == [1, 3]


def test_both_ends_are_named_where_a_message_is_lost() -> None:
    at = [(0, 8, "waiting"), (0, 1, "waiting"), (0, 1, "waiting"), (0, 1, "waiting")]
    assert names(*at) == [0, 1]
    root = diagnose(SCHEDULE, at).roots[1]
    assert str(root) == "rank 1 #1 1F0: lost what rank 0 sent"


def test_both_ends_are_named_where_a_connection_is_cut() -> None:
    at = [Position(0, 8, "waiting"), Position(0, 1, "running"), (0, 1, "waiting")]
    at += [Position(0, 1, "waiting", cut=True)]
    assert names(*at) == [2, 3]


def test_one_that_makes_no_call_is_named() -> None:
    at = [(3, 0, "outside"), (3, -2, "waiting"), (3, -2, "waiting"), (3, -2, "waiting")]
    assert names(*at) == [0]
    assert str(diagnose(SCHEDULE, at).roots[0]) == "rank 0 –: others wait for it to make the call"


def test_nobody_is_named_while_nobody_waits() -> None:
    assert names((3, 0, "outside"), (2, 5), (2, 5), (2, 1)) == []


def test_of_two_pipelines_the_one_that_holds_the_sum_up_is_named() -> None:
    own = "{0}F0 {0}B0 {0}REDUCE_GRAD {0}OPTIM_STEP"
    one = Schedule.of("one", [0, 1], [own.format(stage) for stage in (0, 1)])
    schedule = schedir.insert_communication(one)
    step = len(schedule.actions[0]) - 1
    at = [(0, step, "waiting"), (0, step + 0, "waiting"), (0, 0, "running"), (0, 1, "waiting")]
    found = diagnose(schedule, at, pipelines=2)
    assert [root.rank for root in found.roots] == [2]
    assert found.chain[-1] == 2


@pytest.mark.parametrize("rank", range(4))
def test_the_one_that_does_not_come_where_all_tell_each_other_something_is_named(rank: int) -> None:
    at: list[Any] = [(2, GATHER, "waiting")] * 4
    at[rank] = (2, 0, "outside")
    at[rank - 1] = (2, HANDSHAKE, "waiting") if rank else at[rank - 1]  # it is told by rank - 1
    assert names(*at) == [rank]


def test_one_that_still_evaluates_while_others_train_is_named_with_its_forward() -> None:
    last = forward_only(SCHEDULE).actions[3]
    index = [str(entry) for entry in last].index("3F5")
    waiting = [
        (3, list(map(str, own)).index(f"{rank}RECV_GRAD0"), "waiting")
        for rank, own in enumerate(SCHEDULE.actions[:3])
    ]
    found = diagnose(SCHEDULE, [*waiting, (2, index, "running")], evaluating=[3])
    assert [str(root) for root in found.roots] == [f"rank 3 #{index} 3F5: others wait for it"]


def test_the_one_that_others_gather_weights_from_is_named() -> None:
    lists = schedir.shard(schedir.build("interleaved-1f1b", ranks=2, microbatches=4), limit=1)
    schedule = schedir.insert_communication(lists)
    texts = [str(entry) for entry in schedule.actions[0]]
    gathers = [index for index, text in enumerate(texts) if text == "0UNSHARD"]
    assert len(gathers) > 1
    for gather in gathers:
        read = (index for index, text in enumerate(texts) if index > gather and text[:2] in "0F0B")
        at = [(0, next(read), "waiting"), (1, 0, "outside"), (0, gather, "running")]
        found = diagnose(schedule, [*at, (1, 0, "outside")], pipelines=2)
        assert [root.rank for root in found.roots] == [2]


def test_wrong_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="positions of ranks 0 to 3, not"):
        diagnose(SCHEDULE, [(0, 0, "running")])
