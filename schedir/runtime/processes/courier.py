"""What waits for the device before it goes to other processes, on a thread that may wait.

    rank 1, which has the loss      step ─ next call: waits for rank 0's announcement …
             its courier                      └─ waits for the device, sends the loss ──┐
    rank 0                          step ─ reads the loss: waits ◀──────────────────────┘  next call

Were rank 1 itself to send it, before its next call, its device would run out of work there; after
rank 0's announcement, both would wait for ever. The courier receives what others send as well: all
couriers have the same errands in the same order, so none waits for another in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_Errands: TypeAlias = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class Courier:
    """Runs errands in turn, on a thread of its own, which ends with the process."""

    def __init__(self) -> None:
        self._errands: _Errands = SimpleQueue()
        self._started = False
        self._last: Future[Any] | None = None

    def send(self, errand: Callable[[], T]) -> Future[T]:
        """Run it in its turn; gives what it will have returned."""
        if not self._started:
            # Not one that Python waits for at its end: the device may have failed.
            Thread(target=_run, args=(self._errands,), name="schedir courier", daemon=True).start()
            self._started = True
        done: Future[T] = Future()
        self._errands.put((errand, done))
        self._last = done
        return done

    def finish(self) -> None:
        """Wait for all errands; there is no other."""
        if self._last is not None:
            self._last.exception()
        self.stop()

    def stop(self) -> None:
        """There is no other errand, and nobody waits for the last one any more."""
        self._last = None
        self._errands.put(None)


def _run(errands: _Errands) -> None:
    for errand, done in iter(errands.get, None):
        try:
            done.set_result(errand())
        except BaseException as error:  # whoever waits for it raises it
            done.set_exception(error)
        del errand, done
