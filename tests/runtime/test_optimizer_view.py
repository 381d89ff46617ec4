"""`executor.optimizer`: one learning-rate scheduler over all stages trains as it does in plain
training with one optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from tests.runtime.kit import (
    MSE,
    ScaledLoss,
    adamw,
    assert_equal_stages,
    differing,
    message_of,
    microbatches_of,
    momentum,
    numbered,
    random_batches,
    sgd,
)
from tests.runtime.on_ranks import on_ranks

STEPS = 7


def decaying(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Matrices decay, what has one dimension does not: in two groups everywhere, one may be
    empty."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


def with_tensor_lr(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.05), weight_decay=0.3)


def sequential(o: Optimizer) -> Any:
    both = [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 4)]
    return lr_scheduler.SequentialLR(o, both, [3])


def chained(o: Optimizer) -> Any:
    both = [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    return lr_scheduler.ChainedScheduler(both)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}
OPTIMIZERS = {"momentum": momentum, "groups": decaying, "tensor lr": with_tensor_lr}


def stages_of_model(number: int = 4) -> dict[int, nn.Module]:
    """One of them has no parameters."""
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(number)]
    return numbered([nn.Tanh() if stage == 1 else layer for stage, layer in enumerate(layers)])


def advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def plainly_trained(
    stages: Iterable[nn.Module],
    loss_fn: Any,
    make: Callable[[Any], Optimizer],
    schedule_lr: Callable[[Optimizer], Any],
) -> tuple[nn.Sequential, Any]:
    """A copy, in one process, with one optimiser and one scheduler; microbatch by microbatch."""
    model = nn.Sequential(*copy.deepcopy([*stages]))
    held = [*model.parameters(), *(loss_fn.parameters() if loss_fn is not MSE else ())]
    optimizer = make(held)
    scheduler = schedule_lr(optimizer)
    for batch in random_batches(STEPS):
        loss = plain_step([model], loss_fn, [optimizer], microbatches_of(batch, 4))
        optimizer.zero_grad()
        advance(scheduler, loss)
    return model, scheduler


BOTH = [(name, optimizer) for name in SCHEDULERS for optimizer in ("groups", "tensor lr")]


@pytest.mark.parametrize(
    ("name", "optimizer"), [*BOTH, ("CyclicLR", "momentum"), ("OneCycleLR", "momentum")]
)
def test_a_scheduler_works_as_on_one_optimizer(name: str, optimizer: str) -> None:
    schedule_lr, make = SCHEDULERS[name], OPTIMIZERS[optimizer]
    stages, loss_fn, plain_loss = stages_of_model(), ScaledLoss(), ScaledLoss()
    model, expected = plainly_trained(stages.values(), plain_loss, make, schedule_lr)
    with executor_of(make, stages, loss_fn) as executor:
        scheduler = schedule_lr(executor.optimizer)
        for x, y in random_batches(STEPS):
            advance(scheduler, executor.step(x, target=y).loss)
        assert scheduler.get_last_lr() == expected.get_last_lr()
        assert len(executor.optimizer.param_groups) == len(expected.optimizer.param_groups)
    assert differing(nn.Sequential(*stages.values()), model) == []
    assert torch.equal(loss_fn.scale, plain_loss.scale)


@on_ranks(2)
def test_a_rank_without_parameters_keeps_step(rank: int) -> None:
    schedule, stages = schedir.build("1f1b", ranks=2, microbatches=4), stages_of_model(2)
    model, expected = plainly_trained(stages.values(), MSE, decaying, SCHEDULERS["OneCycleLR"])
    with Executor(schedule, {rank: stages[rank]}, MSE, decaying) as executor:
        scheduler = SCHEDULERS["OneCycleLR"](executor.optimizer)
        for x, y in random_batches(STEPS):
            executor.step(x, target=y)
            scheduler.step()
        assert len(executor.optimizers) == (rank == 0)
        assert scheduler.get_last_lr() == expected.get_last_lr()
        assert scheduler.base_lrs == expected.base_lrs
    assert differing(stages[rank], model[rank]) == []


def executor_of(make: Any, stages: Any = None, loss_fn: Any = MSE) -> Executor:
    """Of four stages, or of two that are given."""
    held = stages or stages_of_model()
    name = "interleaved-1f1b" if len(held) == 4 else "1f1b"
    schedule = schedir.build(name, ranks=2, microbatches=4)
    return Executor(schedule, held, loss_fn, make, in_process=True)


def test_a_group_reads_one_and_writes_all() -> None:
    with executor_of(decaying) as executor:
        optimizer = executor.optimizer
        assert optimizer is executor.optimizer
        decays, rests = optimizer.param_groups
        decays["lr"] = 0.5
        rests.update(lr=0.25, betas=(0.5, 0.9))
        assert rests.setdefault("mine", 3) == 3
        for own in executor.optimizers.values():
            assert [group["lr"] for group in own.param_groups] == [0.5, 0.25]
            rest = own.param_groups[1]
            assert (rest["betas"], rest["mine"]) == (rests["betas"], 3) == ((0.5, 0.9), 3)
        del rests["mine"]
        assert "mine" not in executor.optimizers[3].param_groups[1]
        held = [p for own in executor.optimizers.values() for p in own.param_groups[0]["params"]]
        assert decays["params"] == held
        assert {**decays}.keys() == executor.optimizers[0].param_groups[0].keys()
        assert "lr: 0.25" in repr(optimizer)


def test_its_state_is_that_of_the_stages() -> None:
    with executor_of(adamw) as first, executor_of(adamw) as second:
        x, y = random_batches(1)[0]
        first.step(x, target=y)
        for own in first.optimizers.values():
            for parameter, state in own.state.items():
                assert first.optimizer.state[parameter] is state
        first.optimizer.param_groups[0]["lr"] = 0.01
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        for stage, module in first.stages.items():
            second.stages[stage].load_state_dict(module.state_dict())
        for x, y in random_batches(3):
            first.step(x, target=y)
            second.step(x, target=y)
        assert_equal_stages(first.stages, [*second.stages.values()])
        first.step(x, target=y, update=False)
        first.optimizer.zero_grad()
        assert all(p.grad is None for m in first.stages.values() for p in m.parameters())


def test_a_stage_that_loads_its_own_state_is_still_seen() -> None:
    with executor_of(sgd) as executor:
        assert len(executor.optimizer.param_groups) == 1
        for own in executor.optimizers.values():
            own.load_state_dict({**own.state_dict(), "state": {}})
        executor.optimizer.param_groups[0]["lr"] = 0.7
        assert {own.param_groups[0]["lr"] for own in executor.optimizers.values()} == {0.7}


def without_empty_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    given = list(parameters)
    groups = [[p for p in given if p.ndim > 1], [p for p in given if p.ndim < 2]]
    return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)


def test_what_has_no_meaning_is_refused() -> None:
    with executor_of(sgd) as executor:
        optimizer = executor.optimizer
        refused: dict[str, Callable[[], Any]] = {
            "leave out optimizer.step()": optimizer.step,
            "executor.optimizers[stage]": lambda: optimizer.add_param_group({"params": []}),
            "each of executor.optimizers": lambda: optimizer.register_step_post_hook(print),
            "belong to several stages": lambda: optimizer.param_groups[0].update(params=[]),
        }
        for text, call in refused.items():
            assert text in message_of(call)
        executor.optimizers[2].param_groups[0]["lr"] = 0.3
        with pytest.raises(ExecutionError, match=r"lr is 0\.1 .* stage 0, 0\.3 in that of stage 2"):
            lr_scheduler.StepLR(optimizer, 2)


def test_optimizers_that_do_not_go_together_are_refused() -> None:
    bare = numbered([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
    frozen = numbered([nn.Tanh(), nn.ReLU()])
    by_name = dict.fromkeys(bare[0].parameters(), "a")
    refused: list[tuple[Any, dict[int, nn.Module], str]] = [
        (without_empty_groups, bare, "stage 0 has 2 param groups, that of stage 1 1; give"),
        (None, bare, "because you step yourself"),
        (
            lambda ps: sgd([p for p in ps if by_name[p]]),
            frozen,
            "no stage of this rank has parameters, .* KeyError",
        ),
    ]
    for make, stages, text in refused:
        with executor_of(make, stages) as executor, pytest.raises(ExecutionError, match=text):
            _ = executor.optimizer
