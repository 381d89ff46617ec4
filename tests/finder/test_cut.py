"""The search of the cut: as good as the best of all cuts, and never worse than the balanced one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import schedir
from schedir import CostModel, ParseError, SchedirError
from schedir.finder import Found, find, stage_costs, terms
from schedir.training import balanced, partition
from tests.command_line import Run
from tests.sweeps import sweep

SMALL = CostModel(
    forward=(1, 4, 4, 4, 4, 6),
    backward=(2, 8, 8, 8, 8, 12),
    backward_input=(0, 4, 4, 4, 4, 6),
    backward_weight=(2, 4, 4, 4, 4, 6),
    activation_bytes=(1, 5, 5, 5, 5, 9),
    weight_bytes=(9, 3, 3, 3, 3, 9),
    boundary_bytes=(1, 2, 3, 4, 5),
    input_bytes=(1, 2, 3, 4, 5, 6),
)


def work_of(seed: int) -> tuple[tuple[int, int, int], CostModel, dict[str, Any]]:
    """Small work: ranks, microbatches and chunks; the costs of its layers; and limits."""
    draw = random.Random(seed)
    many, microbatches = draw.randint(4, 6), draw.randint(2, 3)

    def each(most: int, least: int = 1) -> tuple[int, ...]:
        return tuple(draw.randint(least, most) for _ in range(many))

    halves = each(4), each(4)
    layers = CostModel(
        forward=each(5),
        backward_input=halves[0],
        backward_weight=halves[1],
        backward=tuple(map(sum, zip(*halves, strict=True))),
        optim_step=each(2, 0),
        latency=draw.choice((0, 1)),
        boundary_bytes=each(3, 0)[1:],
        bandwidth=4,
        activation_bytes=each(5),
        input_bytes=each(2, 0),
        weight_bytes=each(4),
        gradient_bytes=each(2),
        early_gradient_bytes=each(1, 0),
    )
    limits: tuple[dict[str, Any], ...] = (
        {},
        {"memory_limit": draw.randint(25, 45)},
        {"max_activations": draw.randint(1, 3), "recompute": draw.random() < 0.5},
    )
    options = limits[seed % 3] | {"split": draw.random() < 0.7}
    options["objective"] = draw.choice(("makespan", "span"))
    return draw.choice(((2, microbatches, 1), (3, microbatches, 1), (2, 2, 2))), layers, options


@sweep("seed", range(24), quick=[3])
def test_the_best_of_all_cuts_is_found_and_none_is_below_the_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 1.0)  # of work
    (ranks, microbatches, chunks), layers, options = work_of(seed)
    shape = ranks, microbatches, chunks
    every: list[Found] = []
    for cut in itertools.combinations(range(1, layers.stages or 0), ranks * chunks - 1):
        try:
            every.append(find(*shape, costs=stage_costs(layers, cut), **options))
        except SchedirError:
            continue  # this cut does not fit the limit
    if not every:
        with pytest.raises(SchedirError, match="the least that works is"):
            find(*shape, layers=layers, cut=True, **options)
        return
    # The other cuts share one search's work.
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 5.0)
    found = find(*shape, layers=layers, cut=True, **options)
    assert found.value <= min(each.value for each in every)
    assert found.lower_bound <= min(each.lower_bound for each in every) + 1e-9
    assert found.boundaries is not None
    assert found.costs == stage_costs(layers, found.boundaries)
    assert schedir.simulate(found.schedule, found.costs) == found.timeline


@pytest.mark.parametrize(("ranks", "width", "memory_limit"), [(8, 4096, None), (6, 2048, 11e9)])
def test_it_is_better_than_the_cut_of_partition(
    ranks: int, width: int, memory_limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "DEFAULT_SECONDS", 0.2)  # of work
    layers = CostModel.of_transformer(
        layers=(0, *[1] * 2 * ranks, 0),
        hidden=width,
        heads=16,
        vocabulary=65_536,
        sequence=width,
        microbatch=1,
        flops=1e14,
        bandwidth=1e11,
    )
    each = [layers.by_stage(name, 2 * ranks + 2) for name in ("forward", "backward")]
    starts = [start for start, _ in balanced([*map(sum, zip(*each, strict=True))], ranks)][1:]
    alone = find(ranks, 8, costs=stage_costs(layers, starts), memory_limit=memory_limit)
    within, found, again = (
        find(ranks, 8, layers=layers, cut=cut, memory_limit=memory_limit)
        for cut in (False, True, True)
    )
    assert (within.schedule, within.boundaries) == (alone.schedule, tuple(starts))
    assert found.lower_bound <= found.value < alone.value
    assert (again.schedule, again.boundaries) == (found.schedule, found.boundaries)


def test_a_stage_has_the_sums_of_its_layers_and_one_copy_of_what_they_share() -> None:
    costs: Any = stage_costs(SMALL, [2, 5], ties=[(0, 5), (1, 2)])
    assert costs.forward == (5, 12, 6)
    assert costs.activation_bytes == (6, 15, 9)
    assert costs.weight_bytes == (12, 9, 9)  # the head's copy is on another stage
    assert costs.input_bytes == (1, 3, 6)
    assert costs.boundary_bytes == (2, 5)
    assert costs.recompute is None
    one: Any = stage_costs(SMALL, [], ties=[(0, 5)])
    assert one.weight_bytes == (9 + 4 * 3,)
    assert one.boundary_bytes == 0
    assert stage_costs(CostModel(forward=(1, 1, 1)), [1]).backward == (2, 4)  # 2 for each layer


def test_what_can_not_be_cut_is_said() -> None:
    every: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"ranks": 7, "layers": SMALL}, SchedirError, "7 stages can't be made of 6 layers"),
        ({"layers": SMALL, "costs": SMALL}, ValueError, "leave out costs="),
        ({"cut": True}, ValueError, "needs layers=, the costs of each layer"),
        ({"layers": CostModel()}, SchedirError, "give at least the forward one number for each"),
        ({"layers": SMALL, "memory_limit": 1, "cut": True}, SchedirError, "the least that works"),
    ]
    for options, error, says in every:
        with pytest.raises(error, match=says):
            find(**{"ranks": 3, "microbatches": 4, **options})
    with pytest.raises(SchedirError, match=r"rising, from 1 to 5 at most, not \[2, 2\]"):
        stage_costs(SMALL, [2, 2])
    with pytest.raises(SchedirError, match="ties must name layers from 0 to 5"):
        stage_costs(SMALL, [2], ties=[(0, 9)])
    with pytest.raises(SchedirError, match="backward has 2 numbers, but there are 3 layers"):
        stage_costs(CostModel(forward=(1, 1, 1), backward=(1, 1)), [1])


def test_the_command_writes_the_boundaries_and_the_costs_of_the_stages(
    run: Run, tmp_path: Path
) -> None:
    layers, stages = str(tmp_path / "layers.json"), str(tmp_path / "stages.json")
    SMALL.save(layers)
    shape = ["search", "--ranks", "3", "--microbatches", "4", "--seconds", "1"]
    code, out, err = run(*shape, "--layers", layers, "--cut", "--stage-costs", stages)
    assert (code, "\nboundaries 3 5\n" in out) == (0, True)
    assert "boundaries 3 5, " in err
    schedule, costs = schedir.loads(out), CostModel.load(stages)
    assert costs == stage_costs(SMALL, [3, 5])
    assert f"makespan {schedir.simulate(schedule, costs).makespan:g}" in err
    again = schedir.search(3, 4, layers=SMALL)
    assert (again, again.boundaries) == (schedule, (3, 5))
    assert again.content_hash == schedule.content_hash
    model = partition([nn.Identity() for _ in range(6)], again, boundaries=again.boundaries)
    assert model.cut == "0 to 2 | 3 to 4 | 5 to 5"
    with pytest.raises(ParseError, match=r":5:1: boundaries must be 2 layers, rising"):
        schedir.loads(out.replace("boundaries 3 5", "boundaries 3"), "f")
    for options, says in (
        (["--cut"], "--layers FILE"),
        (["--layers", layers, "--costs", stages], "leave out --costs"),
        (["--layers", layers, "--cut", "--exact"], "leave out --cut"),
    ):
        assert says in run.refuses(*shape, *options)
