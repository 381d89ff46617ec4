"""The thread that watches for all executors of a process.

It looks every 50 ms, and at once if a process of this host ends or SIGTERM comes, with which a
launcher ends a job. It runs even if the main thread waits in gloo, or in a stage's own code. If
that holds the interpreter's lock, nothing of Python runs, so a timer in C ends the process and
prints its stack.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

from attrs import define, field

from schedir.runtime.processes.noticeboard import ORPHANED, remove_stale
from schedir.runtime.processes.watch import GRACE, PAUSE, Watch, again, leave, say

_Handler = Callable[[int, FrameType | None], Any] | int | None


@define(eq=False)
class Monitor:
    """The thread that watches for all executors of this process, and the handler of SIGTERM."""

    watches: list[Watch] = field(factory=list)
    thread: threading.Thread | None = None
    launcher: int = 0
    before: _Handler = None  # the handler in whose place this one is, if it is
    woken: int = -1
    waker: int = -1
    terminated_at: float | None = None

    def add(self, watch: Watch) -> None:
        """Watch for one more."""
        remove_stale()
        self.watches.append(watch)
        if len(self.watches) > 1:
            return
        self.launcher = os.getppid()
        self._take_signal()
        self.thread = threading.Thread(target=self._run, name="schedir watch", daemon=True)
        self.thread.start()

    def remove(self, watch: Watch) -> None:
        """Watch for one less."""
        if watch in self.watches:
            self.watches.remove(watch)
        if not self.watches:
            self._give_signal_back()

    def forget(self) -> None:
        """In a forked process, such as one that loads data: SIGTERM ends it, and only it."""
        self.watches, self.thread = [], None
        self._give_signal_back()

    def _take_signal(self) -> None:
        """SIGTERM wakes the thread, even if the main thread runs no Python."""
        self.terminated_at = None
        before = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or before is signal.SIG_IGN or before is None:
            return
        if (taken := signal.set_wakeup_fd(-1)) >= 0:  # somebody else is woken by signals
            signal.set_wakeup_fd(taken)
            return
        self.woken, self.waker = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        self.before = before
        signal.signal(signal.SIGTERM, _on_term)

    def _give_signal_back(self) -> None:
        if self.before is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is _on_term:
            signal.signal(signal.SIGTERM, self.before)
        signal.set_wakeup_fd(-1)
        for end in (self.woken, self.waker):
            os.close(end)
        self.before, self.woken = None, -1

    def _run(self) -> None:
        """Look every 50 ms, and as soon as a process ends or a signal comes."""
        own, armed = self.thread, 0.0
        near: dict[int, int] = {}  # by process id, its descriptor; -1 once it has ended
        try:
            while self.watches and self.thread is own:
                for process in {p for watch in self.watches for p in watch.others.values()}:
                    if process not in near:
                        near[process] = _opened(process)
                poll = select.poll()
                for descriptor in (self.woken, *near.values()):
                    if descriptor >= 0:
                        poll.register(descriptor, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll(PAUSE * 1e3)}
                for process, descriptor in near.items():
                    if descriptor in ready:
                        os.close(descriptor)
                        near[process] = -1
                if self.woken in ready:
                    with suppress(OSError):
                        if signal.SIGTERM in os.read(self.woken, 64):
                            self.terminated_at = monotonic()
                if not (watches := [*self.watches]):
                    break
                self._look_at_launcher(watches)
                ended = [process for process, descriptor in near.items() if descriptor < 0]
                for watch in watches:
                    watch.look(ended)
                self._look_at_signal(watches)
                armed = self._arm(watches, armed)
        finally:
            if armed:
                faulthandler.cancel_dump_traceback_later()
            for descriptor in near.values():
                if descriptor >= 0:
                    os.close(descriptor)

    def _look_at_launcher(self, watches: Sequence[Watch]) -> None:
        if os.getppid() != self.launcher:
            if watches[0].verdict is None:
                say(f"rank {watches[0].own} ended: launcher gone")
            for watch in watches:
                watch.board.become(ORPHANED)
            leave(1, [])  # their files tell the ranks of other launchers where this one stood

    def _look_at_signal(self, watches: Sequence[Watch]) -> None:
        """After SIGTERM: stop after a call, or end, as without a handler."""
        if self.terminated_at is None:
            return
        asked = [watch.terminated() for watch in watches]
        if any(asked) or callable(self.before):
            self.terminated_at = None
            return
        is_known = any(watch.verdict is not None for watch in watches)
        if monotonic() - self.terminated_at > (PAUSE * 2 if is_known else GRACE / 2):
            if not is_known:
                say(f"rank {watches[0].own} ended: SIGTERM")
            leave(128 + signal.SIGTERM, watches)

    def _arm(self, watches: Sequence[Watch], armed: float) -> float:
        """Have a timer in C end the process if this thread does not come back in time."""
        limit, now = min(watch.timeout for watch in watches), monotonic()
        # pytest has the one timer itself.
        if "_pytest.faulthandler" in sys.modules or now - armed < again(limit):
            return armed
        faulthandler.dump_traceback_later(limit + again(limit), exit=True)
        return now


def _on_term(number: int, frame: FrameType | None) -> None:
    """The main thread comes to SIGTERM: the user's own handler is called."""
    if callable(MONITOR.before):
        MONITOR.before(number, frame)
    elif not MONITOR.watches:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _opened(process: int) -> int:
    """A descriptor that is readable once a process has ended; -1 if it has."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(process)
    return -1


MONITOR = Monitor()
"""The one of this process."""

_masks = threading.local()  # the signals that each thread blocked before it forked


def _block() -> None:
    """No SIGTERM until the child has forgotten the executors."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(after_in_child=MONITOR.forget)  # before the next one
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_unblock)
