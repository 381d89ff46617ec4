"""Runs the measurements of benchmarks in separate processes, and leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class ProcessError(Exception):
    """A process failed or took too long; the message is the end of what it printed on stderr."""


def run(command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints on stdout. Raises ProcessError; `limit` is in seconds.

    However it ends, Ctrl-C included, the process is gone; on SIGTERM torchrun ends its ranks.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise ProcessError(f"took more than {limit:g} s") from None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()
    if process.returncode:
        raise ProcessError(errors[-3000:])
    return out


def torchrun(ranks: int, worker: Path, *arguments: str) -> list[str]:
    """The command that runs a script on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(ranks), str(worker), *arguments]


def run_in_processes(ranks: int, worker: Path, *arguments: str, limit: float) -> None:
    """Run a script under torchrun, a thread for each rank; where it fails, end with what it said.

    `limit` is in seconds.
    """
    try:
        run(torchrun(ranks, worker, *arguments), limit, {**os.environ, "OMP_NUM_THREADS": "1"})
    except ProcessError as error:
        sys.exit(f"{worker.name} {' '.join(arguments)} failed:\n{error}")
