"""`schedir search`: a .sched on stdout, what it is like on stderr, and an end by Ctrl-C."""

from __future__ import annotations

import signal
from typing import Any

import pytest

import schedir
from schedir.cli import search
from schedir.finder import Found
from tests.command_line import Run


def test_it_writes_a_schedule_and_says_what_it_is_like(run: Run) -> None:
    code, out, err = run("search", "--max-activations", "4", "--seconds", "1")
    assert code == 0
    found = schedir.loads(out)
    assert schedir.check(found).ok
    assert schedir.simulate(found).makespan == 27
    assert "makespan 27, longest span 27" in err
    assert "peak 4 activations" in err
    assert "none can be quicker" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-activations", "0"], "the least that works is 1"),
        (["--memory-limit", "1", "--cost", "weight_bytes=4"], "the least that works is 4"),
        (["--memory-limit", "1GiB"], "a memory limit needs bytes"),
        (["--memory-limit", "1", "--max-activations", "1"], "not allowed with"),
        (["--placement", "spiral"], "invalid choice"),
        (["--seconds", "inf"], "seconds must be a number >= 0, not inf"),
        (["--cost", "forward=1,2"], "forward has 2 numbers"),
        (["--chunks", "100000000"], "too many: their product may be at most"),
        (["-o", "no/such/folder/found.sched"], "can't be written"),
    ],
)
def test_what_can_not_be_is_said_in_one_line(run: Run, options: list[str], says: str) -> None:
    assert says in run.refuses("search", "--ranks", "3", "--microbatches", "4", *options)


def test_ctrl_c_keeps_the_best_so_far(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["search", "--ranks", "6", "--microbatches", "24", "--chunks", "2", "--seconds", "9999"]
    argv += ["--max-activations", "7", "--cost", "latency=0.37"]
    interrupted: list[int] = []

    def find(**options: Any) -> Found:
        def progress(done: int, total: int) -> None:
            if done and not interrupted:
                interrupted.append(done)
                signal.raise_signal(signal.SIGINT)

        return schedir.finder.find(**{**options, "progress": progress})

    monkeypatch.setattr(search, "find", find)
    code, out, err = run(*argv)
    assert (code, len(interrupted)) == (0, 1)
    assert "lower bound" in err
    assert "cut short" in err
    assert schedir.check(schedir.loads(out), max_activations=7).ok
