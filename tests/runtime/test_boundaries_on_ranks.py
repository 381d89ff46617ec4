"""What crosses from rank to rank: tensors of every kind, gradients or none, shapes that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.built_in import SYNCHRONOUS
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    Batch,
    Calls,
    Twins,
    linear_stages,
    random_batch,
    random_batches,
    train_on_rank,
)
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import long


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def sends_three(unused: nn.Module) -> Calls:
    """Two tensors to the next stage, one of them integers; a third that nobody uses."""
    return Calls(lambda one, other, x: (one(x), (x > 0).long().sum(1), other(x)), linear(), unused)


@on_ranks(2)
def test_several_tensors_cross_a_boundary(rank: int) -> None:
    """Integers cross, and AdamW leaves alone what got no gradient (it would decay on zeros)."""
    unused = linear()  # of the reference
    before = unused.weight.clone()
    last = Calls(
        lambda ids, last, x, number, _: last(x + ids(number)), nn.Embedding(5, 4), linear()
    )
    train_on_rank(rank, [sends_three(unused), last], random_batches(3))
    assert torch.equal(before, unused.weight)


@on_ranks(2)
def test_a_gradient_that_is_none_arrives_as_absent(rank: int) -> None:
    detached = Calls(lambda last, x: last(x.detach()), linear())
    train_on_rank(rank, [linear(), detached], random_batches(3))


def sends_odd(first: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """What is not contiguous, empty, bool, and the very input of a layer."""
    y = torch.tanh(first(x))
    return y.t(), y[:0], y > 0, y


def takes_odd(last: nn.Module, x: Tensor, empty: Tensor, mask: Tensor, same: Tensor) -> Any:
    return last(x.t() * mask + same) + empty.sum()


def peeks(last: nn.Module, x: Tensor, *unused: Tensor) -> Any:
    """Looks at its data, so no fake run can follow it, and uses one of its inputs."""
    return last(x) * (2.0 if x.sum().item() > 0 else 1.0)


STAGES: dict[str, Callable[[], list[nn.Module]]] = {
    "any layout and type": lambda: [Calls(sends_odd, linear()), Calls(takes_odd, linear())],
    "a first stage without parameters": lambda: [nn.Tanh(), linear()],
    "a frozen first stage": lambda: [linear().requires_grad_(False), linear()],
    "a last stage in place": lambda: [linear(), nn.Sequential(nn.ReLU(inplace=True), linear())],
    # Absent gradients, too.
    "where no fake run can follow": lambda: [sends_three(linear()), Calls(peeks, linear())],
}


@on_ranks(2)
@pytest.mark.parametrize("name", STAGES)
def test_stages_of_any_kind_train(rank: int, name: str) -> None:
    train_on_rank(rank, STAGES[name](), random_batches(3))


@on_ranks(2)
def test_the_backward_of_frozen_stages_may_be_split(rank: int) -> None:
    whole = linear_stages(4)
    for stage in whole[:2]:
        stage.requires_grad_(False)
    frozen = listed(
        1,
        "0 0 1 1",
        "0F0 1F0 1SEND_ACT0 1RECV_GRAD0 1I0 0I0 1W0 0W0 0OPTIM_STEP 1OPTIM_STEP",
        "2RECV_ACT0 2F0 3F0 3I0 2I0 2SEND_GRAD0 3W0 2W0 2OPTIM_STEP 3OPTIM_STEP",
    )
    train_on_rank(rank, whole, random_batches(2), target=frozen)


def grows(layer: nn.Module, x: Tensor) -> Any:
    """An output whose shape depends on data: no fake tensor can tell."""
    return layer(x)[: int((x.sum() * 0 + 2).item())]


@on_ranks(2)
@pytest.mark.parametrize("declared", [False, True])
def test_a_model_may_begin_with_a_layer_in_place(rank: int, declared: bool) -> None:
    """The pieces of a split batch share a version counter; and the batch stays as it was, also
    where no fake run can follow."""
    first = Calls(grows, linear()) if declared else linear()
    boundaries = {0: torch.empty(2, 4, device="meta")} if declared else None
    x, y = random_batch()
    before = x.clone()
    schedule = schedir.build("fill-drain", ranks=2, microbatches=4)
    whole = [nn.Sequential(nn.ReLU(inplace=True), first), linear_stages()[1]]
    twins = Twins(whole, schedule, rank)
    with twins.executor(boundaries=boundaries) as executor:
        executor.step(x, target=y)
    assert torch.equal(x, before)
    twins.step((x, y))
    twins.assert_equal()


def train_on_changing_shapes(twins: Twins) -> None:
    """On batches in any order: what is posted for one that does not come does no harm."""
    chance = torch.Generator().manual_seed(4)
    with twins.executor() as executor:
        for rows in (8, 8, 9, 8, 8, 10, 10, 4, 9, 9, 8):
            x, y = (torch.randn(rows, 4, generator=chance) for _ in range(2))
            assert executor.step(x, target=y).loss == twins.step((x, y))
            if rows == 9:
                executor.evaluate(x[:5], target=y[:5])
    twins.assert_equal()


@on_ranks(2, 3)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_shapes_change_at_any_step(rank: int, ranks: int, name: str) -> None:
    schedule = schedir.build(name, ranks=ranks, microbatches=4)
    train_on_changing_shapes(Twins(linear_stages(schedule.stages), schedule, rank))


@on_ranks(3)
def test_shapes_change_beside_a_large_boundary(rank: int) -> None:
    """Of 0.7 MiB, so that the last two ranks post fewer receives ahead than the first one would."""
    stages = [nn.Linear(4, 4), nn.Linear(4, 90_000), nn.Linear(90_000, 4)]
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    train_on_changing_shapes(Twins(stages, schedule, rank))


@on_ranks(2)
def test_a_gradient_may_be_received_before_the_forward(rank: int) -> None:
    early = listed(
        1,
        "0 1",
        "0RECV_GRAD0 0F0 0SEND_ACT0 0B0 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1OPTIM_STEP",
    )
    train_on_rank(rank, linear_stages(), random_batches(2), target=early)


@on_ranks(3)
def test_a_weight_gradient_waits_for_no_send(rank: int) -> None:
    """Rank 0 takes the gradient that 1I0 makes only after what comes after 1W0."""
    late = listed(
        2,
        "0 1 2 0",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 3RECV_ACT0 3F0 3B0 3SEND_GRAD0 3RECV_ACT1 3F1 3B1 "
        "3SEND_GRAD1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP 3OPTIM_STEP",
        "1RECV_ACT0 1F0 1SEND_ACT0 1RECV_GRAD0 1I0 1SEND_GRAD0 1W0 1RECV_ACT1 1F1 1SEND_ACT1 "
        "1RECV_GRAD1 1I1 1SEND_GRAD1 1W1 1OPTIM_STEP",
        "2RECV_ACT0 2F0 2SEND_ACT0 2RECV_GRAD0 2B0 2SEND_GRAD0 2RECV_ACT1 2F1 2SEND_ACT1 "
        "2RECV_GRAD1 2B1 2SEND_GRAD1 2OPTIM_STEP",
    )
    train_on_rank(rank, linear_stages(4), random_batches(2), target=late)


@on_ranks(2)
def test_inputs_are_a_tuple_or_integers(rank: int) -> None:
    summed = Calls(lambda layer, x, z: layer(x) + z, linear())
    batches: list[Batch] = [((x, y), x) for x, y in random_batches(2)]
    train_on_rank(rank, [summed, linear()], batches)
    words, places = nn.Embedding(11, 4), nn.Embedding(7, 4)
    embed = Calls(lambda one, other, ids: one(ids) + other(torch.arange(5)), words, places)
    batches = [(torch.randint(0, 11, (8, 5)), torch.randn(8, 5, 4)) for _ in range(2)]
    train_on_rank(rank, [embed, linear()], batches)


@on_ranks(3)
@pytest.mark.parametrize("placement", [(0, 2), (1, 2), (0, 1), (1,), (2,)])
def test_ranks_without_stages_take_part(rank: int, placement: tuple[int, ...]) -> None:
    """They train nothing, but hear the loss and clip nothing."""
    lists = [""] * 3
    for stage, held_by in enumerate(placement):
        compute = [f"{stage}{kind}{m}" for kind in "FB" for m in range(4)]
        lists[held_by] = " ".join([*compute, f"{stage}OPTIM_STEP"])
    schedule = listed(4, " ".join(map(str, placement)), *lists)
    twins = Twins(linear_stages(len(placement)), schedule, rank)
    with twins.executor() as executor:
        for x, y in random_batches(3):
            assert executor.step(x, target=y).loss == twins.step((x, y))
        with torch.no_grad():
            expected = float(MSE(nn.Sequential(*twins.whole)(x), y))
        assert executor.evaluate(x, target=y).loss == pytest.approx(expected, abs=1e-6)
        assert (executor.infer(x) is None) == (placement[-1] != rank)
    twins.assert_equal()
    with twins.executor(clip_grad_norm=0.1) as executor:
        norm = executor.step(x, target=y).grad_norm
    assert (norm is None) == (rank not in placement)


@long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
@on_ranks(2)
def test_stages_may_be_compiled_to_machine_code(rank: int) -> None:
    """Their kernels would end the process if they took the memory of a fake tensor."""
    stage: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    if rank:
        stage = torch.compile(stage)
    else:
        stage.forward = torch.compile(stage.forward)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x = torch.randn(8, 64)
    with Executor(schedule, {rank: stage}, MSE, torch.optim.SGD) as executor:
        losses = [executor.step(x, target=x).loss for _ in range(2)]
    assert losses[1] < losses[0]
