"""Copies of a call's tensors, which the first call of a shape trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.runtime.stage.stage import copy_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

CONJUGATED = torch.ones(2, dtype=torch.complex64)


OFFSETS = torch.tensor([0, 1, 3])  # tensors over the same offsets have one shape


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


@pytest.mark.parametrize(
    "pair",
    [
        (jagged(torch.zeros(3)), jagged(torch.ones(3))),
        (torch.zeros(2, 2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (CONJUGATED, CONJUGATED.conj()),
        (CONJUGATED.real.requires_grad_(), CONJUGATED.real.detach()),
        (torch.zeros(0, 2), torch.zeros(0, 2)),
        (torch.zeros(4)[:2], torch.ones(4)[2:]),
    ],
    ids=["jagged", "COO", "conjugated", "detached", "empty", "strided"],
)
def test_what_differs_is_copied_apart_and_what_is_one_stays_one(
    pair: tuple[Tensor, Tensor],
) -> None:
    one, other, again, (copy,) = copy_of((*pair, pair[0], [pair[1]]))
    assert one is again
    assert other is copy
    assert one is not other
    assert one is not pair[0]
    for found, given in zip((one, other), pair, strict=True):
        assert torch.equal(_values(found), _values(given))
        assert found.requires_grad == given.requires_grad
        assert found.layout == given.layout


def _values(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor.to_dense()


class Difference(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(2, 2), of

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        q, k = map(self.of, pair)
        out: Tensor = self.linear(q - k)
        return out


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (jagged, Tensor.values),
        (Tensor.to_sparse, Tensor.to_dense),
        (Tensor.to_sparse_csr, Tensor.to_dense),
    ],
    ids=["jagged", "COO", "CSR"],
)
def test_the_first_call_has_the_loss_of_the_second(make: Any, of: Any) -> None:
    torch.manual_seed(0)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages: dict[int, nn.Module] = {0: Difference(of), 1: nn.Linear(2, 1)}
    with Executor(schedule, stages, nn.functional.mse_loss, in_process=True) as executor:
        batch = [(make(torch.randn(3, 2)), make(torch.randn(3, 2))) for _ in range(2)]
        target = [torch.zeros(3, 1)] * 2
        first, second = (executor.step(batch, target=target).loss for _ in range(2))
    assert first == second
