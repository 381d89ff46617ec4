"""The optimal cut against brute force, and layouts against Megatron's own expansion."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from schedir import ExecutionError
from schedir.training import balanced, deferred, partition
from schedir.training.cutting.cuts import spans_of, written_out
from schedir.training.cutting.stages import Span


def by_brute_force(costs: Sequence[float], stages: int) -> tuple[Span, ...]:
    """The best of all cuts, by the same three measures."""

    def rank(starts: Sequence[int]) -> tuple[object, ...]:
        sums = [
            sum(map(Fraction, costs[slice(*span)]), Fraction())
            for span in spans_of(starts, len(costs))
        ]
        return max(sums), sum(x * x for x in sums), [-start for start in starts]

    best = min(itertools.combinations(range(1, len(costs)), stages - 1), key=rank)
    return spans_of(best, len(costs))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any), st.integers(1, 5))
def test_the_cut_is_that_of_brute_force(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    assert balanced(costs, stages) == by_brute_force(costs, stages)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=9).filter(any), st.integers(2, 5))
def test_the_most_costly_stage_costs_the_least_for_any_numbers(
    costs: list[float], stages: int
) -> None:
    def worst(spans: Sequence[Span]) -> float:
        return max(math.fsum(costs[slice(*span)]) for span in spans)

    found, best = balanced(costs, stages), by_brute_force(costs, stages)
    assert worst(found) == pytest.approx(worst(best), rel=1e-12)


@pytest.mark.parametrize(
    ("costs", "stages", "starts"),
    [
        ([1, 1, 1, 1, 1], 2, [3]),
        ([0, 0, 0, 0], 2, [2]),
        ([9, 1, 1, 1, 1, 1, 4], 2, [1]),
        ([1, 0, 0, 1, 0], 2, [3]),  # what costs nothing stays with the layer before
        ([5, 1, 1, 1, 1, 1, 1, 3], 3, [1, 6]),  # 5, 5, 4
    ],
)
def test_known_cuts(costs: list[float], stages: int, starts: list[int]) -> None:
    assert balanced(costs, stages) == spans_of(starts, len(costs))


def test_hundreds_of_layers_are_cut() -> None:
    costs = [1 + number % 7 for number in range(700)]
    spans = balanced(costs, 64)
    sums = [sum(costs[slice(*span)]) for span in spans]
    assert len(spans) == 64
    assert sum(sums) == sum(costs)
    assert max(sums) - min(sums) < 14


def as_megatron_does(layout: str) -> str:
    """`parse_str_to_list` of Megatron-LM's PipelineParallelLayerLayout, without its last step."""
    layout = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda m: m.group(1) * int(m.group(2)), layout)
    return layout


LETTERS = st.sampled_from(["t", "t*2", "tt", "m", "E", "t*3,", "|", "t|"])
GROUPS = st.builds("({})*{}".format, st.lists(LETTERS, min_size=1).map("".join), st.integers(1, 3))


@example("Et*3|(t*2|)*6,tL")
@example("Ettt|(tt|)*29,m|L")
@example("E,t|t*10|t,L")
@given(st.lists(LETTERS | GROUPS).map("".join))
def test_layouts_are_written_out_as_by_megatron(layout: str) -> None:
    assert written_out(layout) == as_megatron_does(layout)


@given(st.text("EtmL|,()*12 x"))
def test_any_text_is_a_layout_or_refused(text: str) -> None:
    try:
        written = written_out(text)
    except ExecutionError as error:
        written = ""
        assert "position" in str(error)  # noqa: PT017
    assert set(written) <= set("EtmL|")


class Block(nn.Linear):
    pass


def model(blocks: int) -> list[object]:
    """Two layers before the blocks, and two after."""
    made = [deferred(Block, 2, 2) for _ in range(blocks)]
    return [deferred(nn.Embedding, 4, 2), nn.Dropout(0.1), *made, nn.Identity(), nn.Linear(2, 4)]


def layers_by(layout: str, layers: Sequence[object], stages: int) -> list[int]:
    return [len(of.layers) for of in partition(layers, stages, by=layout).summaries]


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        ("Et*3|(t*2|)*6,tL", model(16), [5, 2, 2, 2, 2, 2, 2, 3]),
        ("E|t*4|L", model(4), [2, 4, 2]),
        ("Et|tmL", model(2), [3, 3]),
        ("Et|tm|L", model(2), [3, 2, 1]),
        ("Et|ttL", [nn.Linear(2, 2)] * 5, [2, 3]),  # no run is as long: each letter is a layer
    ],
)
def test_a_layout_cuts_the_layers(layout: str, layers: list[object], expected: list[int]) -> None:
    assert layers_by(layout, layers, len(expected)) == expected


@pytest.mark.parametrize(
    ("layout", "stages", "message"),
    [
        ("Et|x|tL", 3, "position 4: 'x' is none of"),
        ("Et|(t|tL", 3, "position 4: this parenthesis is never closed"),
        ("Et|t)|tL", 3, "position 5: this parenthesis was never opened"),
        ("Et*|ttL", 2, r"position 3: \* stands between a letter or parentheses and a number"),
        ("*2Et|ttL", 2, r"position 1: '\*' is none of"),
        ("Et*0|ttL", 2, "position 3"),
        ("Et*999999999|L", 2, "position 3: that makes more than"),
        ("Et|tt|L", 2, "has 3 stages, but the schedule has 2"),
        ("Et||ttL", 3, "leaves stage 1 empty"),
        ("t|ttL", 2, "must begin with one E and end with one L"),
        ("Et|m|ttL", 3, "its t before its m"),
        ("Et|tttL", 2, "has 4 t and 0 m, but of 7 layers .* is 3 × Block, layers 2 to 4, with 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: str, stages: int, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        layers_by(layout, model(3), stages)


def test_a_loss_alone_is_no_stage() -> None:
    layers = [nn.Embedding(4, 2), nn.Identity(), *(Block(2, 2) for _ in range(3))]
    assert layers_by("Et|ttL", layers, 2) == [3, 2]  # and not 2 and 3, a layer each
    with pytest.raises(ExecutionError, match="leaves stage 2 empty: L stands for the loss alone"):
        layers_by("Et|tt|L", layers, 3)
    assert layers_by("Et|ttL", layers[2:], 2) == [1, 2]
    with pytest.raises(ExecutionError, match="leaves stage 0 empty: E stands for nothing, bec"):
        layers_by("E|tttL", layers[2:], 2)


def named(x: object) -> object:
    return x


def test_a_regular_expression_is_matched_as_by_deepspeed() -> None:
    """On classes, what makes deferred layers, and functions; in any case, anywhere in the name."""
    layers = [nn.Embedding(2, 2), deferred(Block, 2, 2), named, nn.ReLU(), Block(2, 2), lambda x: x]
    for pattern, costs in [
        ("block", [0, 1, 0, 0, 1, 0]),
        ("^(named|relu)$", [0, 0, 1, 1, 0, 0]),
        ("lambda|B[ed]", [1, 0, 0, 0, 0, 1]),
    ]:
        of = partition(layers, 6, by=f"type:{pattern}").summaries
        assert [stage.cost for stage in of] == costs
    stages = partition(layers, 2, by="type:Block").summaries
    assert [stage.layers for stage in stages] == [("0", "1", "2", "3"), ("4", "5")]


@pytest.mark.parametrize("cost", [5e-324, 1e-300, 1e200, 1.7e308])
def test_costs_of_any_size_are_balanced(cost: float) -> None:
    assert balanced([cost] * 4, 2) == ((0, 2), (2, 4))
