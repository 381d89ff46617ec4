"""Runs what a benchmark measures in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in_processes(ranks: int, worker: Path, *arguments: str, limit: float) -> None:
    """Run a script under torchrun, a thread for each rank; where it fails, end with what it said.

    `limit` is in seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(worker), *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{worker.name} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
