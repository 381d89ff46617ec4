"""What a training relies on from step to step: seeds, precision, hooks, losses that learn."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.built_in import NAMES, SYNCHRONOUS
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    adamw,
    assert_equal_stages,
    differing,
    noisy_stages,
    numbered,
    sgd,
)
from tests.runtime.recurrences import pipedream


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str) -> None:
    """Dropout included, which the number of the step seeds."""
    schedule = schedir.build(name, ranks=2, microbatches=3)
    batches = torch.randn(6, 2, 6, 4)

    def run(executor: Executor, steps: range) -> None:
        for step in steps:
            x, y = batches[step]
            executor.step(x, target=y, update=step % 2 == 0 or name not in SYNCHRONOUS)

    whole, parts = numbered(noisy_stages(schedule.stages)), numbered(noisy_stages(schedule.stages))
    with Executor(schedule, whole, MSE, sgd, in_process=True, seed=5) as executor:
        assert executor.steps == 0
        run(executor, range(6))
        assert executor.steps == 6
    with Executor(schedule, parts, MSE, sgd, in_process=True, seed=5) as executor:
        run(executor, range(3))
        kept = {s: copy.deepcopy(module.state_dict()) for s, module in parts.items()}
        grads = [p.grad for module in parts.values() for p in module.parameters()]
        steps = executor.steps
    resumed = numbered(noisy_stages(schedule.stages))
    for s, module in resumed.items():
        module.load_state_dict(kept[s])
    for p, grad in zip((p for m in resumed.values() for p in m.parameters()), grads, strict=True):
        p.grad = grad
    with Executor(schedule, resumed, MSE, sgd, in_process=True, seed=5, step=steps) as executor:
        run(executor, range(3, 6))
        assert executor.steps == 6
    assert_equal_stages(resumed, list(whole.values()))


@pytest.mark.parametrize("step", [-1, 1.0, "2", True])
def test_a_step_that_is_no_number_is_refused(step: Any) -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=1)
    with pytest.raises(schedir.ExecutionError, match="step must be an int of at least 0, not"):
        Executor(schedule, {0: nn.Linear(1, 1)}, MSE, step=step)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "5", True - 1])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=1)
    with pytest.raises(schedir.ExecutionError, match="timeout must be a number of seconds above 0"):
        Executor(schedule, {0: nn.Linear(1, 1)}, MSE, timeout=timeout)


class Island(torch.autograd.Function):
    """Says in which types it is differentiated."""

    seen: list[tuple[torch.dtype, bool]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        Island.seen.append((product.dtype, torch.is_autocast_enabled("cpu")))
        return grad


class InFloat(nn.Module):
    """A float32 island of the caller's autocast, whose backward multiplies matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(self.inner(y.float()))
        return Island.apply(y)  # type: ignore[no-any-return, no-untyped-call]


class Watching(torch.optim.SGD):
    seen: list[bool] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> Any:
        Watching.seen.append(torch.is_autocast_enabled("cpu"))
        return super().step(closure)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_autocast_is_for_forwards_alone(name: str, recompute: bool) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=2)
    stages: dict[int, nn.Module] = {s: InFloat() for s in range(schedule.stages)}
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    x, y = torch.randn(2, 4, 4)
    Island.seen.clear()
    Watching.seen.clear()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return Watching(parameters, lr=0.1)

    options: dict[str, Any] = {"in_process": True, "recompute": recompute}
    with (
        Executor(schedule, stages, MSE, optimizer, **options) as executor,
        torch.autocast("cpu", torch.bfloat16),
    ):
        executor.step(x, target=y)
        executor.step(x, target=y)
        assert torch.is_autocast_enabled("cpu")
    assert set(Island.seen) == {(torch.float32, False)}
    assert set(Watching.seen) == {False}
    plain = sgd(model.parameters())
    for _ in range(2):
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = MSE(model(a), b)
            (loss / 2).backward()
        plain.step()
        plain.zero_grad()
    assert_equal_stages(stages, list(model))


@pytest.mark.parametrize("split", [False, True])
def test_hooks_on_parameters_run_at_every_version(split: bool) -> None:
    """A mask on a weight's gradient, and what looks at it once it has been added."""
    schedule = schedir.build("pipedream", ranks=2, microbatches=4)
    if split:
        schedule = listed(
            4,
            "0 1",
            "0F0 0F1 0I0 0W0 0OPTIM_STEP 0F2 0I1 0W1 0OPTIM_STEP 0F3 0I2 0W2 0OPTIM_STEP "
            "0I3 0W3 0OPTIM_STEP",
            "1F0 1B0 1OPTIM_STEP 1F1 1B1 1OPTIM_STEP 1F2 1B2 1OPTIM_STEP 1F3 1B3 1OPTIM_STEP",
        )
    torch.manual_seed(0)
    stages = {s: nn.Linear(4, 4) for s in range(2)}
    before = [stage.weight.detach().clone() for stage in stages.values()]
    called = []
    mask = torch.ones(4, 4)
    mask[1] = 0.0
    whole = [copy.deepcopy(stage) for stage in stages.values()]
    for stage in stages.values():
        stage.weight.register_hook(lambda grad: grad * mask)
        stage.weight.register_post_accumulate_grad_hook(lambda p: called.append(p))
    x, y = torch.randn(2, 8, 4)
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        executor.step(x, target=y)
    for s, stage in stages.items():
        assert torch.equal(stage.weight[1], before[s][1])
        assert not torch.equal(stage.weight[0], before[s][0])
        assert sum(p is stage.weight for p in called) == 4
    pieces = list(zip(x.chunk(4), y.chunk(4), strict=True))
    # The recurrence moves gradients from copies: masked rows are masked in the update.
    plain_step(whole, MSE, [Masked(stage, mask) for stage in whole], pieces, pipedream(2, 4))
    assert all(torch.equal(stage.weight, whole[s].weight) for s, stage in stages.items())


class Masked(torch.optim.SGD):
    """The recurrence's optimiser with the mask in its step."""

    def __init__(self, stage: nn.Linear, mask: Tensor) -> None:
        super().__init__(stage.parameters(), lr=0.1)
        self.weight, self.mask = stage.weight, mask

    def step(self, closure: Any = None) -> Any:
        if self.weight.grad is not None:
            self.weight.grad = self.weight.grad * self.mask
        return super().step(closure)


class Learned(nn.Module):
    """A loss with a temperature, dropout and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return MSE(self.norm(output) * self.scale, target)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_a_loss_with_parameters_is_trained(name: str, recompute: bool) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=4)
    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {s: nn.Linear(4, 4) for s in range(2)}
    loss_fn = Learned()
    whole = [*copy.deepcopy(list(stages.values())), copy.deepcopy(loss_fn)]
    x, y = torch.randn(2, 8, 4)
    options: dict[str, Any] = {"in_process": True, "recompute": recompute}
    pieces = list(zip(x.chunk(4), y.chunk(4), strict=True))
    with Executor(schedule, stages, loss_fn, adamw, **options) as executor:
        for _ in range(3):
            executor.step(x, target=y)
        assert loss_fn.training
        statistics = loss_fn.norm.running_mean
        evaluated = executor.evaluate(x, target=y).loss
        assert loss_fn.training
        assert loss_fn.norm.running_mean is statistics
    last = nn.ModuleList([whole[1], whole[2]])
    if name == "1f1b":
        optimizers = [adamw(whole[0].parameters()), adamw(last.parameters())]
        for _ in range(3):
            for a, b in pieces:
                (whole[2](whole[1](whole[0](a)), b) / 4).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert differing(loss_fn, whole[2]) == []
    assert not torch.equal(loss_fn.scale, torch.ones(4))
    for module in (*stages.values(), loss_fn):
        module.eval()
    with torch.no_grad():
        found = sum(float(loss_fn(stages[1](stages[0](a)), b)) for a, b in pieces) / 4
    assert evaluated == pytest.approx(found)


@pytest.mark.parametrize("optimizer", [sgd, None])
def test_a_parameter_that_nobody_steps_is_said(
    optimizer: Callable[[Any], torch.optim.Optimizer] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a function the loss's parameters can't be seen before the loss is computed."""
    learned = Learned()
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    x = torch.randn(4, 4)
    with (
        caplog.at_level(logging.WARNING, "schedir"),
        Executor(schedule, {0: nn.Linear(4, 4)}, lambda o, t: learned(o, t), optimizer) as executor,
    ):
        executor.step(x, target=x)
    said = [record.getMessage() for record in caplog.records]
    if optimizer is None:  # the caller steps what it likes
        assert said == []
    else:
        assert len(said) == 3  # a scale, and a norm's weight and bias
        assert all("float32[4], that no optimizer of this executor steps" in text for text in said)


def test_a_parameter_that_the_optimizer_leaves_out_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of_weights(parameters: Any) -> torch.optim.Optimizer:
        return sgd([p for p in parameters if p.dim() == 2])

    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    x = torch.randn(4, 4)
    with (
        caplog.at_level(logging.WARNING, "schedir"),
        Executor(schedule, {0: nn.Linear(4, 4)}, MSE, of_weights) as executor,
    ):
        executor.step(x, target=x)
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        "float32[4], that no optimizer of this executor steps; the last stage's optimizer" in said
    )
    assert "leaves it out: freeze it" in said


@pytest.mark.parametrize("detaches", [False, True])
def test_a_loss_that_nothing_is_trained_by_is_said(detaches: bool) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages: dict[int, nn.Module] = {s: nn.Linear(4, 4) for s in range(2)}
    if not detaches:
        for stage in stages.values():
            stage.requires_grad_(False)

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return MSE(y.detach() if detaches else y, target)

    x = torch.randn(4, 4)
    with (
        Executor(schedule, stages, loss_fn, sgd, in_process=True) as executor,
        pytest.raises(schedir.ExecutionError, match="1B0: the loss depends on nothing that req"),
    ):
        executor.step(x, target=x)


def test_optimisers_that_ask_for_a_closure_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    with pytest.raises(schedir.ExecutionError, match=r"LBFGS, of stage 0, .* closure"):
        Executor(schedule, {0: nn.Linear(4, 4)}, MSE, torch.optim.LBFGS)


def test_training_under_inference_mode_is_refused() -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    x = torch.randn(4, 4)
    module = nn.Linear(4, 4)
    with Executor(schedule, {0: module}, MSE, sgd) as executor:
        with torch.inference_mode():
            assert executor.evaluate(x, target=x).loss == pytest.approx(float(MSE(module(x), x)))
            with pytest.raises(schedir.ExecutionError, match=r"under torch.inference_mode\(\)"):
                executor.step(x, target=x)
        executor.step(x, target=x)
    with torch.inference_mode():
        made = nn.Linear(4, 4)
    with pytest.raises(schedir.ExecutionError, match="weight was made under torch"):
        Executor(schedule, {0: made}, MSE, sgd)


def test_sparse_gradients_train_but_are_not_clipped() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    tokens, y = torch.randint(7, (4, 3)), torch.randn(4, 3, 4)

    def stages() -> dict[int, nn.Module]:
        torch.manual_seed(0)
        return {0: nn.Embedding(7, 4, sparse=True), 1: nn.Linear(4, 4)}

    mine, whole = stages(), list(stages().values())
    with Executor(schedule, mine, MSE, sgd, in_process=True) as executor:
        executor.step(tokens, target=y)
    optimizers = [sgd(stage.parameters()) for stage in whole]
    for a, b in zip(tokens.chunk(2), y.chunk(2), strict=True):
        (MSE(whole[1](whole[0](a)), b) / 2).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_equal_stages(mine, whole)
    with (
        Executor(schedule, stages(), MSE, sgd, in_process=True, clip_grad_norm=1.0) as executor,
        pytest.raises(
            schedir.ExecutionError, match=r"shape \[7, 4\] is sparse and can't be clipped"
        ),
    ):
        executor.step(tokens, target=y)
