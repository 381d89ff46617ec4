"""Run by torchrun --max-restarts: a training whose ranks die, and which goes on by itself.

    torchrun … -m tests.training.restarted FOLDER [--async-save] [--own-group]

Rank 1 is killed after step 5 of the first attempt, and rank 0 raises after step 8 of the second.
The first process writes what the training has come to, for `test_restarts`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader, TensorDataset

from schedir.runtime import StepResult
from schedir.training import Batches, gathered_state, warmup_cosine
from tests.training.test_checkpoint import Kept
from tests.training.test_trainer import HELD_OUT, Calls, labelled, noisy_executor, trainer_of

STEPS, DIES, RAISES = 14, 5, 8


class Watched(Batches):
    """Notes what it hands out, in an order that is saved, but never used."""

    def __init__(self, order: Kept) -> None:
        samples = TensorDataset(*labelled(40, seed=1)[0])
        super().__init__(DataLoader(samples, 8, shuffle=True), repeat=True, seed=4)
        self.order = order

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, target in super().__iter__():
            self.order.state["seen"].append(float(inputs.sum()))
            yield inputs, target


def trained(rank: int | None, folder: Path | None, attempt: int, **options: Any) -> dict[str, Any]:
    """What a training has come to: weights on the first rank, history, order of the data."""
    order = Kept(seen=[])
    options |= {"max_steps": STEPS, "eval_every": 4, "save_every": 2, "evaluation": HELD_OUT}
    options |= {"checkpoint": folder, "others": {"order": order}}
    with noisy_executor(rank) as executor:

        def fails(result: StepResult) -> None:
            now = attempt, executor.rank, executor.steps
            if now == (0, 1, DIES):
                os.kill(os.getpid(), signal.SIGKILL)
            if now == (1, 0, RAISES):
                raise RuntimeError("as it happens")

        options["scheduler"] = warmup_cosine(executor.optimizer, warmup=2, steps=STEPS)
        options["callbacks"] = [Calls(after_step=fails)]
        history = trainer_of(executor, Watched(order), **options).fit()
        weights = gathered_state(executor)
    entries = [attrs.asdict(entry) for entry in history]
    return {"history": entries, "order": order.state["seen"], "weights": weights}


def main() -> None:
    folder = Path(sys.argv[1])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    if "--own-group" in sys.argv:
        store, _, ranks = next(rendezvous("env://"))
        own = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks)
    found = trained(rank, folder / "run", attempt, async_save="--async-save" in sys.argv)
    if rank == 0:
        torch.save({**found, "attempt": attempt}, folder / "found")


if __name__ == "__main__":
    main()
