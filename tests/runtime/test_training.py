"""What a training relies on from step to step: seeds, precision, hooks, losses that learn."""

from __future__ import annotations

import copy
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
    linear_stages,
    message_of,
    microbatches_of,
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

    def run(stages: dict[int, nn.Module], first: int, end: int) -> None:
        given: dict[str, Any] = {"in_process": True, "seed": 5, "step": first}
        with Executor(schedule, stages, MSE, sgd, **given) as executor:
            assert executor.steps == first
            for step in range(first, end):
                x, y = batches[step]
                executor.step(x, target=y, update=step % 2 == 0 or name not in SYNCHRONOUS)
            assert executor.steps == end

    whole, parts, resumed = (numbered(noisy_stages(schedule.stages)) for _ in range(3))
    run(whole, 0, 6)
    run(parts, 0, 3)
    for s, module in resumed.items():
        module.load_state_dict(copy.deepcopy(parts[s].state_dict()))
        for p, kept in zip(module.parameters(), parts[s].parameters(), strict=True):
            p.grad = kept.grad
    run(resumed, 3, 6)
    assert_equal_stages(resumed, list(whole.values()))


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("step", [-1, 1.0, "2", True], "step must be an int of at least 0, not"),
        (
            "timeout",
            [0, -1.0, float("nan"), float("inf"), "5", True - 1],
            "timeout must be a number of seconds above 0",
        ),
    ],
)
def test_a_step_or_timeout_that_is_no_number_is_refused(
    name: str, wrong: list[Any], text: str
) -> None:
    for value in wrong:
        assert text in message_of(executor_of_one, **{name: value})


def executor_of_one(optimizer: Any = sgd, loss_fn: Any = MSE, **options: Any) -> Executor:
    """Of one stage and two microbatches."""
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    stages = options.pop("stages", None) or {0: nn.Linear(4, 4)}
    return Executor(schedule, stages, loss_fn, optimizer, **options)


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
        self.linear, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(self.inner(y.float()))
        return Island.apply(y)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_autocast_is_for_forwards_alone(name: str, recompute: bool) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=2)
    stages: dict[int, nn.Module] = {s: InFloat() for s in range(schedule.stages)}
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    x, y = torch.randn(2, 4, 4)
    Island.seen.clear()
    stepped: list[bool] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = sgd(parameters)
        made.register_step_pre_hook(lambda *_: stepped.append(torch.is_autocast_enabled("cpu")))
        return made

    bfloat16 = torch.autocast("cpu", torch.bfloat16)
    options: dict[str, Any] = {"in_process": True, "recompute": recompute}
    with Executor(schedule, stages, MSE, optimizer, **options) as executor, bfloat16:
        executor.step(x, target=y)
        executor.step(x, target=y)
        assert torch.is_autocast_enabled("cpu")
    assert set(Island.seen) == {(torch.float32, False)}
    assert set(stepped) == {False}
    plain = sgd(model.parameters())
    for _ in range(2):
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            with bfloat16:
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
    whole = copy.deepcopy([*stages.values()])
    before = [stage.weight.detach().clone() for stage in whole]
    called = []
    mask = torch.ones(4, 4)
    mask[1] = 0.0
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
    pieces = microbatches_of((x, y), 4)
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
    stages, loss_fn = linear_stages(), Learned()
    whole, plain_loss = linear_stages(), Learned()
    x, y = torch.randn(2, 8, 4)
    pieces = microbatches_of((x, y), 4)
    options: dict[str, Any] = {"in_process": True, "recompute": recompute}
    with Executor(schedule, numbered(stages), loss_fn, adamw, **options) as executor:
        for _ in range(3):
            executor.step(x, target=y)
        assert loss_fn.training
        statistics = loss_fn.norm.running_mean
        evaluated = executor.evaluate(x, target=y).loss
        assert loss_fn.training
        assert loss_fn.norm.running_mean is statistics
    if name == "1f1b":
        last = nn.ModuleList([whole[1], plain_loss])
        optimizers = [adamw(whole[0].parameters()), adamw(last.parameters())]
        for _ in range(3):
            plain_step(whole, plain_loss, optimizers, pieces)
        assert differing(loss_fn, plain_loss) == []
    assert not torch.equal(loss_fn.scale, torch.ones(4))
    for module in (*stages, loss_fn):
        module.eval()
    with torch.no_grad():
        found = sum(float(loss_fn(stages[1](stages[0](a)), b)) for a, b in pieces) / 4
    assert evaluated == pytest.approx(found)


@pytest.mark.parametrize("detaches", [False, True])
def test_a_loss_that_nothing_is_trained_by_is_said(detaches: bool) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = numbered(linear_stages())
    for stage in stages.values():
        stage.requires_grad_(detaches)

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return MSE(y.detach() if detaches else y, target)

    x = torch.randn(4, 4)
    with Executor(schedule, stages, loss_fn, sgd, in_process=True) as executor:
        said = message_of(executor.step, x, target=x)
    assert "1B0: the loss depends on nothing that req" in said


def test_optimisers_that_ask_for_a_closure_are_refused() -> None:
    with pytest.raises(schedir.ExecutionError, match=r"LBFGS, of stage 0, .* closure"):
        executor_of_one(torch.optim.LBFGS)


def test_training_under_inference_mode_is_refused() -> None:
    x = torch.randn(4, 4)
    module = nn.Linear(4, 4)
    with executor_of_one(stages={0: module}) as executor:
        with torch.inference_mode():
            assert executor.evaluate(x, target=x).loss == pytest.approx(float(MSE(module(x), x)))
            said = message_of(executor.step, x, target=x)
            made = nn.Linear(4, 4)
        executor.step(x, target=x)
    assert "under torch.inference_mode()" in said
    assert "weight was made under torch" in message_of(executor_of_one, stages={0: made})


def test_sparse_gradients_train_but_are_not_clipped() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    tokens, y = torch.randint(7, (4, 3)), torch.randn(4, 3, 4)
    mine: list[nn.Module] = [nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)]
    whole, other = copy.deepcopy(mine), copy.deepcopy(mine)
    with Executor(schedule, numbered(mine), MSE, sgd, in_process=True) as executor:
        executor.step(tokens, target=y)
    optimizers = [sgd(stage.parameters()) for stage in whole]
    plain_step(whole, MSE, optimizers, microbatches_of((tokens, y), 2))
    assert_equal_stages(numbered(mine), whole)
    options: dict[str, Any] = {"in_process": True, "clip_grad_norm": 1.0}
    with Executor(schedule, numbered(other), MSE, sgd, **options) as executor:
        said = message_of(executor.step, tokens, target=y)
    assert "shape [7, 4] is sparse and can't be clipped" in said
