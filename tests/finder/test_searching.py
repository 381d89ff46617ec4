"""Search: what it finds is proved, within its limits, and as good as what is known."""

from __future__ import annotations

import itertools
import math
import re
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

import schedir
from schedir import CostModel, Kind, SchedirError
from schedir.finder import find, terms
from schedir.finder.terms import Terms
from schedir.library import built_in
from schedir.render import found_text
from tests.finder.test_orders import costs_of
from tests.sweeps import sweep

EVEN = CostModel(forward=1, backward=1)
COSTS: Any = {
    **{"forward": 3, "backward": 6, "backward_input": 3, "backward_weight": 3, "latency": 0.1},
    **{"boundary_bytes": 2, "bandwidth": 4, "input_bytes": 2, "activation_bytes": 20},
    **{"deferred_bytes": 15, "weight_bytes": 10, "gradient_bytes": 10, "optimizer_bytes": 30},
}
BYTES = CostModel(**COSTS)


@pytest.mark.parametrize(
    ("shape", "arguments", "known"),
    [
        # Solved by hand: the first as 21.
        ((3, 4, 2), {"placement": "wrapped", "max_activations": 6, "split": False}, 20),
        ((4, 8, 2), {"placement": "v", "max_activations": 8, "split": False}, 38),
    ],
)
def test_two_cases_that_were_solved_by_hand(
    shape: tuple[int, int, int], arguments: dict[str, Any], known: int
) -> None:
    found = find(*shape, costs=EVEN, **arguments)
    assert found.value == found.timeline.makespan == known
    most = max(rank.peak_activations for rank in found.timeline.ranks)
    assert most <= arguments["max_activations"]
    assert schedir.check(found.schedule).ok
    assert found.split == 0


@pytest.mark.parametrize(
    ("microbatches", "chunks", "limit", "makespan"), [(12, 1, 4, 39), (8, 2, 8, 51)]
)
def test_zero_bubble(microbatches: int, chunks: int, limit: int, makespan: int) -> None:
    found = find(4, microbatches, chunks, max_activations=limit)
    assert (found.value, found.distance) == (makespan, 0)


WAVE_56 = Path(__file__).parent / "data" / "wave-4x8-limit-5.sched"
"""Found by the exact solver; the search finds 57."""


def test_an_odd_limit_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 2.0)  # of work
    given: dict[str, Any] = {"placement": "wave", "max_activations": 5}
    known = schedir.simulate(schedir.loads(WAVE_56.read_text()))
    assert max(rank.peak_activations for rank in known.ranks) == 5
    found = find(4, 8, 2, **given)
    assert known.makespan == found.lower_bound == 56
    assert found.value <= 57


def test_updates_anywhere_come_where_a_rank_would_wait() -> None:
    costs = CostModel(forward=2, backward=4, latency=1, optim_step=4)
    terms: dict[str, Any] = {"costs": costs, "placement": "wrapped", "split": False}
    assert find(2, 2, 2, **terms, seconds=0.2).value == 44
    found = find(2, 2, 2, **terms, steps="anywhere", seconds=0.2)
    assert found.value == schedir.simulate(found.schedule, costs).makespan == 42
    assert schedir.check(found.schedule).ok


@sweep("wanted", [{}, {"placement": "wave"}], quick=[])
def test_a_limit_of_chunks_is_used_on_each_placement(wanted: dict[str, Any]) -> None:
    """Of 5 × 10 × 2 a list of 795,759 is known; the search once ended at 851,572."""
    costs = CostModel(
        forward=9256, backward=9043 + 4668, backward_input=9043, backward_weight=4668, latency=601
    )
    found = find(5, 10, 2, costs=costs, max_activations=5, objective="span", **wanted)
    assert found.value < 795_759


def drawn(seed: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Work of any costs, limits and objective, and the arguments of a search of it."""
    draw = Random(seed)
    ranks, microbatches, chunks = draw.randint(2, 5), draw.randint(2, 9), draw.choice((1, 2, 2))
    microbatches += -microbatches % ranks

    given: dict[str, Any] = {
        "costs": costs_of(draw, ranks * chunks),
        "split": draw.random() < 0.8,
        "objective": draw.choice(("makespan", "span")),
        "steps": draw.choice(("last", "last", "anywhere")),
        "channel": draw.choice((None, None, "rank", "host")),
    }
    limit = draw.choice(("max_activations", "memory_limit", None))
    if limit == "max_activations":
        given[limit] = draw.randint(chunks, 2 * ranks * chunks)
    elif limit:
        given[limit] = draw.randint(40, 150)
    return (ranks, microbatches, chunks), given


def value(schedule: schedir.Schedule, given: dict[str, Any]) -> float:
    line = schedir.simulate(schedule, given["costs"], channel=given["channel"])
    over = given.get("memory_limit", math.inf) < max(rank.peak_bytes or 0 for rank in line.ranks)
    most = max(rank.peak_activations for rank in line.ranks)
    if over or given.get("max_activations", math.inf) < most:
        return math.inf
    spans = (rank.span for rank in line.ranks)
    return line.makespan if given["objective"] == "makespan" else max(spans)


@sweep("seed", range(120), quick=range(2))
def test_it_is_never_worse_than_what_is_known(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than a built-in schedule that fits, itself on one placement, and itself with less work."""
    shape, given = drawn(seed)
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 0.02)  # of work
    try:
        little = find(*shape, **given)
    except SchedirError as error:
        assert "the least that works is" in str(error)  # noqa: PT017
        return
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 0.1)
    found = find(*shape, **given)
    assert value(found.schedule, given) == found.value <= little.value
    assert found.value >= found.lower_bound
    if shape[2] > 1:
        pair = []
        for placement in ("wrapped", "wave"):
            with suppress(SchedirError):
                pair.append(find(*shape, **given, placement=placement).value)
        assert found.value == min(pair)
    ranks, microbatches, chunks = shape
    asked = Terms(ranks=ranks, microbatches=microbatches, chunks=chunks, **given)
    placements = [asked.task(named).placement for named in asked.placements]
    for generator in built_in():
        with suppress(SchedirError):
            made = schedir.build(
                generator.name,
                ranks=ranks,
                microbatches=microbatches,
                chunks=chunks if generator.chunks > 1 else None,
                costs=given["costs"],
            )
            kinds = {action.kind for actions in made.flat for action in actions}
            alone = all(len(held) == 1 for held in made.placement)
            allowed = given["split"] or Kind.BACKWARD_INPUT not in kinds
            if (
                allowed
                and alone
                and tuple(held[0] for held in made.placement) in placements
                and not made.is_asynchronous
                and not made.columns.joined.any()  # the parts of a pair send without waiting
            ):
                assert found.value <= value(made, given) * (1 + 1e-12), generator.name


def test_span_is_what_is_asked_for() -> None:
    found = find(4, 8, max_activations=8, objective="span")
    assert found.value == max(rank.span for rank in found.timeline.ranks) == 24


@pytest.mark.parametrize(
    ("chunks", "recompute", "least"), [(1, False, 1), (2, False, 2), (2, True, 1)]
)
def test_the_least_limit_in_activations(chunks: int, recompute: bool, least: int) -> None:
    with pytest.raises(SchedirError, match=f"the least that works is {least}$"):
        schedir.search(3, 4, chunks, max_activations=least - 1, recompute=recompute)
    found = find(3, 4, chunks, max_activations=least, recompute=recompute, seconds=0.1)
    assert max(rank.peak_activations for rank in found.timeline.ranks) <= least


UNEVEN = CostModel(forward=3, backward=5, backward_input=3, backward_weight=3, latency=0.7)


@sweep(
    "arguments",
    [{"costs": UNEVEN, "max_activations": 5}, {"costs": BYTES, "memory_limit": 150}],
    quick=lambda arguments: "memory_limit" in arguments,
)
def test_the_same_seed_finds_the_same_whatever_came_before_and_however_slow_the_machine(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 0.2)  # of work
    first = find(3, 6, 2, **arguments, seed=3)
    find(3, 6, 2, **arguments, seed=2)
    monkeypatch.setattr(time, "process_time", itertools.count(step=1e6).__next__)
    again = find(3, 6, 2, **arguments, seed=3)
    assert again.schedule == first.schedule
    assert again.candidates == first.candidates > 100
    assert not first.cut


def test_the_clock_ends_a_search_where_somebody_has_said_for_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = find(3, 6, 2, costs=UNEVEN, seconds=0.1, seed=3)
    monkeypatch.setattr(time, "process_time", itertools.count(step=0.01).__next__)
    found = find(3, 6, 2, costs=UNEVEN, seconds=0.1, seed=3)
    assert found.candidates < ended.candidates
    assert found.cut
    assert "cut short: the same seed may find another" in found_text(found)


def test_whoever_waits_may_end_it() -> None:
    found = find(3, 6, 2, costs=UNEVEN, stop=lambda: True)
    assert found.cut
    assert "cut short" in found_text(found)


def test_nothing_is_split_where_that_is_not_allowed() -> None:
    assert find(3, 6, 2, split=False, seconds=0.2, objective="span").split == 0


@sweep("chunks", [1, 2], quick=[2])
def test_bytes_are_all_that_simulate_counts(chunks: int) -> None:
    with pytest.raises(SchedirError, match="the least that works is") as refused:
        schedir.search(4, 6, chunks, costs=BYTES, memory_limit=10)
    least = int(str(refused.value).split()[-1])
    with pytest.raises(SchedirError, match=f"the least that works is {least}$"):
        schedir.search(4, 6, chunks, costs=BYTES, memory_limit=least - 1)
    values = []
    for limit in (least, least + 25, least + 100):
        found = find(4, 6, chunks, costs=BYTES, memory_limit=limit, seconds=0.3)
        assert max(rank.peak_bytes or 0 for rank in found.timeline.ranks) <= limit
        assert found.value >= found.lower_bound
        values.append(found.value)
    assert values == sorted(values, reverse=True)


def test_forwards_are_run_again_where_memory_is_short_alone() -> None:
    costs = CostModel(input_bytes=1, activation_bytes=10)
    tight, wide = (find(4, 8, costs=costs, memory_limit=limit, seconds=0.5) for limit in (13, 99))
    assert tight.recomputed > 0
    assert wide.recomputed == 0
    never = find(4, 8, costs=costs, memory_limit=13, seconds=0.5, recompute=False)
    assert tight.value < never.value


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"seconds": math.inf}, ValueError, "seconds must be a number >= 0, not inf"),
        ({"seconds": math.nan}, ValueError, "seconds must be a number >= 0, not nan"),
        ({"seconds": "1"}, TypeError, "seconds must be a number, not '1'"),
        ({"memory_limit": "9GiB"}, TypeError, "memory_limit must be a number or None, not '9GiB'"),
        ({"split": "no"}, TypeError, "split must be bool, not 'no'"),
        ({"recompute": 1}, TypeError, "recompute must be bool or None, not 1"),
        ({"costs": {}}, TypeError, "costs must be CostModel, not {}"),
        ({"objective": None}, ValueError, "objective must be makespan or span, not None"),
        ({"held_until": None}, ValueError, "held_until must be W or I, not None"),
        ({"placement": "spiral"}, ValueError, "placement must be wrapped or wave or v"),
    ],
)
def test_a_bad_argument_is_named(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        schedir.search(2, 2, **options)


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((2, 4, 1), {}),
        ((3, 6, 2), {"costs": CostModel(forward=2, latency=0.3)}),
        ((4, 8, 1), {"objective": "span", "max_activations": 5}),
    ],
)
def test_every_stage_adds_up_its_gradients_in_the_loss_stages_order(
    shape: tuple[int, int, int], arguments: dict[str, Any]
) -> None:
    found = schedir.search(*shape, **arguments, seconds=0.3)

    def order(stage: int, *kinds: Kind) -> list[int | None]:
        (rank,) = found.placement[stage]
        own = [action for action in found.flat[rank] if action.stage == stage]
        return [action.microbatch for action in own if action.kind in kinds]

    loss = order(found.stages - 1, Kind.BACKWARD, Kind.BACKWARD_INPUT)
    for stage in range(found.stages):
        assert order(stage, Kind.BACKWARD, Kind.BACKWARD_WEIGHT) == loss
