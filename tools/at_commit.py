"""Checks another commit out into a temporary folder, for tools that compare it with this tree."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder, which goes in the end, after Ctrl-C and SIGTERM
    too. Nothing in `.git` changes. Raises SystemExit where there is no such commit."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="schedir-") as folder:
        packed = Path(folder, "tree.tar")
        command = ["git", "-C", str(ROOT), "archive", "-o", str(packed), commit]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.strip())
        tree = Path(folder, "tree")
        with tarfile.open(packed) as archive:
            archive.extractall(tree, filter="data")
        yield tree


def environment(tree: Path) -> dict[str, str]:
    """The environment in which Python imports schedir from `tree`."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
