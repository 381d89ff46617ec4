"""What is agreed of a boundary, and what is refused that should not be."""

from __future__ import annotations

import math

import pytest
import torch
from reference import Loss
from torch import Tensor, nn

import schedir
from schedir.errors import ExecutionError
from schedir.runtime.boundary import boundary_of, meta_of, payload
from tests.literals import listed
from tests.runtime.kit import MSE, Calls, Twins, linear_stages, microbatches_of

SPLIT = listed(2, "0 1", "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W0 1W1", name="split")
WHOLE = listed(2, "0 1", "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", name="whole")


TWO = schedir.build("1f1b", ranks=2, microbatches=2)


def train(
    schedule: schedir.Schedule, stages: list[nn.Module], x: Tensor, y: Tensor, loss_fn: Loss = MSE
) -> None:
    """One step, and its gradients beside those of the whole model."""
    twins = Twins(stages, schedule)
    with twins.executor(loss_fn, optimizer=None) as executor:
        executor.step(x, target=y)
        executor.evaluate(x, target=y)
    model = nn.Sequential(*twins.whole)
    for a, b in microbatches_of((x, y), schedule.microbatches):
        (loss_fn(model(a), b) * (len(a) / len(x))).backward()
    for s, stage in twins.local.items():
        mine, theirs = ([p.grad for p in one.parameters()] for one in (stage, twins.whole[s]))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("equation", ["bij,jk->bik", "bij,jk->ikb", "bij,jk->kbi"])
def test_one_row_a_microbatch_after_an_einsum(equation: str, rows: int) -> None:
    """The strides of dimensions of one element differ, and say nothing."""
    x, layer = torch.randn(rows, 2, 3), nn.Linear(4, 3, bias=False)
    first = Calls(lambda layer, x: torch.einsum(equation, x, layer.weight), layer)
    train(TWO, [first, nn.Tanh()], x, x, lambda output, target: output.square().mean())


@pytest.mark.parametrize("after", [nn.Identity(), nn.ReLU(), nn.MaxPool2d(1)])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (1, 1)])
def test_images_in_channels_last(channels: int, shape: tuple[int, int], after: nn.Module) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), after)
    x = torch.randn(4, 3, *shape).to(memory_format=torch.channels_last)
    train(TWO, [first, nn.Conv2d(channels, 2, 1)], x, torch.randn(4, 2, *shape))


@pytest.mark.parametrize("schedule", [SPLIT, WHOLE], ids=lambda s: s.name)
def test_a_gradient_laid_out_otherwise(schedule: schedir.Schedule) -> None:
    torch.manual_seed(0)
    turns = Calls(lambda layer, x: layer(x.t().contiguous()), nn.Linear(4, 4))
    train(schedule, [nn.Linear(4, 4), turns], torch.randn(8, 4), torch.randn(8, 4))


def mixed(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """A float without gradient, a complex number with one, and integers."""
    y = layer(x)
    if float(y.detach().sum()) > 1e9:  # which no fake run can tell
        raise RuntimeError
    return x.detach() * 0.5, torch.complex(y, y), (x > 0).long()


@pytest.mark.parametrize("schedule", [SPLIT, WHOLE], ids=lambda s: s.name)
def test_a_declared_boundary_of_several_kinds(schedule: schedir.Schedule) -> None:
    one, other = linear_stages()
    unmixes = Calls(lambda layer, a, b, mask: layer(a + (b * (1 - 1j)).real) * mask, other)
    twins = Twins([Calls(mixed, one), unmixes], schedule)
    kinds = torch.float32, torch.complex64, torch.long
    example = tuple(torch.empty(2, 4, dtype=kind, device="meta") for kind in kinds)
    x, y = torch.randn(2, 4, 4)
    with twins.executor(optimizer=None, boundaries={0: example}) as executor:
        executor.step(x, target=y)
        executor.evaluate(x, target=y)
    twins.accumulate((x, y))
    twins.assert_equal_gradients()


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


def test_a_constant_that_is_no_number_equals_itself() -> None:
    boundary = boundary_of((torch.zeros(2), math.nan))
    assert len(boundary.tensors((torch.ones(2), math.nan), 0)) == 1
    with pytest.raises(ExecutionError, match="was agreed with the next"):
        boundary.tensors((torch.ones(2), 0.0), 0)


@pytest.mark.parametrize("layout", [torch.jagged, torch.sparse_coo])
def test_what_is_not_dense_does_not_travel(layout: torch.layout) -> None:
    x = torch.eye(2).to_sparse()
    if layout is torch.jagged:
        x = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=layout)
    with pytest.raises(ExecutionError, match=f"not one of layout {layout}: return its parts"):
        boundary_of([x])
