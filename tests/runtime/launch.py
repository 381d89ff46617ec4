"""Starts a module under torchrun, with a time limit, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `torchrun ARGUMENTS` on `ranks` processes from the repository's root."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        # torchrun starts its workers in sessions of their own, and ends them on SIGTERM.
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def json_lines(result: subprocess.CompletedProcess[str]) -> list[Any]:
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
