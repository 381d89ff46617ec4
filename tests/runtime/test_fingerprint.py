"""The number by which ranks compare their batches: what it tells apart, and what it must not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.runtime.program.handshake import differ, fingerprint

Drawn = torch.Generator


def in_border(draw: Drawn) -> Tensor:
    """Images of which every line begins and ends with zeros."""
    images = torch.zeros(16, 1, 32, 32)
    images[..., 2:-2, 2:-2] = torch.rand(16, 1, 28, 28, generator=draw)
    return images


def padded(draw: Drawn) -> Tensor:
    """Token ids: sentences of up to 50, that all begin with the same one."""
    tokens = torch.randint(2, 30000, (64, 512), generator=draw)
    tokens[:, 0] = 1
    lengths = torch.randint(4, 50, (64, 1), generator=draw)
    return tokens.masked_fill(torch.arange(512) >= lengths, 0)


def one_hot(draw: Drawn) -> Tensor:
    return torch.nn.functional.one_hot(torch.randint(1000, (128,), generator=draw), 1000).float()


def other_rows(draw: Drawn) -> Tensor:
    """The same samples in another order."""
    return torch.eye(512)[torch.randperm(512, generator=draw)]


def other_order(draw: Drawn) -> Tensor:
    """Numbers whose sum is always the same."""
    return torch.randperm(2048, generator=draw)


def half_empty(draw: Drawn) -> Tensor:
    """More than is looked at: as many stretches as images, each of which begins with zeros."""
    images = torch.zeros(256, 2, 64, 64)
    images[:, 1] = torch.rand(256, 64, 64, generator=draw)
    return images


DRAWS = [in_border, padded, one_hot, other_rows, other_order, half_empty]


@pytest.mark.parametrize("draw", DRAWS)
def test_batches_that_are_mostly_alike_are_told_apart(draw: Callable[[Drawn], Tensor]) -> None:
    found = {fingerprint(draw(torch.Generator().manual_seed(seed))) for seed in range(4)}
    assert len(found) == 4


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 9000),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]),
    st.data(),
)
def test_any_element_counts(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.randint(0, 2, (size,)).to(dtype)
    changed = values.clone()
    place = data.draw(st.integers(0, size - 1))
    changed[place] = values[place] == 0
    assert differ(fingerprint(values), fingerprint(changed))
    assert fingerprint(values) == fingerprint(values.clone())


def test_equal_values_are_equal_in_any_layout() -> None:
    images = torch.rand(4, 3, 64, 64)
    assert fingerprint(images) == fingerprint(images.to(memory_format=torch.channels_last))
    images = torch.rand(32, 4, 128, 129)  # more than is looked at
    assert fingerprint(images) == fingerprint(images.to(memory_format=torch.channels_last))
    expanded = torch.ones(1).expand(10**6, 10**6)  # of which no copy is made
    assert fingerprint(expanded) != fingerprint(torch.ones(10**6))
    tokens = torch.randint(9, (8, 1025))
    assert fingerprint(tokens[:, 1:]) == fingerprint(tokens[:, 1:].clone())
    sums = torch.frombuffer(bytearray(40001), dtype=torch.uint8)[1:]  # at an odd address
    assert fingerprint(sums) == fingerprint(torch.zeros(40000, dtype=torch.uint8))
    assert fingerprint(torch.empty(0, 3)) == fingerprint(torch.empty(0, 3))


@dataclasses.dataclass
class Known:
    """A container that torch has been told of."""

    a: Tensor


pytree.register_dataclass(Known)


def test_what_a_container_holds_counts() -> None:
    x, y = torch.zeros(4), torch.ones(4)
    for hold in (lambda t: (Known(t),), lambda t: {"a": [t, None, 3, "text"]}):
        assert differ(fingerprint(hold(x)), fingerprint(hold(y)))
        assert fingerprint(hold(x)) == fingerprint(hold(x.clone()))


@pytest.mark.parametrize("layout", [torch.jagged, torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_that_are_made_of_others(layout: torch.layout) -> None:
    def made(values: Tensor) -> Tensor:
        if layout is torch.jagged:
            return torch.nested.nested_tensor([values[:1], values[1:]], layout=layout)
        return values.to_sparse(layout=layout)

    same, again, other = made(torch.eye(3)), made(torch.eye(3)), made(torch.eye(3) * 2)
    if layout is torch.jagged:
        same.sum(1)  # which it keeps something of
    assert fingerprint(same) == fingerprint(again)
    assert differ(fingerprint(same), fingerprint(other))
