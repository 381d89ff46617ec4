"""Stages that share memory without saying so: refused wherever the memory is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.runtime.arguments import shared_memory
from schedir.training import deferred, partition
from tests.runtime.kit import MSE, sgd

Share = Callable[[nn.Linear, nn.Linear], object]


def same_object(first: nn.Linear, last: nn.Linear) -> None:
    last.weight = first.weight


def same_data(first: nn.Linear, last: nn.Linear) -> None:
    last.weight.data = first.weight.data


def a_view(first: nn.Linear, last: nn.Linear) -> None:
    last.weight = nn.Parameter(first.weight.detach().T)


def one_row(first: nn.Linear, last: nn.Linear) -> None:
    last.bias = nn.Parameter(first.weight.detach()[1])


def a_buffer(first: nn.Linear, last: nn.Linear) -> None:
    last.register_buffer("table", first.weight.detach())


def an_attribute(first: nn.Linear, last: nn.Linear) -> None:
    last.__dict__["table"] = first.weight.T


def in_a_list(first: nn.Linear, last: nn.Linear) -> None:
    last.__dict__["tables"] = [{"of": (first.weight,)}]


def a_module_in_a_tuple(first: nn.Linear, last: nn.Linear) -> None:
    last.__dict__["other"] = (first,)


SHARED = [
    same_object,
    same_data,
    a_view,
    one_row,
    a_buffer,
    an_attribute,
    in_a_list,
    a_module_in_a_tuple,
]
TIES: Any = [[(0, "weight"), (1, "weight")]]


@pytest.mark.parametrize("optimizer", [None, sgd])
@pytest.mark.parametrize("share", SHARED)
def test_shared_memory_is_refused(share: Share, optimizer: Any) -> None:
    """With ties as well: each copy is stepped by itself."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    share(first, last)
    for ties in ((), TIES):
        with pytest.raises(schedir.ExecutionError, match=r"0 and 1 hold the same memory.*ties="):
            Executor(schedule, {0: first, 1: last}, MSE, optimizer, ties=ties, in_process=True)


def test_chunks_of_one_rank_and_the_loss_are_looked_at() -> None:
    class Loss(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

    chunks = schedir.build("interleaved-1f1b", ranks=1, microbatches=2, chunks=2)
    first = nn.Linear(4, 4)
    with pytest.raises(schedir.ExecutionError, match=r"weight of the former and loss\.weight of"):
        Executor(chunks, {0: first, 1: nn.Linear(4, 4)}, Loss(first.weight.detach()))


def test_what_a_stage_lists_of_its_own_is_its_own() -> None:
    """Come to before the parameter itself, it hides that from nobody."""
    outer = nn.Sequential(nn.Linear(4, 4))
    outer.__dict__["listed"] = [outer[0].weight]
    last = nn.Linear(4, 4)
    assert shared_memory({0: outer, 1: last}) is None
    in_a_list(outer[0], last)  # type: ignore[arg-type]
    assert shared_memory({0: outer, 1: last}) is not None


def test_shared_running_statistics_are_refused() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    norm = nn.BatchNorm1d(4, affine=False)
    stages = {s: nn.Sequential(nn.Linear(4, 4), norm) for s in range(2)}
    with pytest.raises(schedir.ExecutionError, match=r"1\.running_mean of the former"):
        Executor(schedule, {**stages}, MSE, in_process=True)


def test_what_no_stage_changes_may_be_shared() -> None:
    """A table of angles, say; and parts of one flat buffer of all weights do not overlap."""
    flat = torch.randn(2, 16)
    angles = torch.randn(4)
    stages: dict[int, nn.Module] = {}
    for stage in range(2):
        stages[stage] = linear = nn.Linear(4, 4)
        linear.weight.data = flat[stage].view(4, 4)
        linear.register_buffer("angles", angles)
        linear.__dict__["again"] = [angles, None, linear.weight]
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x, y = torch.randn(2, 4, 4)
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        executor.step(x, target=y)


def views(flat: Tensor) -> st.SearchStrategy[Tensor]:
    """Of its elements, at any offset, with any strides that stay within, also of 0."""

    def viewed(drawn: tuple[int, int, int, int, int]) -> Tensor:
        rows, columns, by, beside, offset = drawn
        last = offset + (rows - 1) * by + (columns - 1) * beside
        return flat.as_strided((rows, columns), (by, beside), offset % (len(flat) - last + offset))

    sizes, strides = st.integers(1, 3), st.integers(0, 5)
    return st.tuples(sizes, sizes, strides, strides, st.integers(0, 5)).map(viewed)


FLAT = torch.arange(40)


@given(views(FLAT), views(FLAT))
def test_memory_is_shared_where_an_element_is(one: Tensor, other: Tensor) -> None:
    stages = {s: nn.Module() for s in range(2)}
    stages[0].register_buffer("table", one)
    for stage, view in enumerate((one, other)):
        stages[stage].weight = nn.Parameter(view, requires_grad=False)
    common = set(one.flatten().tolist()) & set(other.flatten().tolist())
    assert (shared_memory(stages) is not None) == bool(common)


def test_a_cut_model_whose_layers_share_memory_is_refused_on_every_rank() -> None:
    """Elsewhere than on one rank of all, each process would have a copy, and train it apart."""
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    same_data(layers[0], layers[2])  # type: ignore[arg-type]
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    for rank in range(3):
        with pytest.raises(schedir.ExecutionError, match="stages 0 and 2 share the memory"):
            partition(layers, schedule, by="uniform", rank=rank)
    assert not partition(layers, 1).ties


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_the_ties_of_a_cut_model_must_all_be_given(optimizer: Any) -> None:
    tied = deferred(nn.Linear, 4, 4).tied("a")
    other = deferred(nn.Linear, 4, 4, bias=False).tied("b")
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = partition([tied, other, tied, other], schedule, by="uniform")
    assert len(stages.ties) == 3
    for ties in ((), stages.ties[:2]):
        with pytest.raises(schedir.ExecutionError, match=r"are one parameter.*ties=stages\.ties"):
            Executor(schedule, stages, MSE, optimizer, ties=ties, in_process=True)
    Executor(schedule, stages, MSE, optimizer, ties=stages.ties, in_process=True).close()
