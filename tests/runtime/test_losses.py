"""What a call tells of its microbatches: their losses, their samples, and what is kept of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad
from schedir.runtime import Executor
from tests.runtime.far import FarDevice
from tests.runtime.kit import (
    MSE,
    Batch,
    adamw,
    everyone,
    linear_stages,
    message_of,
    microbatches_of,
    numbered,
    random_batch,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import pipelines


def plain_losses(batch: Batch, number: int) -> list[float]:
    """Of the stages as they are made, microbatch by microbatch."""
    model = nn.Sequential(*linear_stages())
    with torch.no_grad():
        return [float(MSE(model(x), y)) for x, y in microbatches_of(batch, number)]


def right(output: Tensor, target: Tensor) -> int:
    return int((output.argmax(-1) == target.argmax(-1)).sum())


@on_ranks(2)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_each_rank_has_the_losses_of_all_microbatches(rank: int, microbatches: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=microbatches)
    x, y = batch = random_batch(rows=7)
    expected = plain_losses(batch, microbatches)
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        results = [executor.evaluate(x, target=y), executor.step(x, target=y)]
        executor.step(x, target=y)
        for result in results:
            assert result.losses == tuple(expected)
            assert result.samples == 7
        short = executor.evaluate(x[:1], target=y[:1])
        assert [*map(math.isnan, short.losses)] == [False] + [True] * (microbatches - 1)
        assert short.samples == 1
        assert short.loss == short.losses[0]


@on_ranks(2)
def test_losses_are_read_late_on_a_device_that_queues(rank: int, far: FarDevice) -> None:
    """Nobody waits for them within the steps, though the host knows no count of samples."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    x, y = batch = random_batch(rows=7)
    stage = linear_stages()[rank]
    options: dict[str, Any] = {"count": lambda target: torch.tensor(2 * len(target))}
    with Executor(schedule, {rank: stage}, MSE, adamw, **options) as executor:
        with far.step():
            results = [executor.step(x, target=y) for _ in range(3)]
        found = [(result.losses, result.samples) for result in results]
    assert found[0] == (tuple(plain_losses(batch, 3)), 14.0)
    assert everyone(found) == [found] * 2


@schedir.schedule("fan-out", placement=lambda pipe: [0, (1, 2)])
def fan_out(pipe: Pipeline, rank: int) -> Iterator[Action]:
    if not rank:
        for make in (forward, backward):
            for m in range(pipe.microbatches):
                yield make(0, m)
        yield optim_step(0)
        return
    for m in range(rank - 1, pipe.microbatches, 2):
        yield forward(1, m)
        yield backward(1, m)
    yield reduce_grad(1)
    yield optim_step(1)


@on_ranks(3)
def test_replicas_of_the_last_stage_tell_each_other(rank: int) -> None:
    schedule = schedir.build(fan_out, ranks=3, microbatches=3)
    x, y = batch = random_batch(rows=7)
    place = min(rank, 1)
    with Executor(schedule, {place: linear_stages()[place]}, MSE, adamw) as executor:
        result = executor.evaluate(x, target=y, outputs=right)
    assert result.losses == tuple(plain_losses(batch, 3))
    assert result.samples == 7
    model = nn.Sequential(*linear_stages())
    counted = [right(model(a), b) for a, b in microbatches_of(batch, 3)]
    first, second, third = counted
    assert result.outputs == [None, [first, None, third], [None, second, None]][rank]


@on_ranks(4)
def test_losses_of_the_first_pipeline_come_first(rank: int) -> None:
    mesh = pipelines()
    line, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    batches = [random_batch(rows=rows, seed=rows) for rows in (7, 2)]
    with Executor(schedule, {place: linear_stages()[place]}, MSE, mesh=mesh) as executor:
        x, y = batches[line]
        result = executor.evaluate(x, target=y)
        assert executor.gather(place) == [0, 1, 0, 1]
    assert result.losses[:5] == (*plain_losses(batches[0], 3), *plain_losses(batches[1], 2))
    assert math.isnan(result.losses[5])
    assert len(result.losses) == 6
    assert result.samples == 9
    assert everyone((result.loss, result.losses[:5])) == [(result.loss, result.losses[:5])] * 4


def test_a_function_of_the_outputs_sees_each_with_its_target() -> None:
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    x, y = batch = random_batch(rows=6)
    stages = linear_stages(4)
    model = nn.Sequential(*copy.deepcopy(stages))
    options: dict[str, Any] = {"in_process": True, "recompute": True}
    with Executor(schedule, numbered(stages), MSE, adamw, **options) as executor:
        seen: list[Tensor] = []

        def kept(output: Tensor, target: Tensor) -> Tensor:
            assert not output.requires_grad
            seen.append(target)
            return output - target

        short = executor.evaluate(x[:2], target=y[:2], outputs=kept).outputs
        seen.clear()
        found = executor.step(x, target=y, outputs=kept).outputs
        assert executor.gather("alone") == ["alone"]
    assert short is not None
    assert found is not None
    assert len(short) == 2  # without the copies that stand for the missing microbatches
    assert len(seen) == 4  # not again by the forwards that are run again
    for one, (a, b) in zip(found, microbatches_of(batch, 4), strict=True):
        assert torch.equal(one, model(a) - b)


@on_ranks(2)
def test_a_function_of_the_outputs_that_fails_ends_all_ranks(rank: int) -> None:
    def fails(output: Tensor, target: Tensor) -> None:
        raise ValueError("no such class")

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x, y = random_batch()
    executor = Executor(schedule, {rank: linear_stages()[rank]}, MSE)
    message_of(executor.evaluate, x, target=y, outputs=fails)  # rank 0 is done by then
    assert "1F0: ValueError: no such class" in message_of(executor.gather, None)
