"""The thread that watches the other processes of the executors here."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from typing import ClassVar, cast

import pytest

from schedir.runtime.processes.monitor import Monitor
from schedir.runtime.processes.watch import Watch


class Quiet:
    """A watch that sees nothing."""

    timeout, verdict = 60.0, None
    others: ClassVar[dict[int, int]] = {}

    def look(self, ended: list[int]) -> None:
        """Nobody has ended."""


def test_the_timer_that_ends_the_process_goes_with_the_last_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a process would be ended that goes on for longer than the timeout after that."""
    said, is_set = [], threading.Event()

    def set_timer(*_: object, **__: object) -> None:
        said.append("set")
        is_set.set()

    monkeypatch.delitem(sys.modules, "_pytest.faulthandler")  # which needs the timer itself
    monkeypatch.setattr(faulthandler, "dump_traceback_later", set_timer)
    monkeypatch.setattr(
        faulthandler, "cancel_dump_traceback_later", lambda: said.append("cancelled")
    )
    monitor, made = Monitor(), cast(Watch, Quiet())
    monitor.add(made)
    thread = monitor.thread
    assert thread is not None
    assert is_set.wait(60)
    monitor.remove(made)
    thread.join(60)
    assert said[-1] == "cancelled"


@pytest.mark.parametrize("blocked", [set(), {signal.SIGTERM}])
def test_a_fork_leaves_the_mask_of_signals_as_it_was(blocked: set[signal.Signals]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        child = os.fork()
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if not child:
            os._exit(masked != before | blocked)
        assert masked == before | blocked
        assert os.waitpid(child, 0)[1] == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
