"""Which channels share a communicator, and the rounds in which groups are made."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

import schedir
from schedir.graph.compile import graph_of
from schedir.runtime.processes.groups import in_turn, rounds
from schedir.runtime.transports import Channel, batched, communicators, ranks_of
from tests.runtime.lists import megatron


def assert_proper(groups: Sequence[Sequence[int]]) -> None:
    """Every group has its round, and no process two groups in one."""
    found = rounds(groups)
    assert {*found} == {*range(max(found) + 1)}
    taken = [(turn, member) for turn, own in zip(found, groups, strict=True) for member in own]
    assert len(taken) == len(set(taken))


def most(groups: Sequence[Sequence[int]]) -> int:
    """The most groups that a process is in."""
    return max(Counter(member for members in groups for member in members).values())


def ring(ranks: int) -> set[Channel]:
    there = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    return there | {(target, source) for source, target in there}


def folded(ranks: int) -> set[Channel]:
    """Down the ranks and up again, as in a V."""
    return ring(ranks) - {(0, ranks - 1), (ranks - 1, 0)}


Shape: TypeAlias = Callable[[int], set[Channel]]


def of(name: str) -> Shape:
    def channels(ranks: int) -> set[Channel]:
        transfers = graph_of(schedir.build(name, ranks=ranks, microbatches=2)).transfers
        return {*zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)}

    return channels


@pytest.mark.parametrize("ranks", [64, 512])
@pytest.mark.parametrize("shape", [ring, folded, of("1f1b"), of("interleaved-1f1b")])
def test_rounds_do_not_grow_with_the_ranks(shape: Shape, ranks: int) -> None:
    groups = list(map(ranks_of, communicators(shape(ranks), ())))
    assert_proper(groups)
    assert most(groups) == 4
    assert max(rounds(groups)) < 5


@pytest.mark.parametrize("ranks", [3, 65, 511])
def test_a_ring_of_odd_length_takes_a_few_more(ranks: int) -> None:
    groups = list(map(ranks_of, communicators(ring(ranks), ())))
    assert_proper(groups)
    assert max(rounds(groups)) == 5


def test_rounds_of_any_groups() -> None:
    draw = random.Random(0)
    for _ in range(300):
        ranks = draw.randint(2, 12)
        sizes = [draw.randint(2, min(ranks, 4)) for _ in range(draw.randint(1, 30))]
        groups = [tuple(draw.sample(range(ranks), size)) for size in sizes]
        assert_proper(groups)
        pairs = [group for group in groups if len(group) == 2]
        if pairs:
            assert max(rounds(pairs)) < 2 * most(pairs) - 1


def test_each_process_makes_its_own_in_that_order() -> None:
    groups = [(0, 1), (0, 2), (1, 2), (2, 3)]
    assert rounds(groups) == [0, 1, 2, 0]
    assert [[*in_turn(groups, own)] for own in range(4)] == [[0, 1], [0, 2], [3, 1, 2], [3]]


def test_a_channel_that_is_in_no_batch_has_its_own() -> None:
    found = communicators([(2, 1), (0, 1), (1, 2), (1, 0)], ())
    assert found == [((0, 1),), ((1, 0),), ((1, 2),), ((2, 1),)]


def test_channels_that_go_together_share_one_over_all_their_ranks() -> None:
    channels = {(0, 1), (1, 0), (1, 2), (2, 1), (3, 2), (2, 3)}
    found = communicators(channels, [{(0, 1), (1, 0)}, {(1, 0), (1, 2)}])
    assert found == [((0, 1), (1, 0), (1, 2)), ((2, 1),), ((2, 3),), ((3, 2),)]
    assert ranks_of(found[0]) == (0, 1, 2)
    groups = list(map(ranks_of, found))
    assert_proper(groups)
    assert most(groups) == max(rounds(groups)) + 1 == 4


def test_the_order_of_what_is_given_makes_no_difference() -> None:
    draw = random.Random(1)
    for _ in range(100):
        ranks = draw.randint(2, 8)
        channels = [(s, t) for s in range(ranks) for t in range(ranks) if s != t]
        batches = [draw.sample(channels, draw.randint(1, 2)) for _ in range(draw.randint(0, 4))]
        expected = communicators(channels, batches)
        assert sorted(c for shared in expected for c in shared) == sorted(channels)
        for batch in batches:
            assert any(set(batch) <= set(shared) for shared in expected)
        draw.shuffle(channels)
        shuffled = [draw.sample(batch, len(batch)) for batch in draw.sample(batches, len(batches))]
        assert communicators(channels, shuffled) == expected


def test_channels_of_a_batch_are_found_in_a_schedule() -> None:
    assert batched(megatron(3, 4)) == {
        *(frozenset({channel}) for channel in ((0, 1), (1, 2), (2, 1), (1, 0))),
        frozenset({(0, 1), (1, 0)}),
        frozenset({(1, 2), (2, 1)}),
    }
    found = communicators(ring(3), batched(megatron(3, 4)))
    assert found == [((0, 1), (1, 0)), ((0, 2),), ((2, 0),), ((1, 2), (2, 1))]
    assert not batched(schedir.build("1f1b", ranks=3, microbatches=4))
