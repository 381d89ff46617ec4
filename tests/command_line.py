"""Drives the commands as a user drives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schedir.cli import main

Run = Callable[..., tuple[int, str, str]]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command: exit code, stdout, stderr. It fails on a traceback."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else -1
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call
