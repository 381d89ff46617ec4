"""What is said of lists whose entries hold several actions: pairs, and batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import schedir
from schedir import Schedule, Together, together
from schedir.checker import CHANNELS, AsSent, Batch, Move, Reorder, changed, clean_channels
from schedir.graph.compile import graph_of
from schedir.graph.paths import waits
from schedir.ir import Entry, backward, enforces, forward, recv_act, recv_grad, send_act, send_grad
from tests.joined import joined
from tests.literals import listed
from tests.oracle import happens
from tests.runtime.lists import megatron
from tests.sweeps import sweep
from tests.test_check import BASES, mutate, naive
from tests.test_fixes import about, errors
from tests.test_random import drawn, scattered
from tests.test_ties import some_ties


@given(st.integers(0, 1 << 32), st.sampled_from(CHANNELS), st.integers(0, 2), st.booleans())
def test_the_verdict_is_what_happens(seed: int, channel: str, faults: int, tied: bool) -> None:
    chance = random.Random(seed)
    built = scattered(schedir.insert_communication(drawn(chance)), chance)
    for _ in range(faults):
        built = mutate(built, chance)
    built = joined(built, chance, chance.choice([0.3, 0.7, 1]))
    ties = some_ties(chance, built.stages) if tied else []
    outcome = happens(built, channel, seed, ties)
    report = schedir.check(built, channel, ties=ties)
    assert report.ok == (outcome == "completes"), (outcome, ties, schedir.dumps(built))


@sweep("part", range(10), quick=[0])
def test_thousands_of_lists_block_where_check_says(part: int) -> None:
    """Their data is right where no channel is mis-paired, so whether they run is all that there is
    to say. Each is judged as it is, and with neighbours run together, under `rank` and another
    model."""
    seen: Counter[tuple[bool, bool]] = Counter()
    for seed in range(75 * part, 75 * (part + 1)):
        chance = random.Random(seed)
        complete = schedir.insert_communication(drawn(chance))
        for plain in (scattered(complete, chance) for _ in range(3)):
            if len(graph_of(plain).transfers.swapped):
                continue
            for built in (plain, joined(plain, chance, 0.4), joined(plain, chance, 1)):
                clean = clean_channels(built)
                assert clean == tuple(c for c in CHANNELS if any(enforces(x, c) for x in clean))
                for channel in {"rank", chance.choice(CHANNELS)}:
                    runs = happens(built, channel, seed) == "completes"
                    assert runs == (channel in clean), (channel, schedir.dumps(built))
                    seen[built.columns.together, runs] += 1
    assert len(seen) == 4
    assert min(seen.values()) > 20


@example(6254, "host", 2)  # receives of two batches change places
@example(18176, "host", 0)  # a warning's change
@given(st.integers(0, 1 << 32), st.sampled_from(CHANNELS), st.integers(0, 2))
def test_what_is_proposed_fixes_and_tears_nothing(seed: int, channel: str, faults: int) -> None:
    chance = random.Random(seed)
    if chance.random() < 0.5:
        built = chance.choice(BASES)
    else:
        built = scattered(schedir.insert_communication(drawn(chance)), chance)
    for _ in range(faults):
        built = mutate(built, chance)
    built = joined(built, chance, chance.choice([0.3, 0.7, 1]))
    for finding in schedir.check(built, channel).diagnostics:
        for place in finding.locations:
            if place.index is None or any("completes it" in note for note in finding.notes):
                continue
            entry = built.actions[place.rank][place.index]
            assert place.action in (entry.actions if isinstance(entry, Together) else (entry,))
            assert (place.within is not None) == isinstance(entry, Together)
        if finding.change is None:
            continue
        fixed = changed(built, finding.change)
        if isinstance(finding.change, Move | Reorder):
            assert [Counter(own) for own in fixed.actions] == [Counter(x) for x in built.actions]
        if isinstance(finding.change, AsSent):  # receives change places with those of batches, too
            assert [*map(Counter, fixed.flat)] == [*map(Counter, built.flat)]
            assert [*map(_sizes, fixed.actions)] == [*map(_sizes, built.actions)]
        if not finding.tried:
            assert finding.severity == "error"
        elif finding.severity == "error":
            assert errors(fixed, channel) <= errors(built, channel) - Counter([about(finding)])
        else:
            assert schedir.check(fixed, channel).ok


def _sizes(entries: Iterable[Entry]) -> list[int]:
    return [len(entry.actions) if isinstance(entry, Together) else 1 for entry in entries]


def apart(built: Schedule) -> Schedule:
    return Schedule(built.name, built.microbatches, built.placement, built.flat)


@sweep("many", [20, 4], quick=[4])
def test_the_pairs_of_compute_alone_are_judged_as_those_of_its_completion(many: int) -> None:
    """Of lists that are drawn, until so many can be completed, and so many can't."""
    seen: Counter[bool] = Counter()
    for seed in count():
        if min(seen[True], seen[False]) >= many:
            break
        chance = random.Random(seed)
        compute = joined(drawn(chance), chance, 1)
        if not compute.columns.together:
            continue
        report = schedir.check(compute)
        try:
            complete = schedir.insert_communication(compute)
        except schedir.UnsoundError:
            assert [d.code for d in report.errors] == ["S301"]
            seen[False] += 1
            continue
        assert report.schedule == complete
        assert report.ok == (happens(complete, "rank", seed) == "completes")
        seen[True] += 1


@sweep("ranks, microbatches", [(2, 4), (3, 4), (4, 4), (4, 8), (5, 3)], quick=[(2, 4), (5, 3)])
def test_megatrons_batches_run_where_their_parts_block(ranks: int, microbatches: int) -> None:
    batched = megatron(ranks, microbatches)
    assert "rank" in schedir.check(batched).clean_channels
    (finding,) = schedir.check(apart(batched)).errors
    assert finding.code == "S301"
    for channel in CHANNELS:
        for built in (batched, apart(batched)):
            runs = happens(built, channel) == "completes"
            assert runs == schedir.check(built, channel).ok
    plain = schedir.build("1f1b", ranks=ranks, microbatches=microbatches)
    assert schedir.simulate(batched).makespan == schedir.simulate(plain).makespan


def test_where_no_move_helps_batches_are_proposed() -> None:
    singly = apart(megatron(3, 4))
    (finding,) = schedir.check(singly).errors
    assert isinstance(finding.change, Batch)
    assert finding.help == (
        "none of the moves tried fixes it; post the sends and receives that block each other as "
        "batches, as schedir.batch_communication does"
    )
    assert schedir.check(changed(singly, finding.change)).ok


def test_a_pair_that_feeds_itself_through_another_rank_blocks() -> None:
    pair = listed(2, "0 1", "0F0 (0F1;0B0) 0B1", "1F0 1F1 1B0 1B1")
    (finding,) = schedir.check(pair).errors
    assert finding.trace == (
        ("rank 0 #1 0F1 of (0F1;0B0)", "runs with", "rank 0 #1 0B0 of (0F1;0B0)"),
        ("rank 0 #1 0B0 of (0F1;0B0)", "needs", "rank 1 #2 1B0"),
        ("rank 1 #2 1B0", "comes after", "rank 1 #1 1F1"),
        ("rank 1 #1 1F1", "needs", "rank 0 #1 0F1 of (0F1;0B0)   (cycle)"),
    )
    assert schedir.check(apart(pair)).ok


def test_a_cycle_through_a_batch_names_its_parts() -> None:
    """What needs one part of a batch waits for the other."""
    batched = "1RECV_ACT0 1F0 1B0 (1SEND_GRAD0;1RECV_ACT1) 1F1 1B1 1SEND_GRAD1"
    both = "0F0 0SEND_ACT0 0F1 (0SEND_ACT1;0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1"
    batch = listed(2, "0 1", both, batched)
    assert schedir.check(batch).clean_channels == CHANNELS[1:]
    (finding,) = schedir.check(batch, "host").errors
    assert str(finding.locations[0]) == "rank 0 #3 0SEND_ACT1 of (0SEND_ACT1;0RECV_GRAD0)"
    # Rank 0 asks for the gradient of microbatch 0 before it sends what comes with it there.
    needs = "0F0 0SEND_ACT0 0F1 0RECV_GRAD0 0B0 0SEND_ACT1 0RECV_GRAD1 0B1"
    assert schedir.check(listed(2, "0 1", needs, batched)).ok
    batched = "(1RECV_ACT0;1RECV_ACT1) 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1"
    later = "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0RECV_GRAD1 0B0 0B1"
    assert schedir.check(listed(2, "0 1", later, batched)).ok
    needed = "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0F1 0SEND_ACT1 0RECV_GRAD1 0B1"
    (finding,) = schedir.check(listed(2, "0 1", needed, batched)).errors
    assert ("rank 1 #0 1RECV_ACT0 of (1RECV_ACT0;1RECV_ACT1)", "runs with") in [
        row[:2] for row in finding.trace
    ]


def test_whoever_needs_a_batch_waits_for_its_sends_under_every_model() -> None:
    """Rank 0 goes on once its gradient has been received, which rank 1 lists after what it gets
    from rank 0 by way of rank 2: no buffers are there to take it, on gloo either."""
    lists = (
        "1RECV_ACT1 1F1 1SEND_ACT1 1RECV_GRAD1 1B1 (1SEND_GRAD1;1RECV_ACT0) 1F0 1SEND_ACT0 "
        "1RECV_GRAD0 1B0 1SEND_GRAD0",
        "0F1 0SEND_ACT1 0F0 0SEND_ACT0 3RECV_ACT1 3F1 3B1 3SEND_GRAD1 3RECV_ACT0 3F0 3B0 "
        "3SEND_GRAD0 0RECV_GRAD1 0B1 0RECV_GRAD0 0B0",
        "2RECV_ACT1 2F1 2SEND_ACT1 2RECV_GRAD1 2B1 2SEND_GRAD1 2RECV_ACT0 2F0 2SEND_ACT0 "
        "2RECV_GRAD0 2B0 2SEND_GRAD0",
    )
    batch = listed(2, "1 0 2 1", *lists)
    report = schedir.check(batch, "async")
    assert [d.code for d in report.errors] == ["S301"]
    assert report.clean_channels == ()
    assert {happens(batch, channel) for channel in CHANNELS} == {"blocks"}
    assert schedir.check(apart(batch), "async").ok


def test_no_lint_proposes_to_tear_a_batch() -> None:
    """Its receive comes after its send could, for it waits for the compute before the batch."""
    batch = listed(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1B0 (1SEND_GRAD0;1RECV_ACT1) 1F1 1B1 1SEND_GRAD1",
    )
    for channel in CHANNELS[1:]:
        assert [d.code for d in schedir.check(batch, channel).diagnostics] == ["S213"]


def wide(microbatches: int, *, crossed: bool = False) -> Schedule:
    every = range(microbatches)
    sends, grads = (together(*(end(0, m) for m in every)) for end in (send_act, recv_grad))
    first = [grads, sends] if crossed else [sends, grads]
    return Schedule(
        "wide",
        microbatches,
        (0, 1),
        [
            [*(forward(0, m) for m in every), *first, *(backward(0, m) for m in every)],
            [
                together(*(recv_act(1, m) for m in every)),
                *(forward(1, m) for m in every),
                *(backward(1, m) for m in every),
                together(*(send_grad(1, m) for m in every)),
            ],
        ],
    )


@pytest.mark.parametrize("channel", CHANNELS)
def test_large_batches_in_a_row_cost_edges_linear_in_their_sizes(channel: str) -> None:
    built = wide(1000)
    assert len(waits(built, channel).later) < 4 * len(built.columns)


def test_a_long_batch_is_named_in_short() -> None:
    report = schedir.check(wide(1000, crossed=True))
    (finding,) = report.errors
    text = str(finding.locations[0])
    assert text.startswith("rank 0 #1000 0RECV_GRAD0 of (0RECV_GRAD0;0RECV_GRAD1;")
    assert text.endswith(";… 998 more)")
    assert all(len(entry) < 100 for piece in finding.excerpts for entry in piece.entries)


def test_a_cycle_through_long_lists_is_shown_in_short() -> None:
    """Under `host` it goes through every part of three batches."""
    (finding,) = schedir.check(wide(1000, crossed=True), "host").errors
    assert len(finding.trace) < 40
    assert all(place.index is not None for place in finding.locations)


def test_naive_lists_and_batches_of_all_that_stands_together() -> None:
    """Every model but `host`, which knows no batches, gains by them or stays."""
    chance = random.Random(0)
    for base in BASES[:12]:
        plain = naive(base)
        batched = joined(plain, chance, 1)
        before, after = clean_channels(plain), clean_channels(batched)
        assert {"rank", "pair"} & set(before) <= set(after)
