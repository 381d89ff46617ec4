"""Stages that step after other microbatches than the loss stage: each takes the mean over its own.

The reference is a recurrence in plain torch; sizes of groups are how many microbatches each stage
applies in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference import plain_step, run_stages
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from schedir.runtime.samples import share_sums
from tests.runtime.far import FarDevice
from tests.runtime.kit import (
    MSE,
    Twins,
    linear_stages,
    microbatches_of,
    momentum,
    numbered,
    random_batch,
    random_batches,
    refused,
    sgd,
)
from tests.runtime.lists import stepping
from tests.runtime.on_ranks import on_ranks
from tests.runtime.recurrences import delayed
from tests.sweeps import sweep

SIZES = [(2, 1), (3, 1), (1, 2), (3, 2), (2, 3), (7, 2), (1, 7), (2, 1, 3), (1, 3, 3), (2, 4)]


def doubled(number: int) -> list[nn.Module]:
    return [stage.double() for stage in linear_stages(number)]


def assert_close(twins: Twins, near: float = 1e-13) -> None:
    """Of whole groups the scale is exact, where the recurrence adds up rounded weights."""
    for s, module in twins.local.items():
        mine, theirs = module.state_dict(), twins.whole[s].state_dict()
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


def train(sizes: Sequence[int], microbatches: int, rank: int | None, **options: Any) -> None:
    """On a rank, or all in this process."""
    twins = Twins(doubled(len(sizes)), stepping(sizes, microbatches), rank, momentum)
    recurrence = delayed(sizes, microbatches, lambda s, m: m // sizes[s])
    with twins.executor(**options) as executor:
        # Some microbatches are larger, where no stage applies a part of a group of the last one.
        for x, y in random_batches(2, 2 * microbatches + 3 * (sizes[-1] == 1)):
            batch = x.double(), y.double()
            found = executor.step(batch[0], target=batch[1]).loss
            assert found == twins.step(batch, recurrence=recurrence)
    assert_close(twins)


@sweep("sizes", SIZES, quick=SIZES[:3])
def test_a_step_is_the_mean_over_its_own_microbatches(sizes: tuple[int, ...]) -> None:
    train(sizes, 7, None)


@on_ranks(2)
@sweep("sizes", [(3, 1), (1, 2), (3, 2)], quick=[(3, 2)])
def test_on_two_ranks(rank: int, sizes: tuple[int, ...]) -> None:
    train(sizes, 7, rank)


@on_ranks(2)
@pytest.mark.parametrize("device", ["here", "far"])
def test_a_count_of_ones_own(rank: int, device: str, request: pytest.FixtureRequest) -> None:
    """What is counted on a device stays there."""
    if device == "far":
        request.getfixturevalue("far")
    train((2, 3), 7, rank, count=lambda y: torch.tensor(float(len(y))))


@on_ranks(4)
@sweep("sizes", [(2, 1), (2, 3)], quick=[(2, 3)])
def test_two_pipelines(rank: int, sizes: tuple[int, ...]) -> None:
    """Their microbatches of one number are one, larger, microbatch; they are of unequal size, also
    in a pipeline if no stage applies a part of a group of the last one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    line, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    twins = Twins(doubled(2), stepping(sizes, 5), place, momentum)
    recurrence = delayed(sizes, 5, lambda s, m: m // sizes[s])
    with twins.executor(mesh=mesh) as executor:
        for seed in range(2):
            uneven = 2 * (sizes[-1] == 1)
            batches = [[t.double() for t in random_batch(n + uneven, seed)] for n in (5, 10)]
            halves = [microbatches_of((x, y), 5) for x, y in batches]
            both = zip(*halves, strict=True)
            pieces = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in both]
            found = executor.step(batches[line][0], target=batches[line][1]).loss
            expected = plain_step(twins.whole, MSE, twins.optimizers, pieces, recurrence)
            assert found == pytest.approx(expected)
    assert_close(twins, 1e-12)


def test_groups_that_agree_are_not_scaled() -> None:
    assert share_sums(schedir.build("pipedream", ranks=3, microbatches=5)) == {}
    assert share_sums(stepping((2, 2), 5)) == {}
    assert share_sums(stepping((2, 1), 5)) == {(0, 0): 2, (0, 1): 2}
    assert share_sums(stepping((1, 2), 3)) == {(0, 0): 0.5, (0, 1): 0.5}


def test_gradients_from_before_are_not_scaled() -> None:
    stages = numbered(linear_stages())
    x, y = random_batch()
    with Executor(stepping((2, 1), 4), stages, MSE, sgd, in_process=True) as executor:
        executor.step(x, target=y, update=False)
        with refused("stage 0 has gradients from before this call"):
            executor.step(x, target=y)
        for stage in stages.values():
            stage.zero_grad()
        executor.step(x, target=y)


def executor_of(sizes: Sequence[int], microbatches: int, **options: Any) -> Executor:
    schedule = stepping(sizes, microbatches)
    return Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True, **options)


def test_there_is_no_norm_of_all_gradients() -> None:
    with refused("clip_grad_norm needs all gradients before any rank"):
        executor_of((2, 1), 4, clip_grad_norm=1.0)


UNEQUAL = r"microbatches \[0, 1\], after which the loss stage updates, hold 2, 1 samples"


def test_parts_of_groups_of_unequal_microbatches_are_refused() -> None:
    x, y = random_batch(3)
    executor = executor_of((1, 2), 2)
    with refused(UNEQUAL):
        executor.step(x, target=y)
    executor.step(x[:2], target=y[:2])


def test_those_counted_on_a_device_are_refused_later(far: FarDevice) -> None:
    x, y = random_batch(3)
    with executor_of((1, 2), 2, count=lambda target: torch.tensor(len(target))) as executor:
        executor.step(x, target=y)
        with refused(UNEQUAL):
            executor.step(x, target=y)


def test_tied_stages_step_at_one_rate() -> None:
    whole = doubled(3)
    whole[1].load_state_dict(whole[0].state_dict())
    twins = Twins(whole, stepping((2, 2, 1), 4), None, sgd)
    x, y = (t.double() for t in random_batch())
    with twins.executor(ties=[[(0, "0.weight"), (1, "0.weight")]]) as executor:
        executor.step(x, target=y)
    (first, _), (second, _) = whole[0].children(), whole[1].children()
    second.weight = first.weight
    tied = sgd({p: None for stage in whole[:2] for p in stage.parameters()})
    last = sgd(whole[2].parameters())
    for m, (a, b) in enumerate(microbatches_of((x, y), 4)):
        MSE(run_stages(whole, a), b).backward()
        for optimizer in (last, tied)[: 1 + m % 2]:
            for p in optimizer.param_groups[0]["params"]:
                p.grad *= 1 / 2 if optimizer is tied else 1
            optimizer.step()
            optimizer.zero_grad()
    assert_close(twins)
