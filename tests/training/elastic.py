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

import schedir
from schedir.runtime import Executor, StepResult
from schedir.training import Batches, gathered_state, partition
from tests.runtime.kit import MSE, linear_stages, random_batches
from tests.training.test_trainer import Calls, trainer_of

STEPS, DIES = 12, 5


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    schedule = schedir.build("1f1b", ranks=ranks, microbatches=4)
    stages = partition(linear_stages(4), schedule)
    with Executor(schedule, stages, MSE, torch.optim.AdamW, timeout=60) as executor:

        def loses_a_node(result: StepResult) -> None:
            if "LOST" in os.environ and executor.steps == DIES:
                os.kill(os.getppid(), signal.SIGKILL)

        every = {"max_steps": STEPS, "save_every": 2}
        options = {"checkpoint": folder / "run", "callbacks": [Calls(after_step=loses_a_node)]}
        trainer_of(executor, Batches(random_batches(STEPS)), **every, **options).fit()
        weights = gathered_state(executor)
    if os.environ["RANK"] == "0":
        torch.save({"ranks": ranks, "weights": weights}, folder / "found")


if __name__ == "__main__":
    main()
