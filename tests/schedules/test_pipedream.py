"""What came after PipeDream's own schedule: two weight versions (2BW), and replicated stages."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import schedir
from schedir import Kind, LoadError
from schedir.passes import strip_communication
from tests.runtime.kit import MSE, Twins, microbatches_of, momentum, random_batches
from tests.runtime.on_ranks import on_ranks
from tests.runtime.reference import pipedream_2bw


def orders(schedule: schedir.Schedule) -> list[str]:
    """Each rank's compute, as papers write it where a rank has one stage."""
    found = []
    for actions in strip_communication(schedule).flat:
        words = []
        for a in actions:
            at = "" if a.version is None else f"@{a.version}"
            step = a.kind is Kind.OPTIM_STEP
            words.append("OPT" if step else f"{a.kind}{a.microbatch}{at}")
        found.append(" ".join(words))
    return found


# PipeDream-2BW.


def test_2bw_is_as_published() -> None:
    """Two ranks and two microbatches a batch."""
    assert orders(schedir.build("pipedream-2bw", ranks=2, microbatches=6)) == [
        "F0@0 F1@0 B0 F2@0 B1 OPT F3@0 B2 F4@1 B3 OPT F5@1 B4 B5 OPT",
        "F0@0 B0 F1@0 B1 OPT F2@0 B2 F3@0 B3 OPT F4@1 B4 F5@1 B5 OPT",
    ]


@pytest.mark.parametrize("ranks", range(1, 7))
def test_2bw_keeps_two_versions_and_is_one_update_late(ranks: int) -> None:
    for microbatches, size in product(range(1, 13), range(max(1, ranks - 1), 9)):
        built = schedir.build(
            "2bw", ranks=ranks, microbatches=microbatches, gradient_accumulation=size
        )
        report = schedir.check(built, max_versions=2, max_delay=1)
        assert report.diagnostics == (), (microbatches, size)
        for m in range(microbatches):
            versions = built.dataflow.reads[:, m].tolist()
            assert versions == [max(0, m // size - 1)] * ranks
        steps = [a for actions in built.flat for a in actions if a.kind is Kind.OPTIM_STEP]
        assert len(steps) == -(-microbatches // size) * ranks


@pytest.mark.parametrize(
    ("ranks", "microbatches", "size"), [(4, 8, 4), (4, 6, 6), (2, 9, 3), (3, 7, 7), (4, 2, 2)]
)
def test_2bw_takes_batches_that_divide(ranks: int, microbatches: int, size: int) -> None:
    shape = {"ranks": ranks, "microbatches": microbatches}
    wanted = schedir.build("2bw", **shape, gradient_accumulation=max(size, ranks - 1))
    assert schedir.build("2bw", **shape).actions == wanted.actions


@pytest.mark.parametrize("size", [0, 2, "3", True])
def test_2bw_refuses_batches_that_need_more_versions(size: Any) -> None:
    with pytest.raises(LoadError, match="gradient_accumulation must be an int >= 3, as 4 ranks"):
        schedir.build("2bw", ranks=4, microbatches=8, gradient_accumulation=size)


def train_2bw(ranks: int, microbatches: int, size: int, rank: int | None) -> None:
    """On a rank, or all in this process: bit for bit as the recurrence says."""
    schedule = schedir.build(
        "2bw", ranks=ranks, microbatches=microbatches, gradient_accumulation=size
    )
    torch.manual_seed(3)
    whole: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(ranks)]
    twins = Twins(whole, schedule, rank, momentum)
    with twins.executor() as executor:
        for x, y in random_batches(3, 2 * microbatches + 1):  # one microbatch is larger
            found = executor.step(x, target=y).loss
            pieces = microbatches_of((x, y), microbatches)
            assert found == pipedream_2bw(whole, MSE, twins.optimizers, pieces, size)
    twins.assert_equal()


@pytest.mark.parametrize(
    ("ranks", "microbatches", "size"), [(1, 3, 1), (2, 6, 2), (2, 7, 3), (3, 12, 3), (4, 11, 4)]
)
def test_2bw_trains_as_its_recurrence_in_one_process(
    ranks: int, microbatches: int, size: int
) -> None:
    train_2bw(ranks, microbatches, size, None)


@on_ranks(2)
@pytest.mark.parametrize(("microbatches", "size"), [(6, 2), (7, 3)])
def test_2bw_trains_as_its_recurrence_on_two_ranks(rank: int, microbatches: int, size: int) -> None:
    train_2bw(2, microbatches, size, rank)


@on_ranks(4)
def test_2bw_trains_as_its_recurrence_on_four_ranks(rank: int) -> None:
    train_2bw(4, 11, 4, rank)
