"""Training on two ranks is training in one process, bit for bit: orders, versions, recomputation,
random numbers, precision, and the losses that each rank reads.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from reference import plain_step
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import schedir
from schedir import Action, Pipeline, backward, backward_input, backward_weight, forward, optim_step
from schedir.runtime import Executor, rng
from tests.runtime.kit import (
    MSE,
    Twins,
    adamw,
    assert_equal_gradients,
    differing,
    everyone,
    gradients,
    linear_stages,
    microbatches_of,
    random_batch,
    random_batches,
    train_on_rank,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.recurrences import pipedream


@on_ranks(2)
def test_statistics_of_batches_are_those_of_one_process(rank: int) -> None:
    torch.manual_seed(5)
    whole: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    ]
    train_on_rank(rank, whole, random_batches(3))


def backwards_reversed(pipe: Pipeline, rank: int) -> Iterator[Action]:
    for m in (1, 0):
        yield forward(rank, m)
    for m in (1, 0):
        yield backward(rank, m)
    yield optim_step(rank)


@on_ranks(2)
def test_losses_belong_to_their_microbatch(rank: int) -> None:
    batches = [random_batches(1, 5)[0] for _ in range(2)]
    train_on_rank(
        rank, linear_stages(), batches, microbatches=2, target=backwards_reversed, order=[1, 0]
    )


def split_backward(pipe: Pipeline, rank: int) -> Iterator[Action]:
    for make in (forward, backward_input, backward_weight):
        for m in range(pipe.microbatches):
            yield make(rank, m)
    yield optim_step(rank)


@on_ranks(2)
def test_input_and_weight_gradients_apart(rank: int) -> None:
    train_on_rank(rank, linear_stages(), random_batches(3), target=split_backward)


def v_shape(pipe: Pipeline, rank: int) -> Iterator[Action]:
    first, last = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(first, m)
        if rank == 1:
            yield forward(last, m)
            yield backward(last, m)
            yield backward(first, m)
    if rank == 0:
        for m in range(pipe.microbatches):
            yield forward(last, m)
            yield backward(last, m)
        for m in range(pipe.microbatches):
            yield backward(first, m)
    for stage in (first, last):
        yield optim_step(stage)


@on_ranks(2)
def test_neighbouring_stages_on_one_rank(rank: int) -> None:
    generator = schedir.schedule("v", placement=lambda pipe: [0, 1, 1, 0])(v_shape)
    train_on_rank(rank, linear_stages(4), random_batches(3), target=generator)


@on_ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "fill-drain"])
def test_dropout_is_the_same_under_every_schedule(rank: int, name: str) -> None:
    torch.manual_seed(5)
    whole: list[nn.Module] = [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 4)),
    ]
    train_on_rank(rank, whole, random_batches(3), target=name, seeded=True)


@on_ranks(2)
def test_the_random_state_of_the_user_is_restored(rank: int) -> None:
    stage = linear_stages()[rank]
    torch.manual_seed(17)
    state = torch.get_rng_state()
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x, y = random_batch()
    with Executor(schedule, {rank: stage}, MSE, adamw) as executor:
        torch.set_rng_state(state)
        executor.step(x, target=y)
        assert torch.equal(torch.get_rng_state(), state)
    with rng(1, 2, 3, 4):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)


def pairs_delayed(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Two updates of two microbatches each; all forwards of stage 0 read version 0."""
    if rank == 0:
        for m in range(4):
            yield forward(0, m)
    for first in (0, 2):
        for m in (first, first + 1):
            if rank == 1:
                yield forward(1, m)
            yield backward(rank, m)
        yield optim_step(rank)


@on_ranks(2)
def test_older_versions_accumulate_their_gradients(rank: int) -> None:
    schedule = schedir.build(pairs_delayed, ranks=2, microbatches=4)
    twins = Twins(linear_stages(), schedule, rank)
    x, y = random_batch()
    with twins.executor() as executor:
        executor.step(x, target=y)
    first, last = twins.whole
    old = copy.deepcopy(first)
    pieces = microbatches_of((x, y), 4)
    for pair in (pieces[:2], pieces[2:]):
        old.zero_grad(set_to_none=True)
        for a, b in pair:
            (MSE(last(old(a)), b) * 0.5).backward()
        for own, copied in zip(first.parameters(), old.parameters(), strict=True):
            own.grad = copied.grad
        twins.update()
    twins.assert_equal()


class Checkpointed(nn.Module):
    """Recomputes its forward in the backward: it must find the version of the forward there."""

    def __init__(self, inner: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


@on_ranks(2)
def test_recomputation_finds_the_stashed_version(rank: int) -> None:
    schedule = schedir.build("pipedream", ranks=2, microbatches=5)
    twins = Twins([Checkpointed(stage) for stage in linear_stages()], schedule, rank)
    plain = [stage.get_submodule("inner") for stage in twins.whole]
    with twins.executor() as executor:
        for x, y in random_batches(3, rows=10):
            # A leaf that requires grad makes the first stage recompute as well.
            found = executor.step(x, target=y).loss
            pieces = microbatches_of((x, y), 5)
            assert found == plain_step(plain, MSE, twins.optimizers, pieces, pipedream(2, 5))
    twins.assert_equal()


@on_ranks(2)
def test_reentrant_checkpoints_are_run(rank: int) -> None:
    first, second = linear_stages()
    train_on_rank(rank, [first, Checkpointed(second, use_reentrant=True)], random_batches(2))


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
def test_without_an_optimizer_gradients_accumulate_over_steps(rank: int) -> None:
    """`.grad` adds up over calls, as in plain torch."""
    twins = Twins(linear_stages(), schedir.build("1f1b", ranks=2, microbatches=4), rank)
    with twins.executor(optimizer=None) as executor:
        for x, y in random_batches(2):
            executor.step(x, target=y)
            twins.accumulate((x, y))
    mine = gradients(twins.local.values())
    assert None not in mine
    assert_equal_gradients(mine, gradients([twins.whole[rank]]))


@on_ranks(2)
def test_evaluation_between_steps_changes_nothing(rank: int) -> None:
    """Forwards alone give the same loss again, and the steps around them are what they were."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    evaluated, alone = linear_stages()[rank], linear_stages()[rank]
    losses: dict[bool, list[float]] = {True: [], False: []}
    for stage, evaluates in ((evaluated, True), (alone, False)):
        with Executor(schedule, {rank: stage}, MSE, adamw) as executor:
            for x, y in random_batches(3):
                losses[evaluates].append(executor.step(x, target=y).loss)
                if evaluates:
                    seen = executor.evaluate(x[:5], target=y[:5]).loss
                    assert executor.evaluate(x[:5], target=y[:5]).loss == seen
    assert differing(evaluated, alone) == []
    assert losses[True] == losses[False]


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
    torch.manual_seed(0)  # the same batches on every rank
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    for _ in range(4):
        assert not dist.is_initialized()
        with Executor(schedule, {rank: nn.Linear(4, 4)}, MSE, torch.optim.SGD) as executor:
            executor.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert not dist.is_initialized()
