"""A training that goes on from a checkpoint equals one that was never interrupted, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from on_gpu.rank import arguments, begin, end, left, rank, say
from schedir.runtime import Executor
from schedir.training import Checkpoint, partition
from tests.runtime.kit import MSE, adamw

WIDTH, RANKS = 64, 2
BEFORE, AFTER = 2, 3  # steps


def main() -> None:
    args = arguments(__doc__).parse_args()
    begin(args.device)
    with shared_folder() as folder:
        expected = trained(args.device, folder, resumes=False)
        found = trained(args.device, folder, resumes=True)
    for name, value in expected.items():
        if not torch.equal(value, found[name]):
            raise SystemExit(f"{name} differs from that of the training that went on")
    say(f"the weights and buffers of {BEFORE} steps, a checkpoint and {AFTER} steps are equal")
    end()


def trained(device: str, folder: Path, resumes: bool) -> dict[str, Tensor]:
    """What this process holds after all steps, the first of which a checkpoint may stand for."""
    own = rank()
    torch.manual_seed(9 if resumes else 5)  # what is loaded counts
    layers = [
        layer
        for _ in range(RANKS)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh())
    ]
    schedule = schedir.build("1f1b", ranks=RANKS, microbatches=4)
    stages = partition(
        [layer.to(device) for layer in layers],
        RANKS if own is None else schedule,
        by="uniform",
        rank=own,
    )
    batches = torch.randn(
        BEFORE + AFTER, 2, 16, WIDTH, generator=torch.Generator().manual_seed(1)
    ).to(device)
    options = {"in_process": own is None, "timeout": left() / 2}
    with Executor(schedule, stages, MSE, adamw, **options) as executor:  # type: ignore[arg-type]
        checkpoint = Checkpoint(executor)
        if resumes:
            checkpoint.load(folder)
        for x, y in batches[executor.steps :]:
            executor.step(x, target=y)
            if executor.steps == BEFORE and not resumes:
                checkpoint.save(folder)
        return {
            name: value.clone()
            for stage in executor.stages.values()
            for name, value in stage.state_dict().items()
        }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks, which the first one makes."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(folders, 0)
        yield Path(folders[0])
        if dist.is_initialized():
            dist.barrier()


if __name__ == "__main__":
    main()
