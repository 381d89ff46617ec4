"""Published bubbles: figures of others, for lists that are written here from their papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Schedule, backward_input, backward_weight, forward
from schedir.ir import loads_torch_csv
from schedir.passes import insert_communication, strip_communication
from tests.torch_schedules import dumped

Warmup = Callable[[int], int]


def zero_bubble(ranks: int, microbatches: int, limit: int) -> Schedule:
    """ZB-H1 (`limit` 1) and ZB-H2 (2) of Qi et al., arXiv 2401.10241.

    A forward and an I in turns, after `limit` times as many forwards as in 1F1B; rank r keeps back
    `limit` × r of its Ws, and so fills its bubble with them.

        rank 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2       ZB-H1, 4 ranks
        rank 3   F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1
    """

    def of_rank(rank: int) -> Iterator[Action]:
        warmup = min(limit * (ranks - 1 - rank), microbatches)
        kept = limit * rank
        for m in range(warmup):
            yield forward(rank, m)
        for m in range(microbatches):
            if m + warmup < microbatches:
                yield forward(rank, m + warmup)
            yield backward_input(rank, m)
            if m >= kept:
                yield backward_weight(rank, m - kept)
        for m in range(max(0, microbatches - kept), microbatches):
            yield backward_weight(rank, m)

    lists = [[*of_rank(rank)] for rank in range(ranks)]
    return insert_communication(Schedule("zero-bubble", microbatches, range(ranks), lists))


def test_the_list_is_the_published_one() -> None:
    published = "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    computed = strip_communication(zero_bubble(4, 8, 1)).flat[0]
    assert [str(action) for action in computed] == [f"0{token}" for token in published.split()]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "times", "latency", "rates"),
    [
        (8, 24, (18522, 18086, 9337), 601, (0.2431, 0.1585, 0.1083)),
        (8, 32, (18513, 18086, 9331), 626, (0.1985, 0.1242, 0.0837)),
        (8, 64, (18546, 18097, 9321), 762, (0.1240, 0.0674, 0.0444)),
        (16, 48, (11347, 11248, 8132), 377, (0.2552, 0.1397, 0.0672)),
        (32, 96, (10419, 10207, 7715), 408, (0.2646, 0.1421, 0.0641)),
    ],
)
def test_bubble_rates_at_real_costs(
    ranks: int,
    microbatches: int,
    times: tuple[int, int, int],
    latency: int,
    rates: tuple[float, float, float],
) -> None:
    """Those of 1F1B, ZB-H1 and ZB-H2, whose ranks start over when they are done, to all digits."""
    f, i, w = times
    costs = CostModel(
        forward=f, backward=i + w, backward_input=i, backward_weight=w, latency=latency
    )
    one = schedir.simulate(schedir.build("1f1b", ranks=ranks, microbatches=microbatches), costs)
    first, second = (
        schedir.simulate(zero_bubble(ranks, microbatches, limit), costs) for limit in (1, 2)
    )
    longest = max(rank.span for rank in second.ranks)
    lasts = one.makespan, first.makespan, longest
    assert all(isinstance(last, int) for last in lasts)
    found = tuple(round(1 - microbatches * (f + i + w) / last, 4) for last in lasts)
    assert found == rates


@pytest.mark.parametrize("microbatches", [8, 12])
def test_zero_bubbles_at_equal_costs(microbatches: int) -> None:
    first, second = (schedir.simulate(zero_bubble(4, microbatches, limit)) for limit in (1, 2))
    assert first.makespan == second.makespan == 3 * microbatches + 3
    assert max(rank.span for rank in first.ranks) == 3 * microbatches + 3
    assert max(rank.span for rank in second.ranks) == 3 * microbatches
    assert max(rank.peak_activations for rank in first.ranks) == 4
    interleaved = schedir.build("interleaved-1f1b", ranks=4, microbatches=microbatches)
    line = schedir.simulate(interleaved)
    assert line.makespan == 6 * microbatches + 9
    assert [rank.peak_activations for rank in line.ranks] == [11, 9, 7, 5]


@given(
    ranks=st.integers(1, 6),
    extra=st.integers(0, 6),
    f=st.integers(1, 50),
    i=st.integers(1, 50),
    w=st.integers(1, 50),
)
def test_closed_forms_of_bubbles(ranks: int, extra: int, f: int, i: int, w: int) -> None:
    """(p - 1) (F + I + W) for 1F1B; where all three cost the same, (p - 1) (F + I - W) for ZB-H1,
    and (p - 1) (F + I - 2 W) for ZB-H2's longest span."""
    microbatches = 2 * ranks + extra
    costs = CostModel(forward=f, backward=i + w, backward_input=i, backward_weight=w)
    one = schedir.simulate(schedir.build("1f1b", ranks=ranks, microbatches=microbatches), costs)
    assert {rank.idle for rank in one.ranks} == {(ranks - 1) * (f + i + w)}
    even = CostModel(forward=f, backward=2 * f, backward_input=f, backward_weight=f)
    first = schedir.simulate(zero_bubble(ranks, microbatches, 1), even)
    assert {rank.idle for rank in first.ranks} == {(ranks - 1) * f}
    second = schedir.simulate(zero_bubble(ranks, microbatches, 2), even)
    assert max(rank.span for rank in second.ranks) == 3 * f * microbatches


@pytest.mark.parametrize(("overlapped", "makespan"), [(3, 66), (2.5, 59), (2, 52), (None, 66)])
def test_dual_pipe_v_overlaps(overlapped: float | None, makespan: float) -> None:
    read = loads_torch_csv(dumped("ScheduleDualPipeV", 4, 10))
    complete = insert_communication(strip_communication(read))
    line = schedir.simulate(complete, CostModel(overlapped=overlapped))
    assert line.makespan == makespan
    assert [rank.peak_activations for rank in line.ranks] == [9] * 4
