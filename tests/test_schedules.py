"""The built-in schedules against published orders, torch's generator and known figures."""

from __future__ import annotations

import pytest

import schedir
from schedir import Kind, Schedule
from tests.built_in import SYNCHRONOUS
from tests.timelines import simulated

# jaxpp, DeepSpeed and the zero-bubble code agree on this order of 1F1B, 4 ranks, 8 microbatches.
ONE_F_ONE_B = """
0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""


def compute(schedule: Schedule) -> list[list[str]]:
    """The forwards and backwards of every rank."""
    wanted = (Kind.FORWARD, Kind.BACKWARD)
    return [[str(a) for a in actions if a.kind in wanted] for actions in schedule.flat]


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def test_1f1b_is_the_published_order() -> None:
    assert compute(schedir.build("1f1b", ranks=4, microbatches=8)) == table(ONE_F_ONE_B)


@pytest.mark.parametrize(("order", "backwards"), [("ascending", "012"), ("descending", "210")])
def test_fill_drain_backward_order(order: str, backwards: str) -> None:
    built = schedir.build("gpipe", ranks=2, microbatches=3, order=order)
    for rank in range(2):
        expected = [f"{rank}F{m}" for m in range(3)] + [f"{rank}B{m}" for m in backwards]
        assert compute(built)[rank] == expected


PIPEDREAM_VERSIONS = [
    [0, 0, 0, 0, 1, 2, 3, 4],
    [0, 0, 0, 1, 2, 3, 4, 5],
    [0, 0, 1, 2, 3, 4, 5, 6],
    [0, 1, 2, 3, 4, 5, 6, 7],
]


def versions(schedule: Schedule, stage: int) -> list[int]:
    """The version that each forward of the stage reads: named, or the updates listed before it."""
    read, newest = [], 0
    for action in schedule.flat[stage]:
        if action.kind is Kind.FORWARD:
            read.append(newest if action.version is None else action.version)
        newest += action.kind is Kind.OPTIM_STEP
    return read


def test_pipedream_reads_the_published_versions() -> None:
    built = schedir.build("pipedream", ranks=4, microbatches=8)
    synced = schedir.build("pipedream", ranks=4, microbatches=8, vertical_sync=True)
    for stage, published in enumerate(PIPEDREAM_VERSIONS):
        assert versions(built, stage) == published
        assert versions(synced, stage) == PIPEDREAM_VERSIONS[0]


def test_pipedream_keeps_at_most_its_bound_of_versions() -> None:
    for ranks in range(1, 7):
        plain = simulated("pipedream", ranks, 16)
        assert [r.weight_versions for r in plain.ranks] == [ranks - r for r in range(ranks)]
        synced = simulated("pipedream", ranks, 16, vertical_sync=True)
        assert [r.weight_versions for r in synced.ranks] == [ranks] * ranks


GRID = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 8, 13)]


@pytest.mark.parametrize("name", ["fill-drain", "1f1b"])
def test_bubbles_and_peaks_of_one_stage_per_rank(name: str) -> None:
    for ranks, microbatches in GRID:
        line = simulated(name, ranks, microbatches)
        assert line.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert line.makespan == 3 * (microbatches + ranks - 1)
        assert all(r.weight_versions == 1 for r in line.ranks)
        most = [microbatches if name == "fill-drain" else ranks - r for r in range(ranks)]
        assert [r.peak_activations for r in line.ranks] == [min(m, microbatches) for m in most]


@pytest.mark.parametrize(
    ("name", "makespan"), [("fill-drain", 33), ("1f1b", 33), ("interleaved-1f1b", 57)]
)
def test_published_makespans(name: str, makespan: int) -> None:
    line = simulated(name, 4, 8)
    assert line.makespan == makespan
    assert [r.idle for r in line.ranks] == [9] * 4


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_schedules_end_with_their_optim_steps(name: str) -> None:
    built = schedir.build(name, ranks=3, microbatches=4)
    for rank, actions in enumerate(built.flat):
        steps = [a for a in actions if a.kind is Kind.OPTIM_STEP]
        assert list(actions[-len(steps) :]) == steps
        assert tuple(a.stage for a in steps) == built.stages_of(rank)
