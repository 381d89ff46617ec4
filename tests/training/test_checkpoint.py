"""A checkpoint of one training is loaded by any other of the same model, and by a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import schedir
from schedir.runtime import Executor
from schedir.training import Checkpoint, gathered_state, partition
from tests.runtime.kit import MSE, momentum, random_batches

MICROBATCHES = 4
SEED = 3


def layers(width: int = 4) -> list[nn.Module]:
    """With statistics, and one without parameters."""
    torch.manual_seed(5)
    return [
        nn.Linear(4, width),
        nn.BatchNorm1d(width),
        nn.Tanh(),
        nn.Linear(width, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 4),
    ]


def decaying(parameters: Any) -> Optimizer:
    """In two groups, of which a stage may have one empty."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))


class Training:
    """One way to train the model: `step` makes a step, `checkpoint` is of it."""

    def __init__(self, make: Callable[[Any], Optimizer], model: Any, loss_fn: Any) -> None:
        self.make, self.loss_fn = make, loss_fn
        self.model: Any = model
        self.optimizer: Any = None
        self.scheduler: Any = None

    def schedule_lr(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def step(self, x: Tensor, y: Tensor) -> None:
        if isinstance(self.model, Executor):
            self.model.step(x, target=y)
        else:
            parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
            for a, b in parts:
                (self.loss_fn(self.model(a), b) / MICROBATCHES).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()

    def checkpoint(self) -> Checkpoint:
        if isinstance(self.model, Executor):
            return Checkpoint(self.model, scheduler=self.scheduler)
        return Checkpoint(
            self.model, self.optimizer, scheduler=self.scheduler, loss_fn=self.loss_fn
        )

    def state(self) -> dict[str, Tensor]:
        if isinstance(self.model, Executor):
            found = gathered_state(self.model)
            assert found is not None
            return found
        return dict(self.model.state_dict())


def plain(make: Callable[[Any], Optimizer], of: list[nn.Module], loss_fn: Any) -> Training:
    training = Training(make, partition(of, 1)[0], loss_fn)
    held = [*training.model.parameters()]
    if isinstance(loss_fn, nn.Module):
        held += loss_fn.parameters()
    training.schedule_lr(make(held))
    return training


def in_process(name: str, ranks: int, **options: Any) -> Callable[..., Training]:
    def make_training(
        make: Callable[[Any], Optimizer], of: list[nn.Module], loss_fn: Any
    ) -> Training:
        schedule = schedir.build(name, ranks=ranks, microbatches=MICROBATCHES, **options)
        stages = partition(of, schedule, by="uniform")
        executor = Executor(
            schedule, stages, loss_fn, make, in_process=True, seed=SEED, ties=stages.ties
        )
        training = Training(make, executor, loss_fn)
        training.schedule_lr(executor.optimizer)
        return training

    return make_training


WAYS: dict[str, Callable[..., Training]] = {
    "plain": plain,
    "1f1b on 2": in_process("1f1b", 2),
    "fill-drain on 4": in_process("fill-drain", 4),
    "interleaved on 2": in_process("interleaved-1f1b", 2, chunks=3),
    "pipedream on 3": in_process("pipedream", 3),
}


class ScaledLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return MSE(output * self.scale, target)


@contextmanager
def training_by(
    way: str, make: Callable[[Any], Optimizer], of: list[nn.Module] | None = None, loss: Any = None
) -> Iterator[Training]:
    training = WAYS[way](make, of or layers(), loss or MSE)
    yield training
    if isinstance(training.model, Executor):
        training.model.close()


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("saver", "make"), [*((way, decaying) for way in WAYS), ("1f1b on 2", momentum)]
)
def test_a_checkpoint_of_any_cut_goes_on_under_every_other(
    saver: str, make: Callable[[Any], Optimizer], tmp_path: Path
) -> None:
    """And then trains on as the plain model does; pipedream does so otherwise."""
    batches = random_batches(5)
    with training_by(saver, make, loss=ScaledLoss()) as first:
        for batch in batches[:3]:
            first.step(*batch)
        first.checkpoint().step = 3
        first.checkpoint().save(tmp_path)
        saved = first.state()
    reference: dict[str, Tensor] = {}
    for loader in WAYS:
        with training_by(loader, make, loss=ScaledLoss()) as second:
            checkpoint = second.checkpoint()
            checkpoint.load(tmp_path)
            assert_same(second.state(), saved)
            assert second.scheduler.last_epoch == 3
            assert isinstance(second.model, nn.Module) or second.model.steps == checkpoint.step
            for batch in batches[3:]:
                second.step(*batch)
            if loader == "plain":
                reference = {**second.state(), "loss": second.loss_fn.scale}
            elif loader != "pipedream on 3":
                assert_same({**second.state(), "loss": second.loss_fn.scale}, reference)
