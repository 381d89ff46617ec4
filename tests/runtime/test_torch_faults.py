"""What torch.distributed.pipelining 2.13 gets wrong at run time, each done right here."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.built_in import NAMES
from tests.literals import listed
from tests.runtime.kit import MSE, assert_equal_gradients, gradients, linear_stages, numbered
from tests.sweeps import sweep


def built(microbatches: int) -> schedir.Schedule:
    return schedir.build("1f1b", ranks=2, microbatches=microbatches)


def plain(
    stages: dict[int, nn.Module], x: Tensor, y: Tensor, microbatches: int, order: Any = None
) -> list[Tensor | None]:
    """The gradients of a copy, by accumulation weighed by samples."""
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    model.zero_grad()
    xs, ys = x.tensor_split(microbatches), y.tensor_split(microbatches)
    for m in order or range(microbatches):
        (MSE(model(xs[m]), ys[m]) * (len(ys[m]) / len(y))).backward()
    return gradients([model])


def test_outputs_and_losses_belong_to_their_microbatch_not_to_the_order_of_arrival() -> None:
    schedule = listed(2, "0 1", "0F0 0F1 0B1 0B0 0OPTIM_STEP", "1F1 1F0 1B1 1B0 1OPTIM_STEP")
    stages = numbered(linear_stages(2))
    x, y = torch.randn(2, 6, 4)
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        result = executor.step(x, target=y, outputs=True)
    model = nn.Sequential(*stages.values())
    outputs = [model(piece).detach() for piece in x.chunk(2)]
    assert result.outputs is not None
    assert all(torch.equal(a, b) for a, b in zip(result.outputs, outputs, strict=True))
    losses = [float(MSE(a, b)) for a, b in zip(outputs, y.chunk(2), strict=True)]
    assert result.loss == (3 * losses[0] + 3 * losses[1]) / 6
    assert_equal_gradients(gradients(stages.values()), plain(stages, x, y, 2, (1, 0)))


def test_two_steps_accumulate_two_gradients() -> None:
    stages = numbered(linear_stages(2))
    x, y = torch.randn(2, 8, 4)
    with Executor(built(4), stages, MSE, in_process=True) as e:
        e.step(x, target=y)
        once = copy.deepcopy(gradients(stages.values()))
        e.step(x, target=y)
    assert_equal_gradients(once, plain(stages, x, y, 4))
    for twice, grad in zip(gradients(stages.values()), once, strict=True):
        assert grad is not None
        torch.testing.assert_close(twice, 2 * grad)


def test_evaluation_leaves_pending_gradients_alone() -> None:
    stages = numbered(linear_stages(2))
    x, y = torch.randn(2, 8, 4)
    with Executor(built(4), stages, MSE, in_process=True) as e:
        e.step(x, target=y)
        before = copy.deepcopy(gradients(stages.values()))
        e.evaluate(x, target=y)
        e.infer(x)
    assert_equal_gradients(gradients(stages.values()), before)


def test_finding_shapes_runs_no_module_on_garbage() -> None:
    seen: list[Tensor] = []

    class Records(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:  # not in the fake run
                seen.append(x.detach().clone())
            return x

    torch.manual_seed(1)
    stages: dict[int, nn.Module] = {
        0: nn.Sequential(nn.Embedding(5, 4), nn.Flatten()),
        1: nn.Sequential(Records(), nn.BatchNorm1d(8)),
    }
    twin = copy.deepcopy(stages)
    tokens, y = torch.randint(5, (8, 2)), torch.randn(8, 8)
    with Executor(built(4), stages, MSE, in_process=True) as e:
        e.step(tokens, target=y)
    for piece in tokens.chunk(4):
        twin[1](twin[0](piece))
    assert len(seen) == 8  # four here, four in the twin
    assert torch.equal(stages[1][1].running_mean, twin[1][1].running_mean)  # type: ignore[index]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_what_runs(name: str) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=5)
    ran: list[str] = []

    class Traced(nn.Linear):
        stage = 0

        def forward(self, x: Tensor) -> Tensor:
            if type(x) is not Tensor:
                return super().forward(x)
            m = int(x.reshape(-1)[0].round())  # the microbatch's number, which all stages keep
            ran.append(f"{self.stage}F{m}")
            y = super().forward(x)
            y.register_hook(lambda _: ran.append(f"{self.stage}B{m}"))
            return y

    stages: dict[int, nn.Module] = {}
    for s in range(schedule.stages):
        stages[s] = Traced(1, 1)
        stages[s].stage = s  # type: ignore[assignment]
        nn.init.ones_(stages[s].weight)  # type: ignore[arg-type]
        nn.init.zeros_(stages[s].bias)  # type: ignore[arg-type]
    x = torch.arange(5.0).reshape(5, 1)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        executor.step(x, target=x + 1)
    for rank, actions in enumerate(schedule.flat):
        own = set(schedule.stages_of(rank))
        listed = [
            str(a).partition("@")[0] for a in actions if a.kind.name in ("FORWARD", "BACKWARD")
        ]
        assert [token for token in ran if int(token[0]) in own] == listed


@pytest.mark.parametrize("microbatches", [1, 2])
def test_fewer_microbatches_than_stages(microbatches: int) -> None:
    stages = numbered(linear_stages(4))
    x, y = torch.randn(2, 6, 4)
    schedule = schedir.build("1f1b", ranks=4, microbatches=microbatches)
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        executor.step(x, target=y)
    assert_equal_gradients(gradients(stages.values()), plain(stages, x, y, microbatches))


def test_an_uneven_last_microbatch_counts_its_samples() -> None:
    stages = numbered(linear_stages(2))
    x, y = torch.randn(2, 7, 4)
    with Executor(built(3), stages, MSE, in_process=True) as e:
        found = e.step(x, target=y).loss
    assert_equal_gradients(gradients(stages.values()), plain(stages, x, y, 3))
    model = nn.Sequential(*stages.values())
    assert found == pytest.approx(float(MSE(model(x), y).detach()), rel=1e-6)


@sweep("name, most", [("fill-drain", 32), ("1f1b", 3)], quick=[("1f1b", 3)])
def test_receive_buffers_live_as_long_as_they_are_used(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large to be posted ahead: 16 microbatches both ways, of which 1F1B has few in flight."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    peak = 0
    make: Callable[..., Tensor] = torch.empty_strided

    def counted(*args: Any, **options: Any) -> Tensor:
        nonlocal peak
        buffer = make(*args, **options)
        alive.add(buffer)
        peak = max(peak, len(alive))
        return buffer

    stages: dict[int, nn.Module] = {s: nn.Linear(1024, 1024) for s in range(2)}
    x = torch.randn(16 * 512, 1024)
    schedule = schedir.build(name, ranks=2, microbatches=16)
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        executor.step(x, target=x)
        monkeypatch.setattr(torch, "empty_strided", counted)
        executor._engine.training.reset()  # compiled anew, with these buffers
        executor.step(x, target=x)
    assert 0 < peak <= most
    assert not alive
