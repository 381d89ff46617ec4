"""What layers cost by the clock, which is turned by the layers here."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from schedir import ExecutionError
from schedir.runtime import trace
from schedir.training import deferred, measured_costs, partition, pop, stages_of, stash
from tests.runtime.kit import MSE, differing, everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.training.model_classes import CLASSES

X, Y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))


class Clock:
    time = 0.0


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands still but for what layers take."""
    monkeypatch.setattr(Clock, "time", 0.0)
    monkeypatch.setattr(trace, "now", lambda: Clock.time * 1e9)


class Taking(nn.Linear):
    """Takes seconds forward, and 10 of them for each backward through its output."""

    def __init__(self, seconds: float, inplace: bool = False) -> None:
        super().__init__(4, 4)
        self.seconds, self.inplace = seconds, inplace

    def forward(self, x: Tensor) -> Tensor:
        Clock.time += self.seconds
        if self.inplace:
            x.mul_(2)
        y: Tensor = super().forward(x)
        y.register_hook(lambda _: setattr(Clock, "time", Clock.time + 10))
        return y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    Clock.time += 0.5
    return MSE(output, target)


def taking(seconds: float) -> Any:
    def layer(x: Tensor) -> Tensor:
        Clock.time += seconds
        return x

    return layer


def test_forward_backward_and_loss_count() -> None:
    layers = [deferred(Taking, 1), taking(2), stash("a"), Taking(3, True), pop("a", torch.add)]
    assert measured_costs(layers, X) == [11, 2, 0, 13, 0]
    assert measured_costs(layers, X, loss_fn, Y) == [11, 2, 0, 13, 0.5]
    costs = measured_costs(layers, X, loss_fn, Y)
    assert [stage.cost for stage in partition(layers, 2, costs=costs).summaries] == [13, 13.5]


def test_the_layers_of_a_model_of_transformers_are_measured(tmp_path: Path) -> None:
    config = LlamaConfig(**CLASSES["LlamaForCausalLM"])
    model: Any = LlamaForCausalLM(config)
    ends = model.model.embed_tokens, model.lm_head
    for seconds, module in enumerate((*model.model.layers, *ends), 1):
        module.register_forward_pre_hook(lambda *_, taken=seconds: taking(taken)(None))
    ids = torch.ones(2, 8, dtype=torch.long)
    costs = measured_costs(model, ids)
    assert costs == [1 + 5, 2, 3, 4 + 6]
    assert [of.cost for of in stages_of(model, 2, costs=costs).summaries] == [11, 10]
    assert measured_costs(config, ids) == [0] * 4
    model.save_pretrained(tmp_path)
    assert measured_costs(str(tmp_path), ids) == [0] * 4


def test_the_median_counts_and_the_first_run_does_not() -> None:
    times = iter([100.0, 5, 1, 90])

    def layer(x: Tensor) -> Tensor:
        Clock.time += next(times)
        return x

    assert measured_costs([layer], X, repeats=3) == [5]


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    before, state = copy.deepcopy(model), torch.get_rng_state()
    measured_costs(model, X, MSE, Y)
    assert differing(model, before) == []
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_one_layer_is_in_memory_at_a_time() -> None:
    alive = []

    class Counted(nn.Module):
        here = 0

        def __init__(self) -> None:
            super().__init__()
            Counted.here += 1

        def __del__(self) -> None:
            Counted.here -= 1

        def forward(self, x: Tensor) -> Tensor:
            alive.append(Counted.here)
            return x

    measured_costs([deferred(Counted) for _ in range(4)], X, repeats=1)
    assert max(alive) == 1
    assert len(alive) == 8


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(ExecutionError, match=r"layer 1 \(Linear\) fails on what layer 0"):
        measured_costs([nn.ReLU(), nn.Linear(3, 4)], X)
    with pytest.raises(ExecutionError, match="repeats must be an int of at least 1, not 0"):
        measured_costs([nn.ReLU()], X, repeats=0)


@on_ranks(2)
def test_all_ranks_get_the_costs_of_the_first(rank: int) -> None:
    layers = [taking(1 + rank), Taking(2 * rank)]
    assert everyone(measured_costs(layers, X)) == [[1, 10]] * 2
    failing = [nn.Linear(4 - rank, 4), nn.Linear(3 + rank, 4)]
    assert "layer 1 (Linear) fails on what layer 0" in message_of(measured_costs, failing, X)
    assert dist.is_initialized()
    assert os.environ["WORLD_SIZE"] == "2"
