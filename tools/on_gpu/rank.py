"""What a process of a check does first: where it is, should it hang, and which device it has."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from argparse import ArgumentParser
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import NoReturn

import torch
import torch.distributed as dist

from on_gpu.launch import DEVICE, SAID, SKIPPED, UNTIL

_PR_SET_PDEATHSIG = 1


def arguments(doc: str | None) -> ArgumentParser:
    """Those of a check; all of them take a device."""
    parser = ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default=os.environ.get(DEVICE, "cuda:0"))
    return parser


def begin(device: str, backend: str = "gloo") -> None:
    """Of every process; of one that has a rank, the process group too, of that backend."""
    if "TORCH_CUDA_SANITIZER" in os.environ and not sanitizer_knows_streams():
        skip("this torch's sanitizer would take record_stream for a kernel, and find races")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)  # all ranks draw the same batches
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(0.8 * left(), 1.0))
    if UNTIL in os.environ:  # who has started this may be killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if device != "cpu":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)


def sanitizer_knows_streams() -> bool:
    """Whether torch's sanitizer knows that `record_stream` runs nothing."""
    found = find_spec("torch.cuda._sanitizer")  # to import it would turn traces on
    assert found is not None
    return "record_stream" in Path(found.origin or "").read_text(encoding="utf-8")


def end() -> None:
    """Leave together, so that none loses a peer that still talks to it."""
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


def synchronize(device: str) -> None:
    """Have the host wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def say(line: str) -> None:
    """Print a line for the table, which shows what the first rank has said last."""
    print(f"{SAID}{line}", flush=True)


def skip(reason: str) -> NoReturn:
    """Leave a check that can't be made here."""
    say(reason)
    sys.exit(SKIPPED)
