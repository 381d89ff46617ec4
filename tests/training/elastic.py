"""Run by torchrun --nnodes 1:2: a training that loses a node, and goes on with fewer ranks.

    torchrun … tests/training/elastic.py FOLDER

The launcher of a node with LOST set is killed after step 5. The first process writes the weights in
the end, for `test_restarts`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor, StepResult
from schedir.training import Batches, Callback, Trainer, gathered_state, partition

STEPS, DIES, MICROBATCHES = 12, 5, 4
LOSS = nn.functional.mse_loss


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 4, generator=draw), torch.randn(8, 4, generator=draw)) for _ in range(STEPS)
    ]


class LosesANode(Callback):
    """Kills the launcher of a node."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def after_step(self, result: StepResult) -> None:
        if "LOST" in os.environ and self.executor.steps == DIES:
            os.kill(os.getppid(), signal.SIGKILL)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=MICROBATCHES)
    stages = partition(layers(), schedule)
    with Executor(schedule, stages, LOSS, torch.optim.AdamW, timeout=60) as executor:
        trainer = Trainer(
            executor,
            Batches(batches()),
            max_steps=STEPS,
            save_every=2,
            checkpoint=folder / "run",
            callbacks=[LosesANode(executor)],
            progress=False,
        )
        trainer.fit()
        weights = gathered_state(executor)
    if os.environ["RANK"] == "0":
        torch.save({"ranks": ranks, "weights": weights}, folder / "found")


if __name__ == "__main__":
    main()
