"""How much a search may do: counted in work, so that the same seed finds the same schedule on any
machine, and cut by the time of the process and by whoever waits for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_RATE = 800_000  # units of work a second, on a slow core
SCHEDULED, RUN, BRANCHED = 8, 1, 25
"""Units of work for each action that a rule puts in order, for each that an order runs, and for
each state of small work that is made."""
_ANY = 15  # units of work of any candidate


class Budget:
    """What is left of `seconds` of work, the slow core's; `progress` takes (done, total)."""

    def __init__(
        self,
        seconds: float,
        stop: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"seconds must be a number, not {seconds!r}")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a number >= 0, not {seconds}")
        self.total = self.left = int(seconds * _RATE)
        self._last = 0
        self.candidates = 0
        self._until = time.process_time() + seconds
        self._stop, self._progress = stop, progress

    def allow(self, share: float) -> None:
        """Let so much of the whole be done from here on before it is `over`."""
        self._last = self.left - int(self.total * share)

    def spend(self, actions: int, units: int) -> None:
        """One candidate more, of so many actions."""
        self.candidates += 1
        self.left -= actions * units + _ANY
        if self._progress is not None:
            self._progress(min(self.total, self.total - self.left), self.total)

    @property
    def over(self) -> bool:
        """Whether all work is done, or the search is to end."""
        return self.left <= max(0, self._last) or self._stop() or time.process_time() >= self._until
