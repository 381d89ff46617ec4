"""Parameters that layers share, by key or by identity: trained as the uncut model's one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import Stages, deferred, partition
from tests.runtime.kit import message_of
from tests.runtime.on_ranks import on_ranks
from tests.training.test_partition import assert_trains_as


def projected(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def round_trip(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return (x @ embedding.weight.T).clamp(-1, 1) @ embedding.weight


def by_key(copies: int = 2) -> list[Any]:
    embedding = deferred(nn.Embedding, 5, 4, dtype=torch.float64)
    middle = [embedding.tied("words", round_trip)] if copies == 3 else []
    linear = deferred(nn.Linear, 4, 4, dtype=torch.float64)
    ends = embedding.tied("words"), embedding.tied("words", projected)
    return [ends[0], linear, *middle, torch.relu, linear, ends[1]]


def rounded(module: nn.Module) -> None:
    """Few binary digits, so that sums are exact in any order: copies' are taken in another."""
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.randint(-4, 5, parameter.shape) / 4)


def by_identity(copies: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    embedding = nn.Embedding(5, 4, dtype=torch.float64)
    head = nn.Linear(4, 5, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    inner = nn.Linear(4, 4, dtype=torch.float64)
    middle = [inner, nn.ReLU()] if copies == 3 else []
    model = nn.Sequential(embedding, inner, *middle, nn.ReLU(), inner, nn.ReLU(), head)
    with torch.no_grad():
        model.apply(rounded)
    return model


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum() / 16


SGD = partial(torch.optim.SGD, lr=2**-6)
BATCH = (
    torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(0)),
    torch.randint(-2, 3, (8, 5), generator=torch.Generator().manual_seed(1)).double(),
)


def by_key_rounded(stages: schedir.Schedule | int, copies: int = 2, **way: Any) -> Stages:
    return partition(by_key(copies), stages, init=rounded, **way)


def by_identity_cut(stages: schedir.Schedule | int, copies: int = 2, **way: Any) -> Stages:
    return partition(by_identity(copies), stages, **way)


Made = Callable[..., Stages]
MADE: list[Made] = [by_key_rounded, by_identity_cut]


def _train(sched: schedir.Schedule, stages: Stages, uncut: nn.Module, **options: Any) -> None:
    """One step, whose sums are exact, leaves both the same, bit for bit; so do more, but for what
    the order of sums rounds."""
    options |= {"ties": stages.ties, "near": (0, 1e-12, 1e-12)}
    assert_trains_as(uncut, sched, stages, loss_fn, SGD, [BATCH] * 3, **options)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shared_parameters_train_as_one_in_one_process(ranks: int, copies: int, made: Made) -> None:
    sched = schedir.build("1f1b", ranks=ranks, microbatches=4)
    _train(sched, made(sched, copies, by="uniform"), made(1, copies)[0], in_process=True)


@on_ranks(2)
@pytest.mark.parametrize("made", MADE)
def test_shared_parameters_train_as_one_on_ranks(rank: int, made: Made) -> None:
    for name, copies in [("1f1b", 2), ("interleaved-1f1b", 3)]:
        sched = schedir.build(name, ranks=2, microbatches=4)
        _train(sched, made(sched, copies, by="uniform"), made(1, copies)[0])


@pytest.mark.parametrize("made", MADE)
def test_ties_are_found_across_stages_alone(made: Made) -> None:
    last = len(made(1).summaries[0].layers) - 1
    assert made(1).ties == ()
    assert made(2, by="uniform").ties[0] == [(0, "0.weight"), (1, f"{last}.weight")]


def test_one_module_listed_twice_is_one_on_a_stage_and_tied_across() -> None:
    model = by_identity()  # its layers 1 and 3 are one
    (weight, bias) = partition(model, 3, boundaries=[1, 3]).ties[1:]
    assert weight == [(1, "1.weight"), (2, "3.weight")]
    assert bias == [(1, "1.bias"), (2, "3.bias")]
    stages = partition(model, 2, boundaries=[1])
    assert stages[1].get_submodule("1") is stages[1].get_submodule("3")
    assert stages.summaries[1].parameters == 20 + 20
    assert [set(tie) for tie in stages.ties] == [{(0, "0.weight"), (1, "5.weight")}]


def test_ties_must_not_be_forgotten() -> None:
    sched = schedir.build("1f1b", ranks=2, microbatches=4)
    stages = by_key_rounded(sched, by="uniform")
    expected = r"0.weight of stage 0, 4.weight of stage 1 are one parameter.* ties=stages.ties"
    for optimizer in (SGD, None):
        with pytest.raises(ExecutionError, match=expected):
            Executor(sched, stages, loss_fn, optimizer, in_process=True)


def test_a_copy_shares_all_but_the_tied_parameter() -> None:
    table = nn.Embedding(5, 4)
    head = nn.Linear(4, 5)
    head.weight = table.weight
    stages = partition([table, head], 2)
    copied = stages[1].get_submodule("1")
    assert copied.weight is not head.weight
    assert torch.equal(copied.weight, head.weight)  # type: ignore[arg-type]
    assert copied.bias is head.bias
    sched = schedir.build("1f1b", ranks=2, microbatches=2)
    assert partition([table, head], sched, rank=1)[1].get_submodule("1") is head


def test_a_key_makes_one_layer_on_a_stage() -> None:
    (stage,) = partition(by_key(3), 1).values()
    names = [name for name, _ in stage.named_parameters()]
    assert names == ["0.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert {"0.weight", "2.weight", "5.weight"} < set(stage.state_dict())


def test_layers_of_one_key_that_are_not_alike_are_refused() -> None:
    layers = [deferred(nn.Linear, 4, 3).tied("a"), deferred(nn.Linear, 3, 4).tied("a")]
    expected = r"0 \(Linear\) and 1 \(Linear\) are tied by 'a', but .*\[3, 4\].*\[4, 3\]"
    with pytest.raises(ExecutionError, match=expected):
        partition(layers, 1)


def test_statistics_can_not_be_shared_by_stages() -> None:
    layers: list[Any] = [nn.BatchNorm1d(4), nn.ReLU()] * 2
    partition(layers, 1)
    assert "share the running statistics of a normalis" in message_of(partition, layers, 2)


def test_tied_modules_on_meta_need_a_key_to_be_filled() -> None:
    with torch.device("meta"):
        model = by_identity()
    with pytest.raises(ExecutionError, match=r"layers 1 .* and 3 .* share a parameter on the dev"):
        partition(model, 2, init=rounded)
