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

from schedir.runtime.processes.noticeboard import remove_stale
from schedir.runtime.processes.watch import GRACE, PAUSE, Watch, again, leave, say

_Handler = Callable[[int, FrameType | None], Any] | int | None


@define(eq=False)
class _Monitor:
    """The thread that watches for all executors of this process, and the handler of SIGTERM."""

    watches: list[Watch] = field(factory=list)
    thread: threading.Thread | None = None
    launcher: int = 0
    before: _Handler = None
    woken: int = -1
    waker: int = -1
    terminated_at: float | None = None

    def add(self, watch: Watch) -> None:
        """Watch for one more."""
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

    def _take_signal(self) -> None:
        """SIGTERM wakes the thread, even if the main thread runs no Python."""
        self.before, self.woken, self.waker, self.terminated_at = None, -1, -1, None
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_IGN or before is None:
            return
        self.woken, self.waker = os.pipe2(os.O_NONBLOCK)
        taken = signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        if taken >= 0:  # somebody else is woken by signals
            signal.set_wakeup_fd(taken)
            self._close_pipe()
            return
        self.before = before
        signal.signal(signal.SIGTERM, _on_term)

    def _give_signal_back(self) -> None:
        if self.before is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is _on_term:
            signal.signal(signal.SIGTERM, self.before)
        signal.set_wakeup_fd(-1)
        self.before = None
        self._close_pipe()

    def forget(self) -> None:
        """In a forked process, such as one that loads data: SIGTERM ends it, and only it."""
        self.watches, self.thread = [], None
        self._give_signal_back()

    def _close_pipe(self) -> None:
        for end in (self.woken, self.waker):
            os.close(end)
        self.woken = self.waker = -1

    def _run(self) -> None:
        """Look every 50 ms, and as soon as a process ends or a signal comes."""
        own = self.thread
        descriptors: dict[int, int] = {}  # of processes, by process id
        poll = select.poll()
        if self.woken >= 0:
            poll.register(self.woken, select.POLLIN)
        ended: list[int] = []
        armed = 0.0
        try:
            while self.watches and self.thread is own:
                for watch in self.watches:
                    for process in watch.others.values():
                        if process not in descriptors and process not in ended:
                            descriptor = _opened(process)
                            if descriptor is None:
                                ended.append(process)
                            else:
                                descriptors[process] = descriptor
                                poll.register(descriptor, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll(PAUSE * 1e3)}
                for process, descriptor in [*descriptors.items()]:
                    if descriptor in ready:
                        ended.append(process)
                        poll.unregister(descriptor)
                        os.close(descriptors.pop(process))
                if self.woken in ready:
                    with suppress(OSError):
                        if signal.SIGTERM in os.read(self.woken, 64):
                            self.terminated_at = monotonic()
                watches = list(self.watches)
                self._look_at_launcher(watches)
                for watch in watches:
                    watch.look(ended)
                self._look_at_signal(watches)
                armed = self._arm(watches, armed)
        finally:
            if armed:
                faulthandler.cancel_dump_traceback_later()
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _look_at_launcher(self, watches: Sequence[Watch]) -> None:
        if os.getppid() != self.launcher and watches:
            if watches[0].verdict is None:
                say(f"rank {watches[0].own} ended: launcher gone")
            for watch in watches:
                watch.be_orphaned()
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
            for watch in watches[:1]:
                if not is_known:
                    say(f"rank {watch.own} ended: SIGTERM")
            leave(128 + signal.SIGTERM, watches)

    def _arm(self, watches: Sequence[Watch], armed: float) -> float:
        """Have a timer in C end the process if this thread does not come back in time."""
        if "_pytest.faulthandler" in sys.modules or not watches:  # it has but one timer
            return armed
        limit = min(watch.timeout for watch in watches)
        now = monotonic()
        if now - armed < again(limit):
            return armed
        faulthandler.dump_traceback_later(limit + again(limit), exit=True)
        return now


def _on_term(number: int, frame: FrameType | None) -> None:
    """The main thread comes to SIGTERM: the user's own handler is called."""
    if callable(_monitor.before):
        _monitor.before(number, frame)
    elif not _monitor.watches:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _opened(process: int) -> int | None:
    """A descriptor that is readable once a process has ended; None if it has."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(process)
    return None


_monitor = _Monitor()
_masks = threading.local()  # the signals that each thread blocked before it forked


def _before_fork() -> None:
    """No SIGTERM until the child has forgotten the executors."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    _monitor.forget()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def watch(made: Watch) -> None:
    """Begin to watch for an executor."""
    remove_stale()
    _monitor.add(made)


def watch_no_longer(made: Watch) -> None:
    """Watch no longer for an executor, and remove its files."""
    _monitor.remove(made)
    made.board.close()
