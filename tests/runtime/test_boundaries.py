"""What is agreed of a boundary, and what is refused that should not be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.runtime.boundaries.boundary import meta_of, payload
from tests.literals import listed
from tests.runtime.kit import MSE

SPLIT = listed(2, "0 1", "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W0 1W1", name="split")
WHOLE = listed(2, "0 1", "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", name="whole")


def train(
    schedule: schedir.Schedule, stages: dict[int, nn.Module], x: Tensor, y: Tensor, **options: Any
) -> None:
    """One step, and its gradients beside those of the whole model."""
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    number = schedule.microbatches
    with Executor(schedule, stages, MSE, in_process=True, **options) as executor:
        executor.step(x, target=y, update=False)
        executor.evaluate(x, target=y)
    for a, b in zip(x.tensor_split(number), y.tensor_split(number), strict=True):
        (MSE(model(a), b) * (len(a) / len(x))).backward()
    mine = [p.grad for stage in stages.values() for p in stage.parameters()]
    for grad, p in zip(mine, model.parameters(), strict=True):
        assert (grad is None) == (p.grad is None)
        if grad is not None and p.grad is not None:
            torch.testing.assert_close(grad, p.grad)


class Einsum(nn.Module):
    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.equation = equation
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.weight)


@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("equation", ["bij,jk->bik", "bij,jk->ikb", "bij,jk->kbi"])
def test_one_row_a_microbatch_after_an_einsum(equation: str, rows: int) -> None:
    """The strides of dimensions of one element differ, and say nothing."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    first = Einsum(equation, 3, 4)
    stages: dict[int, nn.Module] = {0: first, 1: nn.Tanh()}
    model = nn.Sequential(copy.deepcopy(first), nn.Tanh())
    x = torch.randn(rows, 2, 3)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    with Executor(schedule, stages, loss_fn, in_process=True) as executor:
        executor.step(x, target=x, update=False)
    for part in x.tensor_split(2):
        (loss_fn(model(part), part) * (len(part) / rows)).backward()
    assert first.weight.grad is not None
    torch.testing.assert_close(first.weight.grad, next(model.parameters()).grad)


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(), nn.MaxPool2d(1)])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (1, 1)])
def test_images_in_channels_last(channels: int, shape: tuple[int, int], after: nn.Module) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {
        0: nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), after),
        1: nn.Conv2d(channels, 2, 1),
    }
    x = torch.randn(4, 3, *shape).to(memory_format=torch.channels_last)
    train(schedule, stages, x, torch.randn(4, 2, *shape))


class Turns(nn.Module):
    """The gradient of its input lies otherwise in memory than the input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous() * self.bias


@pytest.mark.parametrize("schedule", [SPLIT, WHOLE], ids=lambda s: s.name)
def test_a_gradient_laid_out_otherwise(schedule: schedir.Schedule) -> None:
    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {0: nn.Linear(4, 4), 1: Turns()}
    x = torch.randn(8, 4)
    train(schedule, stages, x, torch.randn(8, 4))


class Mixed(nn.Module):
    """A float without gradient, a complex number with one, and integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        if float(y.detach().sum()) > 1e9:  # which no fake run can tell
            raise RuntimeError
        return x.detach() * 0.5, torch.complex(y, y), (x > 0).long()


class Unmixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, plain: Tensor, number: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(plain + (number * (1 - 1j)).real) * mask
        return y


class Tuple(nn.Module):
    """The whole model in one piece."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(*self.first(x))
        return y


@pytest.mark.parametrize("schedule", [SPLIT, WHOLE], ids=lambda s: s.name)
def test_a_declared_boundary_of_several_kinds(schedule: schedir.Schedule) -> None:
    stages: dict[int, nn.Module] = {0: Mixed(), 1: Unmixes()}
    model = Tuple(*copy.deepcopy(list(stages.values())))
    example = (
        torch.empty(2, 4, device="meta"),
        torch.empty(2, 4, dtype=torch.complex64, device="meta"),
        torch.empty(2, 4, dtype=torch.long, device="meta"),
    )
    x, y = torch.randn(2, 4, 4)
    with Executor(schedule, stages, MSE, in_process=True, boundaries={0: example}) as executor:
        executor.step(x, target=y)
        executor.evaluate(x, target=y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (MSE(model(a), b) / 2).backward()
    mine = [p.grad for stage in stages.values() for p in stage.parameters()]
    for grad, p in zip(mine, model.parameters(), strict=True):
        assert grad is not None
        assert p.grad is not None
        assert torch.equal(grad, p.grad)


def test_what_two_boundaries_differ_in_is_printed() -> None:
    one, other = torch.empty(2, 3, 4), torch.empty(2, 3, 4).transpose(0, 1)
    assert str(meta_of(one)) == "float32[2, 3, 4]"
    assert str(meta_of(other)) == "float32[3, 2, 4] of stride [4, 12, 1]"
    assert str(meta_of(torch.empty(1, 3).t())) == "float32[3, 1]"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.randn(3),
        torch.randn(2, 3).t(),
        torch.randn(1, 3).t(),
        torch.randn(2, 1, 3).transpose(0, 2),
        torch.randn(0, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 3)[:, ::2],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=lambda tensor: f"{list(tensor.shape)} {list(tensor.stride())}",
)
def test_a_payload_holds_the_elements_of_a_tensor(tensor: Tensor) -> None:
    meta = meta_of(tensor)
    buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    sent, received = payload(tensor, meta), payload(buffer, meta)
    assert sent.shape == received.shape
    assert sent.is_contiguous()
    assert received.is_contiguous()
    received.copy_(sent)
    assert torch.equal(buffer, tensor)
    assert meta.describes(tensor)
    assert meta.describes(buffer)
