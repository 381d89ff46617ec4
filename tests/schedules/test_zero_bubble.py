"""The zero-bubble schedules of one stage per rank (Qi et al., arXiv 2401.10241): published orders,
closed forms, published bubbles."""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Kind, LoadError, Timeline
from schedir.graph.alive import HELD_UNTIL, HeldUntil
from schedir.passes import strip_communication
from tests.sweeps import sweep
from tests.timelines import simulated

# 4 ranks, 8 microbatches.
ZB_H1_OF_RANK_0 = "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"


@attrs.frozen
class Measured:
    """Costs that Qi et al. measured on A100s, in microseconds, and the bubbles that follow: of the
    makespan for 1F1B and ZB-H1, of the longest span for the others."""

    ranks: int
    microbatches: int
    forward: int
    backward_input: int
    backward_weight: int
    latency: int
    bubbles: dict[str, float]

    @property
    def costs(self) -> CostModel:
        costs = split(self.forward, self.backward_input, self.backward_weight)
        return attrs.evolve(costs, latency=self.latency)

    def bubble(self, name: str) -> float:
        line = simulated(name, self.ranks, self.microbatches, self.costs, given=True)
        return line.bubble_fraction if name in ("1f1b", "zb-h1") else line.span_bubble_fraction


NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
A100 = [
    Measured(*shape, dict(zip(NAMES, bubbles, strict=True)))
    for shape, bubbles in [
        ((8, 24, 18522, 18086, 9337, 601), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
        ((8, 32, 18513, 18086, 9331, 626), (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
        ((8, 64, 18546, 18097, 9321, 762), (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
        ((16, 48, 11347, 11248, 8132, 377), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
        ((32, 96, 10419, 10207, 7715, 408), (0.2646, 0.1421, 0.0641, 0.1421, 0.0038)),
    ]
]
BY_SHAPE = pytest.mark.parametrize("row", A100, ids=lambda row: f"{row.ranks}x{row.microbatches}")


def peaks(line: Timeline) -> list[int]:
    return [of.peak_activations for of in line.ranks]


def longest_span(line: Timeline) -> float:
    return max(of.span for of in line.ranks)


def split(forward: int, backward_input: int, backward_weight: int) -> CostModel:
    return CostModel(
        forward=forward,
        backward=backward_input + backward_weight,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )


def test_zb_h1_is_the_published_order() -> None:
    built = strip_communication(schedir.build("zb-h1", ranks=4, microbatches=8))
    words = [f"{a.kind}{a.microbatch}" for a in built.flat[0] if a.kind is not Kind.OPTIM_STEP]
    assert words == ZB_H1_OF_RANK_0.split()


@pytest.mark.parametrize("microbatches", [8, 12])
def test_figures_where_all_passes_cost_the_same(microbatches: int) -> None:
    line = simulated("zb-h1", 4, microbatches)
    assert (line.makespan, longest_span(line)) == (3 * microbatches + 3, 3 * microbatches + 3)
    assert peaks(line) == [4, 4, 4, 4]
    line = simulated("zb-h2", 4, microbatches)
    assert (line.makespan, longest_span(line)) == (3 * microbatches + 3, 3 * microbatches)
    assert peaks(line) == [7, 7, 7, 7]  # published as 8


COST = st.integers(1, 20)


@given(st.integers(1, 10), st.integers(0, 10), COST, COST, COST)
def test_closed_form_of_zb_h1(ranks: int, more: int, f: int, i: int, w: int) -> None:
    w = min(f, i, w)  # one that fits beside what it waits for
    microbatches = ranks + more
    line = simulated("zb-h1", ranks, microbatches, split(f, i, w), given=True)
    assert line.makespan == microbatches * (f + i + w) + (ranks - 1) * (f + i - w)
    assert peaks(line) == [ranks] * ranks


@given(st.integers(1, 10), st.integers(0, 10), COST, COST, COST)
def test_closed_form_of_zb_h2(ranks: int, more: int, f: int, i: int, w: int) -> None:
    w = min(f, w, (f + i) // 2)
    microbatches = 2 * ranks - 1 + more
    line = simulated("zb-h2", ranks, microbatches, split(f, i, w), given=True)
    assert longest_span(line) == microbatches * (f + i + w) + (ranks - 1) * (f + i - 2 * w)
    assert peaks(line) == [2 * ranks - 1] * ranks


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@sweep("ranks", range(1, 9), quick=[1, 2, 5])
def test_few_microbatches(name: str, ranks: int) -> None:
    """No rank holds more, and none is slower than 1F1B."""
    for microbatches in range(1, 9):
        line = simulated(name, ranks, microbatches)
        most = ranks if name == "zb-h1" else 2 * ranks - 1
        assert max(peaks(line)) <= min(most, microbatches)
        assert line.makespan <= simulated("1f1b", ranks, microbatches).makespan


@BY_SHAPE
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_published_bubbles(row: Measured, name: str) -> None:
    assert round(row.bubble(name), 4) == row.bubbles[name]


def test_zb_keeps_up_with_the_handcrafted_ones() -> None:
    for ranks, microbatches in [(4, 8), (4, 12), (8, 16), (8, 24)]:
        for name, like in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
            line, by_hand = (simulated(each, ranks, microbatches) for each in (name, like))
            assert line.makespan == by_hand.makespan
            assert longest_span(line) == longest_span(by_hand)
            assert max(peaks(line)) <= ranks * (1 if name == "zb-1p" else 2)


@BY_SHAPE
@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_zb_is_as_good_as_published(row: Measured, name: str) -> None:
    assert round(row.bubble(name), 4) <= row.bubbles[name]


LIMITS = st.integers(1, 12).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.integers(1, 3 * ranks))
)


@given(LIMITS, st.integers(1, 12), st.sampled_from(HELD_UNTIL), st.data())
def test_zb_keeps_the_limit(
    limits: tuple[int, int], microbatches: int, held_until: HeldUntil, data: st.DataObject
) -> None:
    """Whatever each stage costs."""
    ranks, limit = limits
    times = [
        tuple(data.draw(st.lists(COST, min_size=ranks, max_size=ranks))) for _ in ("F", "I", "W")
    ]
    costs = CostModel(forward=times[0], backward_input=times[1], backward_weight=times[2])
    terms: dict[str, Any] = {"max_activations": limit, "held_until": held_until}
    built = schedir.build("zb", ranks=ranks, microbatches=microbatches, costs=costs, **terms)
    assert schedir.check(built, **terms).ok


@given(LIMITS, st.integers(1, 12), COST, COST, COST, st.integers(0, 3))
def test_zb_is_no_worse_than_what_fits(
    limits: tuple[int, int], microbatches: int, f: int, i: int, w: int, latency: int
) -> None:
    ranks, limit = limits
    costs = attrs.evolve(split(f, i, w), latency=latency)
    limits_of_zb = {"max_activations": limit, "held_until": "W"}
    found = simulated("zb", ranks, microbatches, costs, given=True, **limits_of_zb)
    for name, most in (("1f1b", ranks), ("zb-h1", ranks), ("zb-h2", 2 * ranks - 1)):
        if limit >= most:
            other = simulated(name, ranks, microbatches, costs, given=True)
            assert longest_span(found) <= longest_span(other)


@pytest.mark.parametrize("deferred", [0, 4, 10, None])
def test_zb_counts_bytes_where_they_are_known(deferred: int | None) -> None:
    """Within as many bytes as 6 activations have; the less a W needs, the shorter the span."""
    shape: dict[str, Any] = {"ranks": 4, "microbatches": 12, "max_activations": 6}
    costs = attrs.evolve(A100[0].costs, activation_bytes=10, deferred_bytes=deferred)
    line = simulated("zb", costs=costs, given=True, **shape)
    assert 50 < max(of.peak_bytes or 0 for of in line.ranks) <= 60
    held_until = {0: "I", 4: None, 10: "W", None: "W"}[deferred]
    if held_until:
        like = schedir.build("zb", **shape, costs=A100[0].costs, held_until=held_until)
        assert line.schedule == like


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_activations": 0}, "max_activations must be an int >= 1, not 0"),
        ({"max_activations": "4"}, "max_activations must be an int >= 1, not '4'"),
        ({"held_until": "B"}, "held_until must be 'I' or 'W', not 'B'"),
        ({"costs": CostModel(forward=(1, 2, 3))}, "has 3 numbers, but 4 are needed"),
        ({"chunks": 2}, "zb runs one stage per rank, not 2"),
    ],
)
def test_zb_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        schedir.build("zb", **wrong)


def test_eager_1f1b_is_alpas_and_jaxpps_order() -> None:
    """2 (ranks - r) - 1 forwards, then backwards and forwards in turn; else as good as 1F1B."""
    for ranks, microbatches in product(range(1, 7), range(1, 13)):
        line = simulated("eager-1f1b", ranks, microbatches)
        for rank, actions in enumerate(strip_communication(line.schedule).flat):
            warmup = min(2 * (ranks - rank) - 1, microbatches)
            turns = "BF" * (microbatches - warmup) + "B" * warmup + "S"
            letters = ["S" if a.kind is Kind.OPTIM_STEP else str(a.kind) for a in actions]
            assert "".join(letters) == "F" * warmup + turns
        assert line.makespan == 3 * (microbatches + ranks - 1)
        assert peaks(line) == [min(2 * (ranks - r) - 1, microbatches) for r in range(ranks)]


def test_eager_1f1b_hides_communication() -> None:
    """What takes as long as half a forward delays 1F1B on its way, eager 1F1B at its ends alone."""
    costs = CostModel(latency=0.5)
    lines = (simulated(name, 4, 64, costs, given=True) for name in ("eager-1f1b", "1f1b"))
    eager, plain = (line.makespan for line in lines)
    assert eager == 3 * (64 + 3) + 2 * 3 * 0.5
    assert plain > eager + 10
