"""What a rank of a check does first: where it is, should it hang, and which device it has."""

from __future__ import annotations

import faulthandler
import os
from time import time

import torch
import torch.distributed as dist

from on_gpu.launch import UNTIL


def begin(device: str) -> None:
    """Of every process; of one that has a rank, the process group too."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.8 * left())
    if device != "cpu":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")


def end() -> None:
    """Leave together: a rank that is done at once must not take the store with it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def left() -> float:
    """The seconds that this process may still take."""
    return float(os.environ.get(UNTIL, time() + 3600)) - time()


def rank() -> int | None:
    """That of this process; None where it has none."""
    return dist.get_rank() if dist.is_initialized() else None


def say(line: str) -> None:
    """What the table shows last is what was said last, by the first rank."""
    if not rank():
        print(line, flush=True)
