"""Long work shows how far it is: on stderr, on a terminal alone, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sweeps import sweep
from tests.warm import REAL, commands

# Takes minutes, so that it is never done before it is stopped.
MANY = "microbatches=" + ",".join(map(str, range(3000, 3200)))
LONG = ["compare", "1f1b", "--ranks", "8", "--sweep", MANY]


@contextmanager
def running(
    programs: Path, cwd: Path, argv: list[str], **extra: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command with stderr on a terminal, and where to read what that shows."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", **extra}
    try:
        with subprocess.Popen(
            [programs / "schedir", *argv],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=env,
            preexec_fn=_take_ctrl_c,
        ) as process:
            os.close(theirs)
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(ours)


def _take_ctrl_c() -> None:
    """A shell has what it starts with `&`, such as all of the tests, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(terminal: int, wanted: str | None) -> str:
    """What a terminal shows until something `wanted` is there, or until its end."""
    shown = b""
    try:
        while wanted is None or wanted.encode() not in shown:
            part = os.read(terminal, 1 << 16)
            if not part:
                break
            shown += part
    except OSError:  # how Linux ends what a terminal shows
        pass
    return shown.decode(errors="replace")


def test_ctrl_c_ends_it_and_cleans_up(tmp_path: Path) -> None:
    with running(REAL, tmp_path, LONG) as (process, terminal):
        shown = read_until(terminal, "/200")
        assert "comparing" in shown
        process.send_signal(signal.SIGINT)
        rest = read_until(terminal, None)
        assert process.wait() == 130
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("\x1b[2K")  # in the end the line is taken away


def test_short_work_shows_nothing(tmp_path: Path) -> None:
    short = ["compare", "1f1b", "--microbatches", "1"]
    with running(commands(), tmp_path, short) as (process, terminal):
        assert read_until(terminal, None) == ""
        assert process.wait() == 0


@sweep("argv", [["show", "--json"], ["check"], ["export", "-o", "it.sched"]], quick=[["check"]])
def test_one_long_schedule_shows_that_something_goes_on(tmp_path: Path, argv: list[str]) -> None:
    shape = ["--ranks", "8", "--microbatches", "40000"]
    with running(commands(), tmp_path, [argv[0], "1f1b", *argv[1:], *shape]) as (_, terminal):
        shown = read_until(terminal, "ing ")
        assert re.search("simulating|checking|proving", shown)


@pytest.mark.parametrize("piped", [True, False])
def test_nothing_in_a_pipe_or_on_a_dumb_terminal(tmp_path: Path, piped: bool) -> None:
    argv = ["show", "1f1b", "--json", "--ranks", "8", "--microbatches", "4000"]
    if piped:
        command = [str(commands() / "schedir"), *argv]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=250)
        assert (done.returncode, done.stderr) == (0, b"")
        return
    with running(commands(), tmp_path, argv, TERM="dumb") as (process, terminal):
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"{")
        assert read_until(terminal, None) == ""
        assert process.wait() == 0
