"""How long this process waits for others where only a look tells whether they are done.

A wait for a connection ends with the connection; what a device does ends never, if what it waits
for never comes. So the host looks, until it is done, or out of time, or another process has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep

from schedir.runtime.processes.failure import WaitError

_PAUSE = 20e-6  # seconds from look to look
_ASK = 0.5  # seconds after which to ask whether another process has failed: over the network


class Patience:
    """Waits for as long as `timeout`; `others_failed` asks whether another process has failed."""

    def __init__(self, timeout: timedelta, others_failed: Callable[[], bool]) -> None:
        self._seconds = timeout.total_seconds()
        self._others_failed = others_failed

    def until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until it is done. Raises WaitError, with `what` in words, where that is in vain."""
        if done():
            return
        begun = asked = monotonic()
        while not done():
            now = monotonic()
            if now - begun > self._seconds:
                raise WaitError(TimeoutError("timed out"), what())
            if now - asked > _ASK:
                asked = now
                if self._others_failed():
                    raise WaitError(RuntimeError("another process has failed"), what())
            sleep(_PAUSE)
