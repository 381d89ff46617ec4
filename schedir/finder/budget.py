"""How much a search may do: counted in work, so that the same seed finds the same schedule on any
machine, however busy. A clock ends it only where somebody has said for how long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

DEFAULT_SECONDS = 5.0
"""How long a slow core works on a search whose `seconds` nobody has said."""
_RATE = 800_000  # units of work a second, on a slow core
SCHEDULED, RUN, BRANCHED = 8, 1, 25
"""Units of work for each action that a rule puts in order, for each that an order runs, and for
each state of small work that is made."""
_ANY = 15  # units of work of any candidate


class Budget:
    """What is left of the work that a slow core does in `seconds`; `progress` takes (done, total).

    Where `seconds` are given, it is over at the latest once this process has computed for so long.
    `cut` says whether that, or `stop`, has ended it before its work was done.
    """

    def __init__(
        self,
        seconds: float | None,
        stop: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._until = math.inf
        if seconds is None:
            seconds = DEFAULT_SECONDS
        elif isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"seconds must be a number, not {seconds!r}")
        elif not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a number >= 0, not {seconds}")
        else:
            self._until = time.process_time() + seconds
        self.total = self.left = int(seconds * _RATE)
        self._last = 0
        self.candidates = 0
        self.cut = False
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
        if self.left <= max(0, self._last):
            return True
        self.cut = self._stop() or (self._until < math.inf and time.process_time() >= self._until)
        return self.cut
