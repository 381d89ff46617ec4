"""Lists the functions of schedir that a warm step of 1F1B calls.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/step_profile.py [--json FILE]

Two ranks, 8 microbatches, the tiny model of `bench_step.py`, no clipping, replicas, ties or
tracing. For the rank with the most calls it prints each file with its functions, and how often each
is called in one step; then the numbers of files, functions and calls per compute action.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from bench_step import MICROBATCHES, MODELS, schedir_step

import schedir
from schedir.files import write_text

ROOT = str(Path(schedir.__file__).parent)
WARM = 5
"""Steps before the one that is looked at: the first learns the shapes."""


def calls_of_a_step() -> Counter[tuple[str, str]]:
    """How often each function of schedir, by file, is called in a warm step on this rank."""
    step, executor, _ = schedir_step(MODELS["tiny"], "1f1b", 1)
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            file = frame.f_code.co_filename.removeprefix(ROOT).lstrip("/")
            found[file, frame.f_code.co_qualname] += 1

    for _ in range(WARM):
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    executor.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the figures to this file as well")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    own = calls_of_a_step()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if dist.get_rank() == 0:
        most = max(ranks, key=Counter.total)
        for file in sorted({file for file, _ in most}):
            print(file)
            for (where, name), calls in sorted(most.items()):
                if where == file:
                    print(f"{calls:8}  {name}")
        figures = {
            "files": len({file for file, _ in most}),
            "functions": len(most),
            "calls per compute action": round(most.total() / (2 * MICROBATCHES), 2),
        }
        print(", ".join(f"{name}: {value}" for name, value in figures.items()))
        if options.json:
            write_text(Path(options.json), json.dumps(figures) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
