"""Four recipes, each a loop of its own on scikit-learn's digits, cut into two stages.

torchrun --nproc-per-node 2 examples/recipes.py accumulation
torchrun --nproc-per-node 2 examples/recipes.py clipping
torchrun --nproc-per-node 2 examples/recipes.py float16
torchrun --nproc-per-node 2 examples/recipes.py compiled
"""

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from images import digits
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.training import partition

Data: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Batches of images and their classes."""

SCHEDULE = schedir.build("1f1b", ranks=2, microbatches=4)
LOSS = nn.CrossEntropyLoss()


def model() -> nn.Sequential:
    """A small network, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batches() -> Data:
    """Batches of 64 digits, the same on every rank."""
    images, classes = digits().train.tensors
    return [*zip(images.split(64), classes.split(64), strict=True)][:-1]  # the last one is short


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a stage."""
    return torch.optim.SGD(parameters, lr=0.1)


def accumulation(data: Data) -> list[float]:
    """Gradient accumulation over calls: one update for every four batches.

    Each call adds its mean gradient, so the learning rate is a fourth of the usual one.
    """
    stages, losses = partition(model(), SCHEDULE), []
    with Executor(SCHEDULE, stages, LOSS, sgd) as executor:
        for number, (x, y) in enumerate(data, 1):
            result = executor.step(x, target=y, update=number % 4 == 0)
            losses.append(result.loss)
    return losses


def clipping(data: Data) -> list[float]:
    """Clipping by the norm over all stages; `result.grad_norm` is the norm before clipping."""
    stages, losses = partition(model(), SCHEDULE), []
    with Executor(SCHEDULE, stages, LOSS, sgd, clip_grad_norm=0.5) as executor:
        for x, y in data:
            result = executor.step(x, target=y)
            losses.append(result.loss)
    return losses


def float16(data: Data) -> list[float]:
    """Mixed precision in float16, with a GradScaler so that small gradients do not vanish.

    For bfloat16 leave out the scaler.
    """
    stages, losses = partition(model(), SCHEDULE), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Executor(SCHEDULE, stages, LOSS, sgd, scaler=scaler) as executor:
        for x, y in data:
            with torch.autocast("cpu", torch.float16):
                result = executor.step(x, target=y)
            losses.append(result.loss)
    return losses


def compiled(data: Data, backend: str = "inductor") -> list[float]:
    """torch.compile of each stage; the first step of a shape compiles, forwards and backwards."""
    stages, losses = partition(model(), SCHEDULE), []
    for stage in stages.values():
        stage.compile(backend=backend)
    with Executor(SCHEDULE, stages, LOSS, sgd) as executor:
        for x, y in data:
            result = executor.step(x, target=y)
            losses.append(result.loss)
    return losses


RECIPES: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (accumulation, clipping, float16, compiled)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", choices=RECIPES)
    found = RECIPES[parser.parse_args().recipe](batches())
    if os.environ.get("RANK", "0") == "0":
        print(f"loss of the first batch {found[0]:.4f}, of the last {found[-1]:.4f}")
