"""Gradients that are summed keep the layout of their parameters.

Fused optimisers read a parameter and its gradient side by side, as both lie in memory.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import Recurrence, plain_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad
from schedir.runtime import Executor
from tests.runtime.kit import MSE, Calls, everyone, microbatches_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


def implementations() -> Iterator[tuple[str, Callable[[Any], torch.optim.Optimizer]]]:
    """Every optimiser of torch that takes any parameter, in each of its implementations."""
    for name, kind in sorted(vars(torch.optim).items()):
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name in ("Optimizer", "LBFGS", "SparseAdam", "Muon"):  # no step alone; other gradients
            continue
        options = inspect.signature(kind).parameters
        for flag in ("foreach", "fused"):
            if flag in options:
                yield f"{name} {flag}", make(kind, flag)


def make(kind: Any, flag: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, lr=0.05, **{flag: True})


OPTIMIZERS = dict(implementations())
every_optimizer = sweep("name", OPTIMIZERS, quick=[*OPTIMIZERS][::4])


def turned(inputs: int, outputs: int) -> nn.Linear:
    """Its weight is another one's transpose."""
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = nn.Parameter(torch.randn(inputs, outputs).t())
    return layer


def odd() -> Calls:
    """A convolution in channels last, before a weight that is turned."""
    torch.manual_seed(0)
    conv: Any = nn.Conv2d(3, 4, 3, padding=1)
    conv = conv.to(memory_format=torch.channels_last)
    return Calls(lambda conv, last, x: last(conv(x).mean((2, 3))), conv, turned(4, 5))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 5, 5, generator=generator), torch.randn(8, 5, generator=generator)


def assert_close(module: nn.Module, other: nn.Module) -> None:
    mine, theirs = dict(module.named_parameters()), dict(other.named_parameters())
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@schedir.schedule("halves", placement=lambda pipe: [(0, 1)])
def halves(pipe: Pipeline, rank: int) -> Iterator[Action]:
    yield forward(0, rank)
    yield backward(0, rank)
    yield reduce_grad(0)
    yield optim_step(0)


@every_optimizer
@pytest.mark.parametrize("way", ["pipelines", "replicas"])
@on_ranks(2)
def test_two_train_as_one_under_every_optimizer(rank: int, way: str, name: str) -> None:
    """Each on a half of the batch, beside the sum of both halves' gradients."""
    x, y = batch()
    module, whole = odd(), odd()
    schedule, mesh = schedir.build(halves, ranks=2, microbatches=2), None
    given = x, y
    if way == "pipelines":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
        schedule = schedir.build("1f1b", ranks=1, microbatches=1)
        given = x.chunk(2)[rank], y.chunk(2)[rank]
    recurrence = Recurrence(lambda s, m: 0, [[[[0], [1]]]], [0, 1])
    plain = [OPTIMIZERS[name](whole.parameters())]
    with Executor(schedule, {0: module}, MSE, OPTIMIZERS[name], mesh=mesh) as executor:
        for _ in range(3):
            executor.step(given[0], target=given[1])
            plain_step([whole], MSE, plain, microbatches_of((x, y), 2), recurrence)
    assert_close(module, whole)


@every_optimizer
@on_ranks(2)
def test_tied_copies_train_as_one_parameter_under_every_optimizer(rank: int, name: str) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    x, y = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    whole = turned(5, 5)
    module = copy.deepcopy(whole)
    ties = [[(0, "weight"), (1, "weight")]]
    with Executor(schedule, {rank: module}, MSE, OPTIMIZERS[name], ties=ties) as executor:
        for _ in range(3):
            executor.step(x, target=y)
    plain = [OPTIMIZERS[name](whole.parameters())]
    for _ in range(3):
        plain_step([nn.Sequential(whole, whole)], MSE, plain, [(x, y)])
    assert_close(module, whole)
    first, second = everyone(module.weight.detach())
    assert torch.equal(first, second)
