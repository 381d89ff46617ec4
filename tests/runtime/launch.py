"""Starts a module under torchrun, with a time limit, and leaves no process behind.

What each rank prints goes to a file of its own: ranks that share a pipe interleave their lines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from attrs import frozen

from tests.warm import commands

ROOT = Path(__file__).resolve().parents[2]
IMPORTABLE = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"  # as under pytest


@frozen
class Launched:
    """How a launch ended, and what was printed."""

    returncode: int
    outputs: list[str]  # of each rank
    errors: list[str]  # of each rank
    summary: str  # torchrun's own: which rank failed first

    @property
    def stdout(self) -> str:
        return "".join(self.outputs)

    @property
    def stderr(self) -> str:
        return "".join((*self.errors, self.summary))


def torchrun(
    ranks: int,
    *arguments: str,
    timeout: float = 250,
    cwd: Path = ROOT,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Launched:
    """Run `torchrun ARGUMENTS` on `ranks` processes, for `timeout` seconds at most."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(commands() / "torchrun"), "--standalone", "--redirects", "3"]
        process = subprocess.Popen(
            [*command, "--log-dir", folder, "--nproc-per-node", str(ranks), *arguments],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORTABLE, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        summary = ""
        try:
            _, summary = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            summary = f"torchrun was ended after {timeout} s"
        finally:
            end(process)
        outputs, errors = (_printed(Path(folder), ranks, name) for name in ("stdout", "stderr"))
    return Launched(process.returncode, outputs, errors, summary)


def end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which starts its workers in sessions of their own, and ends them on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _printed(folder: Path, ranks: int, stream: str) -> list[str]:
    logs = ([*folder.glob(f"*/attempt_0/{rank}/{stream}.log")] for rank in range(ranks))
    return ["".join(log.read_text() for log in found) for found in logs]
