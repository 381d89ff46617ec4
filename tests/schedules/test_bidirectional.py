"""DualPipe, DualPipeV and Chimera: torch's list, the published bubbles and peaks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import schedir
from schedir import Action, CostModel, Kind, LoadError, Schedule, Timeline, Together
from schedir.library import load
from tests.timelines import simulated
from tests.torch_schedules import computed

STAGE_WIDE = (Kind.REDUCE_GRAD, Kind.OPTIM_STEP)


def compute(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """The entries of a rank, the sums and steps at their end left out."""
    entries = [e.actions if isinstance(e, Together) else (e,) for e in schedule.actions[rank]]
    return [actions for actions in entries if actions[0].kind not in STAGE_WIDE]


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 10), (5, 13)]
)
def test_dualpipev_is_torchs_list(ranks: int, microbatches: int) -> None:
    torchs = computed("ScheduleDualPipeV", ranks, microbatches)
    ours = load("dualpipev", ranks=ranks, microbatches=microbatches)
    assert ours.placement == torchs.placement
    for rank in range(ranks):
        assert compute(ours, rank) == compute(torchs, rank)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (6, 16), (8, 16)])
def test_dualpipe_is_dualpipev_unfolded(ranks: int, microbatches: int) -> None:
    """Each half of the ranks runs the V's list, one chunk's microbatches going the other way."""
    half = microbatches // 2
    whole = load("dualpipe", ranks=ranks, microbatches=microbatches)
    folded = load("dualpipev", ranks=ranks // 2, microbatches=half)
    goes_down = {(a.stage, a.microbatch) for actions in whole.flat[:1] for a in actions}
    assert (0, 0) in goes_down
    assert (ranks - 1, half) in goes_down
    for rank in range(ranks):
        upper = rank >= ranks // 2

        def other_way(action: Action, upper: bool = upper) -> Action:
            """Chunks on the way back, of the V, are those of the microbatches that go up."""
            assert action.microbatch is not None
            up = (action.stage >= ranks // 2) != upper
            return Action(action.kind, action.stage, action.microbatch + half * up)

        expected = compute(folded, min(rank, ranks - 1 - rank))
        assert compute(whole, rank) == [tuple(map(other_way, actions)) for actions in expected]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("forward", "weight", "overlapped"), [(1, 1, 3), (1, 1, 2.5), (1, 1, 2), (4, 2, 9)]
)
def test_dualpipes_bubble_is_deepseeks(
    ranks: int, forward: float, weight: float, overlapped: float
) -> None:
    """A gradient of the input that costs a forward, as their formula takes it."""
    full = forward + weight
    split: dict[str, Any] = {"backward_input": forward, "backward_weight": weight}
    costs = CostModel(forward=forward, backward=full, overlapped=overlapped, **split)
    for microbatches in (2 * ranks, 3 * ranks):
        line = simulated("dualpipe", ranks, microbatches, costs)
        bubble = (ranks / 2 - 1) * (overlapped + full - 3 * weight)
        assert max(rank.idle for rank in line.ranks) == bubble
        assert [rank.peak_activations for rank in line.ranks] == [ranks + 1] * ranks


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "takes"),
    [
        ("dualpipe", 3, 12, 1, "an even number of ranks, one chunk and two or more microbatches"),
        ("dualpipe", 4, 7, 1, "two or more microbatches for each rank; not 4 ranks, 1 chunks and"),
        ("dualpipe", 4, 8, 2, "one chunk"),
        ("dualpipev", 4, 7, 2, "two chunks and two or more microbatches for each rank"),
        ("dualpipev", 4, 8, 3, "two chunks"),
        ("chimera", 4, 8, 2, "one chunk"),
    ],
)
def test_other_shapes_are_refused(
    name: str, ranks: int, microbatches: int, chunks: int, takes: str
) -> None:
    with pytest.raises(LoadError, match=takes):
        schedir.build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)


def test_dualpipe_leaves_out_what_an_odd_number_lacks() -> None:
    odd = load("dualpipe", ranks=4, microbatches=9)
    even = load("dualpipe", ranks=4, microbatches=10)
    for rank in range(4):
        kept = [tuple(a for a in actions if a.microbatch != 9) for actions in compute(even, rank)]
        assert compute(odd, rank) == [actions for actions in kept if actions]


CHIMERA = """
0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3
"""


def test_chimeras_unit_is_the_papers() -> None:
    """Figure 3: the merged schedule of 4 ranks and 4 microbatches."""
    schedule = load("chimera", ranks=4, microbatches=4)
    found = [" ".join(str(a) for (a,) in compute(schedule, rank)) for rank in range(4)]
    assert found == CHIMERA.split("\n")[1:-1]


def chimera(ranks: int, units: int, backward: float) -> Timeline:
    return simulated("chimera", ranks, units * ranks, CostModel(backward=backward))


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_chimeras_bubble_and_peaks_are_the_papers(ranks: int) -> None:
    """Table 2: equal times over any number of units, and a backward twice as long in one unit."""
    for units in (1, 2, 3):
        microbatches = units * ranks
        even = chimera(ranks, units, backward=1).bubble_fraction
        assert even == pytest.approx((ranks - 2) / (2 * microbatches + ranks - 2))
    line = chimera(ranks, 1, backward=2)
    assert line.bubble_fraction == pytest.approx((ranks - 2) / (1.5 * ranks + ranks - 2))
    down = [ranks // 2 + 1 + rank for rank in range(ranks // 2)]
    assert [rank.peak_activations for rank in line.ranks] == down + down[::-1]


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_chimeras_units_after_each_other(ranks: int) -> None:
    """Direct concatenation leaves gaps between the units where a backward takes longer."""
    for backward, units in product((1, 2, 3), repeat=2):
        idle = max(rank.idle for rank in chimera(ranks, units, backward).ranks)
        assert idle == (ranks - 2) * (backward + (units - 1) * (backward - 1))
