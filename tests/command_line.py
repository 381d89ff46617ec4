"""Drives the commands as a user drives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from schedir.cli import main

Run = Callable[..., tuple[int, str, str]]

# Clean under `edge` and `async` only.
DEADLOCK = """\
schedir 1
name my-1f1b
microbatches 2
placement 0 1
rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
rank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1
"""


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command: exit code, stdout, stderr without its last line `see: …`.

    It fails on a traceback, and on an error that names no page of the docs.
    """

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else -1
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        err, see = without_page(err)
        assert see or code == 0 or not err.startswith("error")
        return code, out, err

    return call


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runner(capsys)


def without_page(err: str) -> tuple[str, str]:
    """What is said on stderr, without the line that names a page of the docs, and that line."""
    found = re.fullmatch(r"(.*?)(^see: [^\n]*\n)?", err, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert "see: schedir" not in found[1]
    return found[1], found[2] or ""
