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
from torch import nn

import schedir
from schedir.runtime import Executor, StepResult
from schedir.training import Batches, Callback, gathered_state, partition
from tests.runtime.kit import MSE, Batch, linear_stages, random_batches
from tests.training.test_trainer import trainer_of

STEPS, DIES = 12, 5


def layers() -> list[nn.Module]:
    return linear_stages(4)


def batches() -> list[Batch]:
    return random_batches(STEPS)


class LosesANode(Callback):
    """Kills the launcher of a node."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def after_step(self, result: StepResult) -> None:
        if "LOST" in os.environ and self.executor.steps == DIES:
            os.kill(os.getppid(), signal.SIGKILL)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=4)
    stages = partition(layers(), schedule)
    with Executor(schedule, stages, MSE, torch.optim.AdamW, timeout=60) as executor:
        every = {"max_steps": STEPS, "save_every": 2}
        options = {"checkpoint": folder / "run", "callbacks": [LosesANode(executor)]}
        trainer_of(executor, Batches(batches()), **every, **options).fit()
        weights = gathered_state(executor)
    if os.environ["RANK"] == "0":
        torch.save({"ranks": ranks, "weights": weights}, folder / "found")


if __name__ == "__main__":
    main()
