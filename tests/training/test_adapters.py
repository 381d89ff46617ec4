"""A base model's checkpoint loads into a model with adapters, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import Checkpoint, partition
from tests.runtime.kit import MSE, random_batch


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.adapter = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.linear(x, self.weight, self.bias) + self.adapter(x)
        return y


def executor_of(layers: list[nn.Module]) -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = partition(layers, schedule)
    return Executor(schedule, stages, MSE, torch.optim.AdamW, in_process=True)


ADAPTERS = ["1.adapter.weight"]


@pytest.mark.parametrize("how", ["load", "load_weights"])
def test_what_does_not_fit_is_returned(how: str, tmp_path: Path) -> None:
    base: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x, y = random_batch()
    with executor_of(base) as executor:
        executor.step(x, target=y)
        Checkpoint(executor).save(tmp_path / "base")
    model: list[Any] = [nn.Linear(4, 4), Adapted(nn.Linear(4, 4))]
    with executor_of(model) as executor:
        checkpoint = Checkpoint(executor)
        kept = model[1].adapter.weight.clone()
        with pytest.raises(ExecutionError, match=f"another model: it lacks {ADAPTERS[0]}"):
            getattr(checkpoint, how)(tmp_path / "base")
        unlike = getattr(checkpoint, how)(tmp_path / "base", strict=False)
        assert (unlike.missing_keys, unlike.unexpected_keys) == (ADAPTERS, [])
        assert torch.equal(model[1].adapter.weight, kept)
        assert torch.equal(model[1].weight, base[1].weight)
        assert torch.equal(model[0].weight, base[0].weight)
        stepped = {len(optimizer.state) for optimizer in executor.optimizers.values()}
        assert stepped == ({2} if how == "load" else {0})
        executor.step(x, target=y)
        checkpoint.save(tmp_path / "adapted")
    with executor_of(base) as executor:
        unlike = getattr(Checkpoint(executor), how)(tmp_path / "adapted", strict=False)
    assert (unlike.missing_keys, unlike.unexpected_keys) == ([], ADAPTERS)
    assert torch.equal(base[1].weight, model[1].weight)


def test_a_shape_that_differs_is_refused_all_the_same(tmp_path: Path) -> None:
    Checkpoint(nn.Linear(4, 1)).save(tmp_path)
    with pytest.raises(ExecutionError, match=r"weight is \[1, 4\] there and \[1, 3\] here"):
        Checkpoint(nn.Linear(3, 1)).load_weights(tmp_path, strict=False)
