"""A checkpoint that schedir saved before goes on as one of today.

`tests/golden/checkpoint.tar.xz` is what `saved` wrote at commit 3a1de7df, under torch 2.13.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import schedir
from schedir.runtime import Executor
from schedir.training import Batches, Checkpoint, partition
from schedir.training.checkpoint.storage import step_of
from tests.runtime.kit import MSE
from tests.runtime.launch import ROOT

ARCHIVE = ROOT / "tests" / "golden" / "checkpoint.tar.xz"


def grouped(parameters: Any) -> Optimizer:
    """Two groups, with options that differ, and a rate that is a tensor."""
    given = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [one for one in given if one.ndim > 1], "weight_decay": 0.5},
        {"params": [one for one in given if one.ndim < 2], "betas": (0.5, 0.75)},
    ]
    return torch.optim.AdamW(groups, lr=torch.tensor(0.25))


class Training:
    """Of two stages in one process; all that it saves is `filled`."""

    def __init__(self, value: int) -> None:
        schedule = schedir.build("1f1b", ranks=2, microbatches=2)
        stages = partition([nn.Linear(2, 2), nn.BatchNorm1d(2)], schedule.stages, by="uniform")
        self.executor = Executor(schedule, stages, MSE, grouped, in_process=True)
        self.scheduler = lr_scheduler.StepLR(self.executor.optimizer, 3)
        self.batches = Batches([1, 2, 3], repeat=True)
        self.checkpoint = Checkpoint(
            self.executor,
            scheduler=self.scheduler,
            batches=self.batches,
            others={"more": Batches([])},
        )
        for stage, module in self.executor.stages.items():
            for at, tensor in enumerate(module.state_dict().values()):
                fill(tensor, value + 10 * stage + at)
            optimizer = self.executor.optimizers[stage]
            for at, parameter in enumerate(module.parameters()):
                moments = {"step": torch.tensor(0.0)}
                moments |= {key: torch.empty(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
                for number, tensor in enumerate(moments.values()):
                    fill(tensor, value + 100 + 10 * at + number)
                optimizer.state[parameter] = {**moments, "note": (value, 0.5)}
            for group in optimizer.param_groups:
                fill(group["lr"], value)
        self.executor.steps = self.batches.epoch = self.scheduler.last_epoch = value
        torch.manual_seed(value)

    def state(self) -> dict[str, Any]:
        """All that is saved, as plain values."""
        stages = self.executor.stages
        return {
            "weights": {k: plain(module.state_dict()) for k, module in stages.items()},
            "optimizers": [plain(one.state_dict()) for one in self.executor.optimizers.values()],
            "scheduler": plain(self.scheduler.state_dict()),
            "batches": self.batches.state_dict(),
            "step": self.executor.steps,
            "drawn": torch.rand(3).tolist(),
        }


def fill(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.copy_(value + torch.arange(tensor.numel()).view(tensor.shape) / 8)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def saved(folder: Path) -> None:
    Training(3).checkpoint.save(folder)


def test_all_of_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            (tmp_path / member.name).write_bytes(file.read())
    training = Training(0)
    assert training.state() != Training(3).state()
    training.checkpoint.load(folder)
    assert training.state() == Training(3).state()
    (folder / "steps").write_text("2")  # as a Trainer wrote it beside
    assert step_of(folder) == 2
    training.checkpoint.save(folder)
    assert step_of(folder) == 3
