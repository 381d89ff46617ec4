"""Partly frozen models, as people fine-tune them, train as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import recurrence_of
from torch import Tensor, nn

import schedir
from schedir.errors import ExecutionError
from schedir.runtime import Executor
from tests.built_in import EVERY
from tests.runtime.kit import MSE, Twins, numbered, random_batch, random_batches, sgd
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


class Adapted(nn.Module):
    """A frozen layer beside a small trained one, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return y


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def trained() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def at(place: int, one: Callable[[], nn.Module], others: Callable[[], nn.Module] = trained) -> Any:
    """Stages of which the one at a place differs from the others."""
    return lambda number: [(one if s == place % number else others)() for s in range(number)]


MODELS: dict[str, Callable[[int], Sequence[nn.Module]]] = {
    "the first frozen": at(0, frozen),
    "one in the middle frozen": at(1, frozen),
    "the last frozen": at(-1, frozen),
    "no parameters in the first": at(0, nn.Tanh),
    "the first detaches": at(0, Detached),
    "adapters in the first": at(0, Adapted, frozen),
    "adapters in the last": at(-1, Adapted, frozen),
}
SHAPES = [(name, model) for name in EVERY for model in MODELS]
CORE = {
    *(("1f1b", model) for model in MODELS),
    *(("interleaved-1f1b", "the first frozen"), ("zbv", "adapters in the last")),
    *(("pipedream", "the first frozen"), ("1f1b-rr", "adapters in the last")),
}


def with_some(parameters: Any) -> torch.optim.Optimizer:
    """As people write it: torch refuses an optimiser of nothing."""
    return sgd([p for p in parameters if p.requires_grad])


def trains_as_plain(name: str, model: str, rank: int | None, ranks: int = 2) -> None:
    schedule = schedir.build(name, ranks=ranks, microbatches=6)
    torch.manual_seed(0)
    twins = Twins(MODELS[model](schedule.stages), schedule, rank, sgd)
    with twins.executor(optimizer=with_some) as executor:
        for batch in random_batches(3, rows=12):
            found = executor.step(batch[0], target=batch[1]).loss
            assert found == twins.step(batch, recurrence=recurrence_of(schedule))
    twins.assert_equal()


@sweep("name, model", SHAPES, quick=CORE)
def test_in_one_process(name: str, model: str) -> None:
    trains_as_plain(name, model, None, 3 if name == "1f1b-rr" else 2)


@on_ranks(2)
@sweep(
    "name, model",
    [shape for shape in SHAPES if shape[0] != "1f1b-rr"],
    quick=[("1f1b", "the first frozen"), ("zbv", "adapters in the last")],
)
def test_on_two_ranks(rank: int, name: str, model: str) -> None:
    trains_as_plain(name, model, rank)


def executor_of(stages: Sequence[nn.Module], optimizer: Any) -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    return Executor(schedule, numbered(stages), MSE, optimizer, in_process=True)


def test_an_optimizer_that_fails_names_its_stage() -> None:
    def fails(named: Any, stage: int) -> torch.optim.Optimizer:
        raise ValueError(f"no rate for {stage}")

    with pytest.raises(ExecutionError, match="called for stage 1: ValueError: no rate for 1"):
        executor_of([frozen(), trained()], fails)


def test_what_is_thawed_without_an_optimizer_is_refused() -> None:
    x, y = random_batch()
    first = frozen()
    with executor_of([first, trained()], with_some) as executor:
        assert [*executor.optimizers] == [1]
        executor.step(x, target=y)
        first.requires_grad_()
        with pytest.raises(
            ExecutionError, match=r"weight of stage 0 was thawed .* make a new Exec"
        ):
            executor.step(x, target=y)


def test_a_last_stage_may_be_thawed_that_has_an_optimizer() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    twins = Twins([trained(), frozen()], schedule, optimizer=sgd)
    batch = random_batch()
    with twins.executor() as executor:
        for thawed in (False, True):
            twins.local[1].requires_grad_(thawed)
            twins.whole[1].requires_grad_(thawed)
            assert executor.step(batch[0], target=batch[1]).loss == twins.step(batch)
    twins.assert_equal()


def test_a_run_steps_what_has_an_optimizer() -> None:
    schedule = schedir.build("pipedream", ranks=2, microbatches=2)
    stages = [frozen(), trained()]
    before = [copy.deepcopy(stage.state_dict()) for stage in stages]
    given: dict[str, Any] = {"optimizer": with_some, "in_process": True}
    with Executor(schedule, numbered(stages), MSE, **given) as executor:
        assert len([*executor.run(random_batches(4), segment=4)]) == 4
        stages[0].requires_grad_()
        with pytest.raises(ExecutionError, match="weight of stage 0 was thawed since"):
            executor.run(random_batches(4), segment=4)
    stepped = [
        [not torch.equal(value, old[key]) for key, value in stage.state_dict().items()]
        for stage, old in zip(stages, before, strict=True)
    ]
    assert stepped == [[False, False], [True, True]]
