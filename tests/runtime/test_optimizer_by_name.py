"""`optimizer(named_parameters, stage)`: param groups by the names of the whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import partition
from tests.runtime.kit import MSE, ScaledLoss, microbatches_of, random_batches
from tests.runtime.on_ranks import on_ranks

Named = Iterable[tuple[str, nn.Parameter]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4)]
    return nn.Sequential(*layers)


def by_name(named: Named, stage: int = -1) -> Optimizer:
    """No decay on LayerNorm and biases, another rate for the embedding: three groups on every
    stage."""
    groups: dict[str, list[nn.Parameter]] = {"embedding": [], "plain": [], "decayed": []}
    for name, parameter in named:
        plain = name.endswith("bias") or name.startswith("2.")
        kind = "embedding" if name == "0.weight" else "plain" if plain else "decayed"
        groups[kind].append(parameter)
    embedding, no_decay, decayed = ({"params": own, "lr": 0.05} for own in groups.values())
    given = [{**embedding, "lr": 0.2}, no_decay, {**decayed, "weight_decay": 0.3}]
    return AdamW(given, weight_decay=0.0)


def for_stages(named: Named, stage: int) -> Optimizer:
    """The same as a function that needs two arguments."""
    return by_name(named, stage)


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.arange(8) + at, y) for at, (_, y) in enumerate(random_batches(4))]


def trained_plainly() -> dict[str, torch.Tensor]:
    whole = model()
    optimizer = by_name(whole.named_parameters())
    scheduler = halving(optimizer)
    for batch in batches():
        plain_step([whole], MSE, [optimizer], microbatches_of(batch, 4))
        scheduler.step()
    return {**whole.state_dict()}


def trained(rank: int | None) -> dict[str, torch.Tensor]:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    stages = partition(model(), schedule, rank=rank)
    with Executor(schedule, stages, MSE, for_stages, in_process=rank is None) as executor:
        scheduler = halving(executor.optimizer)
        for x, y in batches():
            executor.step(x, target=y)
            scheduler.step()
    return {n: v for module in stages.values() for n, v in module.state_dict().items()}


def test_it_trains_as_one_optimizer_over_the_whole_model() -> None:
    torch.testing.assert_close(trained(None), trained_plainly(), rtol=0, atol=0)


@on_ranks(2)
def test_it_does_on_two_ranks(rank: int) -> None:
    found, expected = trained(rank), trained_plainly()
    assert found
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def made_by(make: Callable[..., Optimizer], loss_fn: Any = MSE, compiled: bool = False) -> Any:
    """The optimisers that the function makes for an executor."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    stages: dict[int, Any] = dict(partition(model(), schedule))
    if compiled:
        stages = {s: torch.compile(module, backend="eager") for s, module in stages.items()}
    return Executor(schedule, stages, loss_fn, make, in_process=True).optimizers


def test_names_are_those_of_the_whole_model_and_of_the_loss() -> None:
    seen: dict[int, list[str]] = {}

    def make(named: Named, stage: int) -> Optimizer:
        seen[stage] = [name for name, _ in named]
        return AdamW(named)

    for compiled in (False, True):
        made = made_by(make, ScaledLoss(), compiled)
        whole = [name for name, _ in model().named_parameters()]
        assert seen[0] + seen[1] == [*whole, "loss_fn.scale"]
        # As torch's optimisers keep them.
        assert made[1].param_groups[0]["param_names"] == seen[1]


@pytest.mark.parametrize(
    "make",
    [
        SGD,
        lambda parameters: SGD(parameters),
        lambda parameters, stage=0: SGD(parameters),
        lambda parameters, *, lr=0.1: SGD(parameters, lr=lr),
        functools.partial(AdamW, lr=0.1),
        functools.partial(lambda stage, parameters: SGD(parameters), 0),
    ],
)
def test_a_function_of_one_argument_gets_parameters(make: Any) -> None:
    assert "param_names" not in made_by(make)[0].param_groups[0]


def test_another_stages_parameters_are_refused_all_the_same() -> None:
    foreign = nn.Linear(2, 2)
    with pytest.raises(ExecutionError, match="parameters that are not the stage's"):
        made_by(lambda named, stage: SGD(foreign.parameters()))


@on_ranks(2)
def test_a_rank_without_parameters_has_a_scheduler_too(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    stage = nn.Tanh() if rank else nn.Linear(4, 4)
    with Executor(schedule, {rank: stage}, MSE, for_stages) as executor:
        assert len(halving(executor.optimizer).get_last_lr()) == 3
