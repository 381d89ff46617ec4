"""Schedules of several chunks per rank: torch's own generators, and published figures of groups."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

import schedir
from schedir import Kind, Schedule
from schedir.passes import strip_communication
from tests.sweeps import sweep
from tests.test_schedules import GRID
from tests.timelines import simulated


def compute(schedule: Schedule) -> list[list[str]]:
    """The tokens of every rank, without the steps."""
    return [
        [str(action) for action in actions if action.kind is not Kind.OPTIM_STEP]
        for actions in strip_communication(schedule).flat
    ]


def torchs_order(generator: Any, ranks: int) -> list[list[str]]:
    lists = (generator._calculate_single_rank_operations(rank) for rank in range(ranks))
    return [[str(action) for action in actions if action is not None] for actions in lists]


@pytest.mark.parametrize(
    ("name", "generator"),
    [
        ("interleaved-1f1b", torchs.ScheduleInterleaved1F1B),
        ("interleaved-zb", torchs.ScheduleInterleavedZeroBubble),
    ],
)
@sweep("ranks", [1, 2, 3, 4, 6, 8], quick=[1, 2, 3, 4])
@sweep("chunks", [1, 2, 3, 4], quick=[2, 3])
def test_interleaved_is_torchs_order(name: str, generator: Any, ranks: int, chunks: int) -> None:
    """Of its generator, without the stage modules it is bound to."""
    accepted = [m for m in range(1, 25) if m % max(1, m // ranks) == 0]
    assert len(accepted) > 5
    for microbatches in accepted:
        theirs = generator.__new__(generator)
        theirs.pp_group_size, theirs.n_local_stages = ranks, chunks
        theirs._n_microbatches = microbatches
        theirs.microbatches_per_round = microbatches // max(1, microbatches // ranks)
        given = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
        assert compute(schedir.build(name, **given)) == torchs_order(theirs, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_looped_bfs_is_torchs_order(ranks: int) -> None:
    for chunks, microbatches in product((1, 2, 3), (1, 2, 3, 8, 13)):
        theirs: Any = torchs.ScheduleLoopedBFS.__new__(torchs.ScheduleLoopedBFS)
        theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
        theirs._stages = [None] * chunks
        line = simulated("looped-bfs", ranks, microbatches, chunks=chunks)
        assert compute(line.schedule) == torchs_order(theirs, ranks)
        assert [of.peak_activations for of in line.ranks] == [chunks * microbatches] * ranks
        if microbatches >= ranks:
            assert line.makespan == 3 * (chunks * microbatches + ranks - 1)


def test_interleaved_groups_as_megatrons_docstring_says() -> None:
    built = schedir.build("interleaved-1f1b", ranks=1, microbatches=5, chunks=2, group_size=3)
    forwards = [a for a in built.flat[0] if a.kind is Kind.FORWARD]
    assert [a.microbatch for a in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [a.stage for a in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def megatrons_table(microbatches: int, chunks: int, size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk), as `get_schedule_table` has them (NVIDIA/Megatron-LM at d98e8a64,
    megatron/core/pipeline_parallel/schedules.py)."""
    table = []
    for first in range(0, microbatches, size):
        group = range(first, min(first + size, microbatches))
        table += [(m, chunk) for chunk in range(chunks) for m in group]
    return table


def megatrons_order(ranks: int, rank: int, microbatches: int, chunks: int, size: int) -> list[str]:
    """What `forward_backward_pipelining_with_interleaving` of the same file runs on a rank."""
    table = megatrons_table(microbatches, chunks, size)
    forwards = [f"{chunk * ranks + rank}F{m}" for m, chunk in table]
    backwards = [f"{(chunks - 1 - chunk) * ranks + rank}B{m}" for m, chunk in table]
    warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * size, len(table))
    steady = zip(forwards[warmup:], backwards, strict=False)
    pairs = [token for pair in steady for token in pair]
    return forwards[:warmup] + pairs + backwards[len(table) - warmup :]


@sweep("ranks", [2, 3, 4, 5, 8], quick=[2, 4])
@sweep("chunks", [2, 3, 4], quick=[2, 3])
def test_interleaved_is_megatrons_order_where_megatron_takes_the_groups(
    ranks: int, chunks: int
) -> None:
    taken = refused = 0
    for microbatches in range(1, 3 * ranks + 2):
        for size in range(ranks, max(ranks, microbatches) + 1, 1 + ranks // 4):
            given = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
            built = schedir.build("interleaved-1f1b", **given, group_size=size)
            last = microbatches % size
            if size <= microbatches and (last == 0 or last >= ranks):
                order = [
                    megatrons_order(ranks, r, microbatches, chunks, size) for r in range(ranks)
                ]
                assert compute(built) == order, (given, size)
                taken += last > 0
            else:
                refused += 1
            assert schedir.check(built, channel="rank").ok, (given, size)
    assert taken >= ranks
    assert refused >= ranks


def test_a_shape_that_megatron_refuses_may_deadlock_in_its_order() -> None:
    """5 microbatches in groups of 4 on 4 ranks: the last group has one, whose chunks wait."""
    order = [megatrons_order(4, rank, microbatches=5, chunks=3, size=4) for rank in range(4)]
    report = schedir.check(Schedule.of("megatrons", [s % 4 for s in range(12)], order))
    assert "S301" in {found.code for found in report.diagnostics}
    assert schedir.check(schedir.build("interleaved-1f1b", microbatches=5, chunks=3)).ok


# Grouped interleaving of Qi et al. (the code of arXiv 2405.15362): makespan and the most chunks
# that a rank holds, 4 ranks, 8 microbatches, by number of chunks and group size.
GROUPED = {
    (2, 2): (56, 6),
    (2, 3): (55, 7),
    (2, 4): (54, 8),
    (4, 2): (108, 10),
    (4, 3): (105, 13),
    (4, 4): (102, 16),
}


def figures(name: str, chunks: int, size: int) -> tuple[float, int]:
    line = simulated(name, 4, 8, chunks=chunks, group_size=size)
    return line.makespan, max(of.peak_activations for of in line.ranks)


@pytest.mark.parametrize(("chunks", "size"), GROUPED)
def test_grouped_interleaving_is_as_published(chunks: int, size: int) -> None:
    makespan, peak = GROUPED[chunks, size]
    assert figures("grouped-interleaved-1f1b", chunks, size) == (makespan, peak)
    if size < 4:  # from there on Megatron's order, whose backwards are whole
        assert figures("interleaved-1f1b", chunks, size) == (makespan, peak)
    ours, held = figures("interleaved-zb", chunks, size)
    assert ours < makespan
    assert held == peak


def test_groups_of_one_follow_each_other_without_a_gap() -> None:
    """A chunk waits for two of them, and its slots are moved on, lest two chunks want the same."""
    assert figures("interleaved-1f1b", 2, 1) == (57, 7)
    assert figures("interleaved-zb", 2, 1) == (55, 7)
    assert figures("interleaved-1f1b", 4, 1) == (114, 11)
    assert figures("interleaved-zb", 4, 1) == (112, 11)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "grouped-interleaved-1f1b", "interleaved-zb"])
@sweep("ranks", [2, 3, 5, 8], quick=[3, 5])
def test_small_groups_run_and_hold_less(name: str, ranks: int) -> None:
    for microbatches, chunks in product((4, 7, 9), (1, 2, 3)):
        for size in range(1, min(ranks, microbatches)):
            line = simulated(name, ranks, microbatches, chunks=chunks, group_size=size)
            assert schedir.check(line.schedule).ok, (microbatches, chunks, size)
            if size >= ranks / 2:
                most = (chunks - 1) * size + ranks
                assert max(of.peak_activations for of in line.ranks) <= most


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_bubbles_and_peaks_of_interleaved(chunks: int) -> None:
    for ranks, microbatches in [*GRID, (4, 9), (5, 11), (6, 15)]:
        line = simulated("interleaved-1f1b", ranks, microbatches, chunks=chunks)
        rounds, total = max(1, microbatches // ranks), microbatches * chunks
        group = ranks if microbatches % rounds else microbatches // rounds
        if microbatches >= ranks and microbatches % group == 0 and group == ranks:
            assert line.bubble_fraction == pytest.approx((ranks - 1) / (total + ranks - 1))
        for r, stats in enumerate(line.ranks):
            warmup = min(2 * (ranks - r - 1) + (chunks - 1) * group, total)
            assert stats.peak_activations == min(warmup + 1, total)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb"])
@pytest.mark.parametrize("size", [0, -1, "2", 1.5, True])
def test_no_such_group(name: str, size: Any) -> None:
    with pytest.raises(schedir.LoadError, match="group_size must be an int >= 1"):
        schedir.build(name, group_size=size)


def test_interleaved_zb_drains_without_a_bubble_of_its_own() -> None:
    """Where F, I and W cost the same only the fill is idle, as in ZB-H1, `chunks` times smaller."""
    for ranks, rounds, chunks in product((1, 2, 3, 4, 6), (1, 2, 3), (2, 3, 4)):
        line = simulated("interleaved-zb", ranks, ranks * rounds, chunks=chunks)
        assert [of.idle for of in line.ranks] == [ranks - 1] * ranks
        assert [of.peak_activations for of in line.ranks] == [chunks * ranks] * ranks
