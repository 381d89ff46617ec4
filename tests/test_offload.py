"""OFFLOAD and RELOAD: what they mean, and the pass that lists them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import schedir
from schedir import Schedule
from schedir.graph.alive import peak_activations
from schedir.graph.compile import graph_of
from schedir.graph.paths import waits
from schedir.passes import offload
from tests.joined import drawn_joined
from tests.literals import listed
from tests.oracle import happens
from tests.sweeps import sweep
from tests.test_graph import shuffled
from tests.test_random import drawn


def test_the_pass_lists_both_copies() -> None:
    plain = listed(3, "0", "0F0 0F1 0F2 0B0 0B1 0B2 0OPTIM_STEP")
    assert offload(plain, [0]) == listed(
        3,
        "0",
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0RELOAD1 0B0 0RELOAD2 0B1 0B2 "
        "0OPTIM_STEP",
    )
    # Two entries ahead of its backward each would be back at once.
    assert offload(plain, [0], ahead=2) == plain


def test_the_pass_leaves_what_it_has_listed() -> None:
    schedule = schedir.build("1f1b", ranks=4, microbatches=8)
    once = offload(schedule, range(4))
    assert offload(once, range(4)) == once


def test_random_lists_keep_their_meaning() -> None:
    chance = random.Random(1)
    copied = 0
    for _ in range(150):
        schedule = schedir.insert_communication(drawn(chance))
        away = offload(schedule, range(schedule.stages), ahead=chance.randint(1, 3))
        added = len(away.columns) - len(schedule.columns)
        copied += added
        kept = [token for text in schedir.dumps(away).splitlines() for token in text.split()]
        plain = [token for token in kept if "LOAD" not in token]
        assert plain == schedir.dumps(schedule).split()
        assert sum("LOAD" in token for token in kept) == added
        for channel in schedir.CHANNELS:
            before, after = (waits(each, channel).stuck.any() for each in (schedule, away))
            assert before == after
        less, more = (peak_activations(graph_of(each)) for each in (away, schedule))
        assert all(lower[0] <= upper[0] for lower, upper in zip(less, more, strict=True))
    assert copied > 200


def test_offloading_lowers_the_peak() -> None:
    schedule = schedir.build("1f1b", ranks=4, microbatches=8)
    peaks = [peak for peak, _ in peak_activations(graph_of(offload(schedule, [0, 1])))]
    assert peaks == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": [4]}, "1f1b has no stage 4 to offload, only 0..3"),
        ({"stages": [0], "ahead": 0}, "ahead must be a number of entries of at least 1, not 0"),
        ({"stages": 0}, "stages must be a collection of stage numbers, not 0"),
        ({"stages": [0], "schedule": "1f1b"}, "schedule must be a Schedule"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        offload(**{"schedule": schedir.build("1f1b"), **arguments})


def test_lines_of_python() -> None:
    schedule: Schedule = offload(schedir.build("1f1b"), [0])
    source = {str(a): schedule.source_of(0, i) for i, a in enumerate(schedule.actions[0])}
    assert source["0OFFLOAD0"] == source["0F0"]
    assert source["0RELOAD0"] == source["0B0"]


@sweep("seed", range(6), quick=[0])
def test_the_verdict_is_what_happens(seed: int) -> None:
    """Of random lists with copies, right ones and shuffled ones, under each channel model."""
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(40):
        schedule = offload(
            joined := drawn_joined(chance), range(joined.stages), ahead=chance.choice([1, 2])
        )
        if "OFFLOAD" not in schedir.dumps(schedule):
            continue
        if chance.random() < 0.7:
            schedule = shuffled(schedule, chance)
        for channel in schedir.CHANNELS:
            happened = happens(schedule, channel)
            outcomes[happened] += 1
            right = schedir.check(schedule, channel=channel).ok
            assert right is (happened == "completes"), f"{channel}\n{schedir.dumps(schedule)}"
    assert min(outcomes[each] for each in ("completes", "wrong", "blocks")) > 5
