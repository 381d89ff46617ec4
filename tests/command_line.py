"""Drives the commands as a user drives them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedir.cli import main

# Clean under `edge` and `async` only.
DEADLOCK = """\
schedir 1
name my-1f1b
microbatches 2
placement 0 1
rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
rank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1
"""


class Run:
    """Runs a command: exit code, stdout, stderr without its last line `see: …`.

    It fails on a traceback, and on an error that names no page of the docs.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else -1
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        err, see = without_page(err)
        assert see or code == 0 or not err.startswith("error")
        return code, out, err

    def prints(self, *argv: str) -> str:
        """What a command prints that succeeds, and says nothing on stderr."""
        code, out, err = self(*argv)
        assert (code, err) == (0, "")
        return out

    def refuses(self, *argv: str) -> str:
        """The one line of a command that can't do what it is asked for."""
        code, out, err = self(*argv)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"error: .*\n", err)
        return err


runner = Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Run(capsys)


def without_page(err: str) -> tuple[str, str]:
    """What is said on stderr, without the line that names a page of the docs, and that line."""
    found = re.fullmatch(r"(.*?)(^see: [^\n]*\n)?", err, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert "see: schedir" not in found[1]
    return found[1], found[2] or ""
