"""Starts a module under torchrun, with a time limit, and leaves no process behind.

What each rank prints goes to a file of its own: ranks that share a pipe interleave their lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]


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


def torchrun(ranks: int, *arguments: str, timeout: float = 120) -> Launched:
    """Run `torchrun ARGUMENTS` on `ranks` processes from the repository's root."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--redirects", "3", "--log-dir", folder]
        process = subprocess.Popen(
            [*command, "--nproc-per-node", str(ranks), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, summary = process.communicate(timeout=timeout)
        finally:
            _end(process)
        outputs, errors = (_printed(Path(folder), ranks, name) for name in ("stdout", "stderr"))
    return Launched(process.returncode, outputs, errors, summary)


def _end(process: subprocess.Popen[str]) -> None:
    """torchrun starts its workers in sessions of their own, and ends them on SIGTERM."""
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


def json_lines(result: Launched) -> list[Any]:
    """The JSON lines that a worker has printed."""
    if result.returncode:
        raise RuntimeError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr[-6000:]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def merged(ranks: int, lines: list[Any], key: str, value: str) -> dict[str, list[str]]:
    """What all ranks found, by case; a case that some rank did not report has that as a fault."""
    found: dict[str, list[str]] = {}
    reports: Counter[str] = Counter()
    for line in lines:
        name = line[key] if isinstance(line[key], str) else json.dumps(line[key])
        reports[name] += 1
        found.setdefault(name, []).extend(line[value])
    for name, count in reports.items():
        if count != ranks:
            found[name].append(f"{count} of {ranks} ranks have reported")
    return found
