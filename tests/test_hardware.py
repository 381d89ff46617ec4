"""Whatever a device makes wait for what: a list that is clean under `rank` comes through."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

import schedir
from schedir import Schedule
from schedir.ir import flat, ties_of
from schedir.passes import forward_only
from tests.built_in import NAMES, SYNCHRONOUS, variants
from tests.hardware import HARSHEST, KINDEST, Adversary, comes_through
from tests.joined import joined
from tests.literals import CROSSING, listed
from tests.sweeps import sweep
from tests.test_random import drawn, scattered
from tests.test_ties import updating

CROWDED = Adversary(queues=1, lazy=False)
"""All streams share a queue: the device itself waits for nothing, and yet everything does."""


def adversaries(seed: int) -> Iterator[Adversary]:
    for queues in (1, 2, 8):
        yield Adversary(queues, seed=seed)
        yield Adversary(queues, lazy=False, frees=0.2, seed=seed)
    yield HARSHEST


def shapes(name: str) -> Iterator[Schedule]:
    for ranks in (2, 3, 4):
        for microbatches in (1, 3, 2 * ranks):
            for parameters in variants(name):
                yield schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)


@pytest.mark.parametrize("name", NAMES)
def test_built_in_schedules_come_through_as_they_are_posted(name: str) -> None:
    for schedule in shapes(name):
        ties = ((0, schedule.stages - 1),) if name in SYNCHRONOUS else ()
        for entries, room in product((schedule, forward_only(schedule)), (None, 10**6)):
            posted = schedir.advance_receives(entries, "rank", room, ties=ties)
            for adversary in adversaries(schedule.ranks):
                assert comes_through(posted, adversary, ties), (schedule.name, room, adversary)


@pytest.mark.parametrize("channel", ["edge", "async"])
@pytest.mark.parametrize("name", NAMES)
def test_what_gloo_is_given_hangs_on_a_device(name: str, channel: str) -> None:
    """Receives ahead of other communication are kernels that run: to load one waits for them."""
    schedule = schedir.build(name, ranks=4, microbatches=8)
    posted = schedir.advance_receives(schedule, channel, 10**6)
    assert comes_through(posted, KINDEST)  # all that nobody promises
    assert comes_through(posted, Adversary(queues=8, lazy=False))
    assert not comes_through(posted, Adversary(queues=8))
    assert not comes_through(posted, Adversary(queues=1 << 10, lazy=False, frees=0.2))
    assert not comes_through(posted, CROWDED)


def test_what_blocks_is_what_the_list_shows() -> None:
    assert schedir.check(CROSSING, "rank").clean_channels == ("edge", "direction", "async")
    assert comes_through(CROSSING, KINDEST)
    assert not comes_through(CROSSING, CROWDED)
    never = listed(1, "0 1", "0F0 0RECV_GRAD0 0B0 0SEND_ACT0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0")
    assert not comes_through(never, KINDEST)


@sweep("seeds", [range(150, 300), range(2000)], quick=[range(150, 300)])
def test_the_verdict_on_random_schedules(seeds: range) -> None:
    """Clean under `rank`, if and only if the harshest device comes through, and then each one does;
    clean under `edge`, if and only if the kindest one does."""
    seen: Counter[tuple[str, ...]] = Counter()
    mended = 0
    for seed in seeds:
        chance = random.Random(seed)
        complete = scattered(schedir.insert_communication(drawn(chance)), chance)
        if chance.random() < 0.5:
            complete = joined(complete, chance, 0.6)
        report = schedir.check(complete, "async")
        if {finding.code for finding in report.errors} - {"S301"}:
            continue  # mis-paired: what comes through then is wrong
        clean = report.clean_channels
        seen[clean] += 1
        for posted in {complete, schedir.advance_receives(complete, "rank", chance.randrange(4))}:
            some = Adversary(chance.choice([1, 2, 8]), chance.random() < 0.5, 0.2, seed)
            assert comes_through(posted, HARSHEST) == ("rank" in clean), schedir.dumps(posted)
            assert comes_through(posted, KINDEST) == ("edge" in clean), schedir.dumps(posted)
            assert comes_through(posted, some) or "rank" not in clean, (some, schedir.dumps(posted))
        helped = schedir.batch_communication(complete)
        if helped != complete:
            mended += 1
            assert comes_through(helped, HARSHEST), schedir.dumps(helped)
    assert seen[schedir.CHANNELS] > 0.6 * len(seeds)
    assert mended > 1
    for clean in ((), ("edge", "direction", "async"), schedir.CHANNELS[1:]):
        assert seen[clean]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tied_steps_are_met_in_the_order_of_all_communication(ranks: int) -> None:
    """A receive that is posted before the sum of tied gradients must not need what comes after."""
    ties = ((0, ranks - 1),)
    shape = {"ranks": ranks, "microbatches": 5, "vertical_sync": True}
    schedule = schedir.build("pipedream", **shape)
    ahead = schedir.advance_receives(schedule, "rank", 10**6)
    assert not comes_through(ahead, Adversary(queues=2), ties)
    assert schedir.check(ahead, "rank", ties=ties).clean_channels == schedir.CHANNELS[2:]
    posted = schedir.advance_receives(schedule, "rank", 10**6, ties=ties)
    assert posted not in (schedule, ahead)
    assert "rank" in schedir.check(posted, "rank", ties=ties).clean_channels
    for adversary in adversaries(ranks):
        assert comes_through(posted, adversary, ties)


@sweep("seeds", [range(60), range(500)], quick=[range(60)])
def test_the_verdict_on_random_ties(seeds: range) -> None:
    seen: Counter[bool] = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        compute, groups = updating(chance)
        complete = scattered(schedir.insert_communication(compute), chance)
        report = schedir.check(complete, "rank", ties=groups)
        if {finding.code for finding in report.errors} - {"S301"}:
            continue
        ties, clean = ties_of(complete, groups), "rank" in report.clean_channels
        seen[clean] += 1
        room = chance.randrange(4)
        for posted in {complete, schedir.advance_receives(complete, "rank", room, ties=groups)}:
            again = schedir.check(posted, "rank", ties=groups).clean_channels
            assert ("rank" in again) == clean, schedir.dumps(posted)
            for adversary in (HARSHEST, Adversary(chance.choice([1, 2]), seed=seed)):
                assert comes_through(posted, adversary, ties) or not clean, schedir.dumps(posted)
    assert min(seen.values()) > len(seeds) / 10


def test_a_batch_is_one_kernel() -> None:
    """As Megatron and most hand-written code have it: one by one its parts block."""
    first = "0F0 0SEND_ACT0 0F1 (0SEND_ACT1;0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1"
    second = "1RECV_ACT0 1F0 1B0 (1SEND_GRAD0;1RECV_ACT1) 1F1 1B1 1SEND_GRAD1"
    send_first = listed(2, "0 1", first, second)
    assert comes_through(send_first, HARSHEST)
    assert all(comes_through(send_first, adversary) for adversary in adversaries(0))
    assert tuple(map(tuple, map(flat, send_first.actions))) == CROSSING.flat
    assert not comes_through(CROSSING, HARSHEST)


def test_a_pair_starts_once_the_inputs_of_both_parts_are_there() -> None:
    first = "0F0 0SEND_ACT0 0RECV_GRAD0 {} 0RECV_GRAD1 0B1"
    in_turn = "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1"
    in_groups = "1RECV_ACT0 1F0 1RECV_ACT1 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1"
    pair, apart = first.format("(0F1;0B0) 0SEND_ACT1"), first.format("0F1 0SEND_ACT1 0B0")
    assert comes_through(listed(2, "0 1", pair, in_turn), HARSHEST)
    # 0B0 comes after 1F1, which needs 0F1.
    assert not comes_through(listed(2, "0 1", pair, in_groups), KINDEST)
    assert comes_through(listed(2, "0 1", apart, in_groups), KINDEST)
