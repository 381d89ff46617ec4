"""Training on two ranks is training in one process, bit for bit: orders, versions, recomputation,
random numbers, precision, and the losses that each rank reads.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from reference import plain_step
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import (
    MSE,
    Checkpointed,
    Twins,
    adamw,
    differing,
    everyone,
    linear_stages,
    microbatches_of,
    random_batch,
    random_batches,
    train_on_rank,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.recurrences import pipedream


@on_ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "fill-drain"])
def test_statistics_and_dropout_are_those_of_one_process(rank: int, name: str) -> None:
    torch.manual_seed(5)
    whole: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4)),
    ]
    train_on_rank(rank, whole, random_batches(3), target=name, seeded=True)


@on_ranks(2)
def test_recomputation_finds_the_stashed_version(rank: int) -> None:
    """A checkpoint recomputes its forward in the backward: at the version of the forward."""
    schedule = schedir.build("pipedream", ranks=2, microbatches=5)
    twins = Twins([Checkpointed(stage) for stage in linear_stages()], schedule, rank)
    plain = [stage.get_submodule("0") for stage in twins.whole]
    with twins.executor() as executor:
        for x, y in random_batches(3, rows=10):
            # A leaf that requires grad makes the first stage recompute as well.
            found = executor.step(x, target=y).loss
            pieces = microbatches_of((x, y), 5)
            assert found == plain_step(plain, MSE, twins.optimizers, pieces, pipedream(2, 5))
    twins.assert_equal()


class Reentrant(Checkpointed):
    use_reentrant = True


@on_ranks(2)
def test_reentrant_checkpoints_are_run(rank: int) -> None:
    first, second = linear_stages()
    train_on_rank(rank, [first, Reentrant(second)], random_batches(2))


@on_ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_autocast_may_be_switched_on_between_steps(rank: int, name: str) -> None:
    """Its cache of cast weights outlives no update."""
    twins = Twins(linear_stages(), schedir.build(name, ranks=2, microbatches=4), rank)
    with twins.executor() as executor:
        for step, batch in enumerate(random_batches(3)):
            with torch.autocast("cpu", torch.bfloat16, enabled=step > 0):
                executor.step(batch[0], target=batch[1])
            with torch.autocast("cpu", torch.bfloat16, enabled=step > 0, cache_enabled=False):
                twins.step(batch, recurrence=pipedream(2, 4) if name == "pipedream" else None)
    twins.assert_equal()


@on_ranks(2)
def test_evaluation_between_steps_changes_nothing(rank: int) -> None:
    """Forwards alone give the same loss again, and the steps around them are what they were."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    evaluated, alone = linear_stages()[rank], linear_stages()[rank]
    losses: list[float] = []
    with Executor(schedule, {rank: alone}, MSE, adamw) as executor:
        losses += [executor.step(x, target=y).loss for x, y in random_batches(3)]
    with Executor(schedule, {rank: evaluated}, MSE, adamw) as executor:
        for x, y in random_batches(3):
            assert executor.step(x, target=y).loss == losses.pop(0)
            seen = executor.evaluate(x[:5], target=y[:5]).loss
            assert executor.evaluate(x[:5], target=y[:5]).loss == seen
    assert differing(evaluated, alone) == []


@on_ranks(2)
def test_a_loss_is_read_late_or_never(rank: int) -> None:
    schedule = schedir.build("fill-drain", ranks=2, microbatches=2)
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        results = [executor.step(x, target=y) for x, y in random_batches(4)]
        losses = [results[3].loss, results[1].loss, results[1].loss]
        assert everyone(losses) == [losses, losses]


class Watches(nn.Linear):
    """Counts at each forward the earlier gradients of inputs that are still in memory."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.sent: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(not storage.expired() for storage in self.sent))
        if x.requires_grad:
            x.register_hook(lambda grad: self.sent.append(StorageWeakRef(grad.untyped_storage())))
        return super().forward(x)


@on_ranks(2)
def test_what_a_step_sent_last_is_freed_as_the_next_begins(rank: int) -> None:
    """In fill-drain nothing comes back that would say earlier that the gradients have arrived."""
    watches = Watches()
    schedule = schedir.build("fill-drain", ranks=2, microbatches=4)
    with Executor(schedule, {rank: watches}, MSE, adamw) as executor:
        for x, y in random_batches(3):
            executor.step(x, target=y)
    if rank == 1:
        assert len(watches.sent) >= 12
        assert not any(watches.alive)


@on_ranks(2)
def test_executors_make_and_give_back_their_process_groups() -> None:
    """One after the other; gloo finds stale addresses where the keys are the same."""
    rank = int(os.environ["RANK"])
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    x, y = random_batch(6)
    for _ in range(4):
        assert not dist.is_initialized()
        with Executor(schedule, {rank: nn.Linear(4, 4)}, MSE, torch.optim.SGD) as executor:
            executor.step(x, target=y)
    assert not dist.is_initialized()
