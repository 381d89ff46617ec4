"""Stages that share memory without saying so: refused wherever the memory is held."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.runtime.memory import shared_memory
from schedir.training import deferred, partition
from tests.runtime.kit import MSE, ScaledLoss, message_of, sgd

SHARED: dict[str, Callable[[Any, Any], object]] = {
    "the same object": lambda first, last: setattr(last, "weight", first.weight),
    "the same data": lambda first, last: setattr(last.weight, "data", first.weight.data),
    "a view": lambda first, last: setattr(last, "weight", nn.Parameter(first.weight.detach().T)),
    "a row": lambda first, last: setattr(last, "bias", nn.Parameter(first.weight.detach()[1])),
    "a buffer": lambda first, last: last.register_buffer("table", first.weight.detach()),
    "an attribute": lambda first, last: vars(last).update(table=first.weight.T),
    "in a list": lambda first, last: vars(last).update(tables=[{"of": (first.weight,)}]),
    "a module in a tuple": lambda first, last: vars(last).update(other=(first,)),
}
"""How the last of two linear layers comes to hold memory of the first."""
TIES: Any = [[(0, "weight"), (1, "weight")]]


@pytest.mark.parametrize("optimizer", [None, sgd])
@pytest.mark.parametrize("how", SHARED)
def test_shared_memory_is_refused(how: str, optimizer: Any) -> None:
    """With ties as well: each copy is stepped by itself."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    SHARED[how](first, last)
    for ties in ((), TIES):
        said = message_of(executor_of, {0: first, 1: last}, optimizer, ties=ties)
        assert re.search("0 and 1 hold the same memory.*ties=", said)


def executor_of(stages: dict[int, nn.Module], optimizer: Any = sgd, **options: Any) -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    return Executor(schedule, stages, MSE, optimizer, in_process=True, **options)


def test_chunks_of_one_rank_and_the_loss_are_looked_at() -> None:
    chunks = schedir.build("interleaved-1f1b", ranks=1, microbatches=2, chunks=2)
    stages, loss = {s: nn.Linear(4, 4) for s in range(2)}, ScaledLoss()
    loss.scale.data = stages[0].weight.data
    with pytest.raises(schedir.ExecutionError, match=r"weight of the former and loss\.scale of"):
        Executor(chunks, {**stages}, loss)


def test_what_a_stage_lists_of_its_own_is_its_own() -> None:
    """Come to before the parameter itself, it hides that from nobody."""
    outer = nn.Sequential(nn.Linear(4, 4))
    outer.__dict__["listed"] = [outer[0].weight]
    last = nn.Linear(4, 4)
    assert shared_memory({0: outer, 1: last}) is None
    SHARED["in a list"](outer[0], last)
    assert shared_memory({0: outer, 1: last}) is not None


def test_shared_running_statistics_are_refused() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    stages = {s: nn.Sequential(nn.Linear(4, 4), norm) for s in range(2)}
    assert "1.running_mean of the former" in message_of(executor_of, stages, None)


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
    x, y = torch.randn(2, 4, 4)
    with executor_of(stages) as executor:
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
    SHARED["the same data"](layers[0], layers[2])
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    for rank in range(3):
        with pytest.raises(schedir.ExecutionError, match="stages 0 and 2 share the memory"):
            partition(layers, schedule, by="uniform", rank=rank)
    assert not partition(layers, 1).ties


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_the_ties_of_a_cut_model_must_all_be_given(optimizer: Any) -> None:
    tied = deferred(nn.Linear, 4, 4).tied("a")
    other = deferred(nn.Linear, 4, 4, bias=False).tied("b")
    stages = partition([tied, other, tied, other], 2, by="uniform")
    assert len(stages.ties) == 3
    for ties in ((), stages.ties[:2]):
        said = message_of(executor_of, stages, optimizer, ties=ties)
        assert re.search(r"are one parameter.*ties=stages\.ties", said)
    executor_of({**stages}, optimizer, ties=stages.ties).close()
