"""Entries of several actions: what can run together, and that every form of a list keeps it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import schedir
from schedir import Action, Kind, ParseError, Schedule, Together, backward, forward, together
from schedir.graph.alive import peak_activations, weight_versions
from schedir.graph.compile import graph_of
from schedir.ir import Entry, dumps_torch_csv, flat, loads_torch_csv, parse_action, starts_of
from schedir.library import load
from schedir.passes import (
    forward_only,
    insert_communication,
    insert_reductions,
    strip_communication,
)
from tests.literals import listed

SEND, RECV = schedir.send_act(0, 1), schedir.recv_grad(0, 1)
PAIR, BATCH = together(forward(0, 4), backward(7, 3)), together(SEND, RECV)


def test_a_pair_and_a_batch_keep_their_order() -> None:
    assert str(PAIR) == "(0F4;7B3)"
    assert str(together(*PAIR.actions[::-1])) == "(7B3;0F4)" != str(PAIR)
    assert str(BATCH) == "(0SEND_ACT1;0RECV_GRAD1)"
    assert Together((forward(0, 4), backward(7, 3))) == PAIR
    assert len({PAIR, together(*PAIR.actions), together(*PAIR.actions[::-1])}) == 2


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        ([], "two or more actions run together"),
        (["0F0"], "two or more actions run together"),
        (["0F0", "0F1"], r"one forward \(F\) and one backward \(B or I\)"),
        (["0B0", "1I1"], r"one forward \(F\) and one backward \(B or I\)"),
        (["0F0", "1B0", "1B1"], r"one forward \(F\) and one backward \(B or I\)"),
        (["0F0", "0B0"], "0B0 needs 0F0, so the two can't start together"),
        (["0I0", "0F0@3"], "0I0 needs 0F0@3, so the two can't start together"),
        (["0F1", "0W0"], "0W0 runs alone"),
        (["0F1", "0REDUCE_GRAD"], "0REDUCE_GRAD runs alone"),
        (["0SEND_ACT1", "0OPTIM_STEP"], "0OPTIM_STEP runs alone"),
        (["0SEND_ACT1", "0F2"], "0F2 computes and 0SEND_ACT1 communicates"),
        (["0F2", "1B0", "0SEND_ACT1"], "0F2 computes and 0SEND_ACT1 communicates"),
        (["0SEND_ACT1", "1RECV_ACT1", "0SEND_ACT1"], "0SEND_ACT1 is in the entry 2 times"),
    ],
)
def test_what_can_not_run_together(actions: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        together(*map(parse_action, actions))
    line = f"rank 0: 0F9 ({';'.join(actions)}) 0F8"
    if actions:
        with pytest.raises(ParseError, match=why) as error:
            schedir.loads(f"schedir 1\nname x\nmicrobatches 2\nplacement 0\n{line}\n")
        assert (error.value.line, error.value.column) == (5, 13)


def test_an_entry_is_of_actions_and_of_no_other_entry() -> None:
    with pytest.raises(ValueError, match=r"\(0F4;7B3\) can't stand in another entry"):
        Together((PAIR, forward(0, 5)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'0F4' is not an Action"):
        together("0F4", backward(7, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank 0 #1 is not an Action but 'x'"):
        Schedule("x", 5, (0,), [[PAIR, "x"]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("token", "column", "message"),
    [
        ("(0F1;7B0", 0, r"'(0F1;7B0' lacks its ')'"),
        ("(0F1; 7B0)", 0, r"'(0F1;' lacks its ')': actions that run together are one word"),
        ("(0F1;7B0)x", 9, "'x' can't follow the ')' of an entry"),
        ("(0F1;7B0)OVERLAP_F_B", 9, "'OVERLAP_F_B' can't follow the ')' of an entry"),
        ("()", 1, "an empty part"),
        ("(;0F1)", 1, "an empty part"),
        ("(0F1)", 0, "two or more actions"),
        ("((0F1;7B0);0F2)", 1, "can't be nested"),
        ("(0F2;(0F1;7B0))", 5, "can't be nested"),
        ("((0F1;7B0))x", 1, "can't be nested"),
        ("(0F1;7B0))", 9, "')' can't follow"),
        ("(0F1;7X3)", 5, "unknown action kind 'X'"),
        ("(0F1,7B3)", 1, "'0F1,7B3' is not an action"),
        ("0F1;7B3", 0, "'0F1;7B3' is not an action"),
        ("(0F1@;7B3)", 1, "'0F1@' is not an action"),
    ],
)
def test_errors_in_an_entry_name_its_column(token: str, column: int, message: str) -> None:
    with pytest.raises(ParseError) as error:
        listed(8, "0", f"0F0 {token} 0F3")
    assert message in error.value.message
    assert (error.value.line, error.value.column) == (5, len("rank 0: 0F0 ") + 1 + column)


def test_comments_and_continuation_lines_between_entries() -> None:
    text = "0F0 (0F1;1B0)  # a pair\n  (0F2;1B1)#\n\t(0SEND_ACT1;0RECV_GRAD0)"
    (actions,) = listed(8, "0", text).actions
    assert [*map(str, actions)] == ["0F0", "(0F1;1B0)", "(0F2;1B1)", "(0SEND_ACT1;0RECV_GRAD0)"]


NUMBERS = st.integers(0, 9)


@st.composite
def pairs(draw: st.DrawFn) -> Together:
    number = st.tuples(NUMBERS, NUMBERS)
    (s, m), (t, n) = draw(st.lists(number, min_size=2, max_size=2, unique=True))
    kind = draw(st.sampled_from([Kind.BACKWARD, Kind.BACKWARD_INPUT]))
    parts = [forward(s, m, draw(st.none() | NUMBERS)), Action(kind, t, n)]
    return together(*draw(st.permutations(parts)))


def communication() -> st.SearchStrategy[Action]:
    kinds = st.sampled_from([Kind.SEND_ACT, Kind.RECV_ACT, Kind.SEND_GRAD, Kind.RECV_GRAD])
    return st.builds(Action, kinds, NUMBERS, NUMBERS)


def batches() -> st.SearchStrategy[Together]:
    return st.lists(communication(), min_size=2, max_size=5, unique=True).map(Together)


def single() -> st.SearchStrategy[Action]:
    computes = st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT])
    compute = st.builds(Action, computes, NUMBERS, NUMBERS)
    return communication() | compute | st.builds(schedir.optim_step, NUMBERS)


def schedules(entries: st.SearchStrategy[Entry]) -> st.SearchStrategy[Schedule]:
    lists = st.lists(st.lists(entries, max_size=6), min_size=1, max_size=4)
    return lists.map(lambda ranks: Schedule("any", 10, [0] * 10, ranks))


@given(schedules(single() | pairs() | batches()))
def test_the_lists_are_as_they_were_given(schedule: Schedule) -> None:
    columns = schedule.columns
    assert Schedule("any", 10, [0] * 10, schedule.actions) == schedule
    for rank, (entries, actions) in enumerate(zip(schedule.actions, schedule.flat, strict=True)):
        place = int(columns.starts[rank])
        for index, entry in enumerate(entries):
            parts = entry.actions if isinstance(entry, Together) else (entry,)
            assert columns.place(rank, index) == place
            for part in parts:
                assert columns.position(place) == (rank, index)
                assert columns.action(place) == part
                assert columns.last[place] == columns.place(rank, index) + len(parts) - 1
                place += 1
        assert place == columns.starts[rank + 1] == columns.starts[rank] + len(actions)
    # The hash tells an entry from its parts.
    apart = Schedule("any", 10, [0] * 10, schedule.flat)
    joined = any(isinstance(entry, Together) for entries in schedule.actions for entry in entries)
    assert columns.together == joined == (apart != schedule)
    assert joined == (apart.content_hash != schedule.content_hash)


@given(schedules(single() | pairs() | batches()), st.randoms(use_true_random=False))
def test_a_part_whose_fellows_are_gone_stands_alone(
    schedule: Schedule, chance: random.Random
) -> None:
    columns = schedule.columns
    kept = np.array([p for p in range(len(columns)) if chance.random() < 0.7], np.int64)
    taken = schedule.take(kept, starts_of(columns.rank[kept], schedule.ranks))
    expected: list[list[Entry]] = [[] for _ in range(schedule.ranks)]
    places = iter(range(len(columns)))
    for rank, entries in enumerate(schedule.actions):
        for entry in entries:
            parts = entry.actions if isinstance(entry, Together) else (entry,)
            left = [part for part in parts if next(places) in kept]
            if left:
                expected[rank].append(Together(left) if len(left) > 1 else left[0])
    assert [*map(list, taken.actions)] == expected


def test_what_is_moved_or_doubled_leaves_its_entry() -> None:
    columns = listed(8, "0", "(0F1;1B0) (0SEND_ACT1;0RECV_GRAD0;0SEND_ACT2) 0F3", "").columns

    def taken(*places: int) -> str:
        moved = columns.take(np.array(places), np.array([0, len(places), len(places)]))
        return " ".join(map(str, moved.entries_of(0)))

    assert taken(0, 1, 1, 5) == "(0F1;1B0) 1B0 0F3"
    assert taken(1, 0) == "1B0 0F1"
    assert taken(0, 5, 1) == "0F1 0F3 1B0"
    assert taken(2, 4, 3) == "(0SEND_ACT1;0SEND_ACT2) 0RECV_GRAD0"
    # Nor does it reach over to the next rank.
    split = columns.take(np.array([0, 1]), np.array([0, 1, 2]))
    assert [[*map(str, split.entries_of(rank))] for rank in (0, 1)] == [["0F1"], ["1B0"]]
    assert not split.together


@given(st.lists(st.lists(single() | pairs(), max_size=6), min_size=1, max_size=4))
def test_torch_csv_holds_pairs_both_ways(lists: list[list[Entry]]) -> None:
    full, weights = (
        {(a.stage, a.microbatch) for entries in lists for a in flat(entries) if a.kind is kind}
        for kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    )
    assume(not full & weights)  # refused: in older torch's dialect B was the I of that W
    # A stage needs a forward somewhere, and the last row's microbatch says how many there are.
    lists[-1] += [forward(stage, 9) for stage in range(10)]
    text, _ = dumps_torch_csv(Schedule("any", 10, [0] * 10, lists))
    kept = [[e for e in entries if str(e)[1:] != "OPTIM_STEP"] for entries in lists]
    read = loads_torch_csv(text)
    assert [[*map(str, entries)] for entries in read.actions] == [
        [re.sub(r"@\d+", "", str(entry)) for entry in entries] for entries in kept
    ]
    assert dumps_torch_csv(read) == (text, [])


def test_torch_csv_takes_batches_apart_and_says_so() -> None:
    schedule = listed(2, "0 1", "0F0 (0SEND_ACT0;0RECV_GRAD1) (0F1@0;0B0)", "1F0 1F1")
    text, lost = dumps_torch_csv(schedule)
    assert text == "0F0,0SEND_F0,0RECV_B1,(0F1;0B0)OVERLAP_F_B\n1F0,1F1\n"
    assert lost == [
        "(0SEND_ACT0;0RECV_GRAD1) is taken apart: torch has no batch of sends and receives",
        "0F1@0 loses its weight version: torch has none",
    ]


@schedir.schedule("paired")
def paired(pipe: schedir.Pipeline, rank: int) -> Iterator[Action | Together]:
    """All forwards, each but the first together with the backward of the one before."""
    yield forward(rank, 0)
    for m in range(1, pipe.microbatches):
        yield together(backward(rank, m - 1), forward(rank, m))
    yield backward(rank, pipe.microbatches - 1)


def test_a_generator_yields_entries_and_their_lines_are_kept() -> None:
    found = load(paired, ranks=1, microbatches=3)
    assert [*map(str, found.actions[0])] == ["0F0", "(0B0;0F1)", "(0B1;0F2)", "0B2"]
    lines = [found.source_of(0, index) for index in range(4)]
    assert all(lines)
    first, *pairs, last = [source.line for source in lines if source]
    assert (pairs[0], pairs[1], last) == (first + 2, first + 2, first + 3)


def test_what_a_generator_puts_together_wrongly_is_its_own_line() -> None:
    @schedir.schedule("wrong")
    def wrong(pipe: schedir.Pipeline, rank: int) -> Iterator[Action | Together]:
        yield together(forward(rank, 0), backward(rank, 0))

    line = wrong.function.__code__.co_firstlineno + 2
    with pytest.raises(schedir.LoadError, match=rf"test_together.py:{line}: .*0B0 needs 0F0"):
        load(wrong, ranks=1, microbatches=1)


def test_a_pair_gets_its_communication_as_one_piece_of_compute() -> None:
    compute = listed(2, "0 1", "0F0 0F1 0B0 0B1", "1F0 (1B0;1F1) 1B1")
    complete = insert_communication(compute)
    assert [" ".join(map(str, entries)) for entries in complete.actions] == [
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1RECV_ACT1 (1B0;1F1) 1SEND_GRAD0 1B1 1SEND_GRAD1",
    ]
    assert strip_communication(complete) == compute


def test_a_pair_that_waits_for_itself_gets_none() -> None:
    # 0B0 needs 1B0, which stands after 1F1, which needs the 0F1 of the pair.
    with pytest.raises(schedir.UnsoundError, match=r"rank 0 #1 .* never gets its input"):
        insert_communication(listed(2, "0 1", "0F0 (0F1;0B0) 0B1", "1F0 1F1 1B0 1B1"))


def test_passes_keep_pairs_and_take_forwards_out_of_them() -> None:
    schedule = listed(2, "0,1", "0F0 (0B0;0F1) 0B1 0OPTIM_STEP", "")
    assert [*map(str, insert_reductions(schedule).actions[0])] == [
        *("0F0", "(0B0;0F1)", "0B1", "0REDUCE_GRAD", "0OPTIM_STEP")
    ]
    early = listed(2, "0,1", "0F0 (0B0;0F1) 0OPTIM_STEP 0B1", "")
    assert [*map(str, insert_reductions(early).actions[0])][1:4] == [
        *("(0B0;0F1)", "0REDUCE_GRAD", "0OPTIM_STEP")
    ]
    assert [*map(str, forward_only(schedule).actions[0])] == ["0F0", "0F1"]


def test_a_pair_holds_both_its_activations_in_either_order() -> None:
    for pair in ("(0F1;0B0)", "(0B0;0F1)"):
        graph = graph_of(listed(2, "0", f"0F0 {pair} 0B1"))
        ((peak, place),) = peak_activations(graph)
        assert (peak, str(graph.columns.action(place))) == (2, "0F1")
    assert peak_activations(graph_of(listed(2, "0", "0F0 0B0 0F1 0B1"))) == [(1, 0)]
    apart = listed(2, "0 0", "0F0 (0B0;0F1) 0B1", "")
    assert peak_activations(graph_of(apart)) == [(2, 2), (0, 0)]


def test_versions_are_those_of_the_parts_one_after_the_other() -> None:
    lists = "0F0 (0B0;0F1) 0OPTIM_STEP 0F2 (0F3@0;0B1) 0OPTIM_STEP 0B2 0B3 0OPTIM_STEP"
    schedule = listed(4, "0", lists)
    apart = Schedule("apart", 4, schedule.placement, schedule.flat)
    assert weight_versions(schedule.columns, 0) == weight_versions(apart.columns, 0)
    assert (graph_of(schedule).reads == graph_of(apart).reads).all()
