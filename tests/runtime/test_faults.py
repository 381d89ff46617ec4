"""Faults strike a training of four processes: the root is named, and it resumes bit for bit.

How soon all ranks end is no test, as machines are noisy: `tools/fault_table.py` tells.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweeps import sweep

TOOLS = Path(__file__).parents[2] / "tools"
ROWS = ["exception", "SIGKILL", "exit", "segfault", "SIGSTOP", "hang", "loader stalls", "lock held"]
ROWS += ["socket", "launcher SIGKILL", "launcher SIGTERM", "Ctrl-C", "node's launcher"]
ROWS += ["SIGKILL on 2 nodes", "slowed 2x", "slowed 10x", "none beside load"]


@pytest.mark.timeout(250)
@sweep("row", ROWS, quick=["SIGKILL"])
def test_the_root_is_named_and_the_training_resumes(row: str) -> None:
    expect_it_holds("--rows", row, "--patient")


@pytest.mark.timeout(250)
def test_an_error_that_is_agreed_on_and_a_hang_in_a_stream_have_one_root() -> None:
    """Of three ranks that wait, none may be named, and of those that are told, none as well."""
    expect_it_holds("--phases", "save:raise,run:hang", "--timeout", "5", "--seed", "1")


def expect_it_holds(*options: str) -> None:
    command = [sys.executable, "fault_table.py", *options, "--trials", "1"]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
