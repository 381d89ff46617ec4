"""Run by torchrun on 2 ranks: gradients that are summed keep the layout of their parameters.

As tests/runtime/scenarios.py, one function per promise. Fused optimisers read a parameter and its
gradient side by side, as both lie in memory.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad
from schedir.runtime import Executor
from tests.runtime.registry import Scenarios
from tests.runtime.scenarios import MSE, main

SCENARIOS = Scenarios()


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


class Odd(nn.Module):
    """A convolution in channels last, and a weight that is another one's transpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv: Any = nn.Conv2d(3, 4, 3, padding=1)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3))
        return y @ self.turned  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 5, 5, generator=generator), torch.randn(8, 5, generator=generator)


def plain(optimizer: Callable[[Any], torch.optim.Optimizer], steps: int) -> nn.Module:
    """Two halves of a batch, each one's gradients by itself, then their sum."""
    module = Odd()
    made = optimizer(module.parameters())
    x, y = batch()
    for _ in range(steps):
        sums: list[Tensor] | None = None
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            module.zero_grad()
            (MSE(module(a), b) / 2).backward()
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            sums = grads if sums is None else [s + g for s, g in zip(sums, grads, strict=True)]
        assert sums is not None
        for p, grad in zip(module.parameters(), sums, strict=True):
            p.grad = grad
        made.step()
    return module


def compare(module: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(module.named_parameters(), other.parameters(), strict=True)
    return [
        f"{name} is off by {float((p - q).detach().abs().max()):.3g}"
        for (name, p), q in pairs
        if not torch.allclose(p, q, atol=1e-6)
    ]


@SCENARIOS.on(2)
def two_pipelines_under_every_optimiser(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    schedule = schedir.build("1f1b", ranks=1, microbatches=1)
    x, y = (t.chunk(2)[rank] for t in batch())
    faults = []
    for name, optimizer in implementations():
        module = Odd()
        with Executor(schedule, {0: module}, MSE, optimizer, mesh=mesh) as executor:
            for _ in range(3):
                executor.step(x, target=y)
        faults += [f"{name}: {fault}" for fault in compare(module, plain(optimizer, 3))]
    return faults


@schedir.schedule("halves", placement=lambda pipe: [(0, 1)])
def halves(pipe: Pipeline, rank: int) -> Iterator[Action]:
    yield forward(0, rank)
    yield backward(0, rank)
    yield reduce_grad(0)
    yield optim_step(0)


@SCENARIOS.on(2)
def two_replicas_under_every_optimiser(rank: int) -> list[str]:
    schedule = schedir.build(halves, ranks=2, microbatches=2)
    x, y = batch()
    faults = []
    for name, optimizer in implementations():
        module = Odd()
        with Executor(schedule, {0: module}, MSE, optimizer) as executor:
            for _ in range(3):
                executor.step(x, target=y)
        faults += [f"{name}: {fault}" for fault in compare(module, plain(optimizer, 3))]
    return faults


@SCENARIOS.on(2)
def ties_over_ranks_under_every_optimiser(rank: int) -> list[str]:
    """Both copies are transposes, and stay what one parameter would be."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(5, 5).t())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight)

    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    x, y = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    faults = []
    for name, optimizer in implementations():
        module = Turned()
        ties = [[(0, "weight"), (1, "weight")]]
        with Executor(schedule, {rank: module}, MSE, optimizer, ties=ties) as executor:
            for _ in range(3):
                executor.step(x, target=y)
        whole = Turned()
        made = optimizer(whole.parameters())
        for _ in range(3):
            made.zero_grad()
            MSE(whole(whole(x)), y).backward()
            made.step()
        faults += [f"{name}: {fault}" for fault in compare(module, whole)]
        grads = copy.deepcopy(module.weight.detach())
        dist.broadcast(grads, 0)
        if not torch.equal(grads, module.weight):
            faults.append(f"{name}: the copies differ")
    return faults


if __name__ == "__main__":
    main(SCENARIOS)
