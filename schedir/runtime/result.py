"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable


class StepResult:
    """The result of one step, on every rank.

    `busy` is the time that this rank spent in compute, `elapsed` that of the whole step, both in
    seconds.
    """

    def __init__(self, loss: Callable[[], float], busy: float, elapsed: float) -> None:
        self._fetch = loss
        self._loss: float | None = None
        self.busy = busy
        self.elapsed = elapsed

    @property
    def loss(self) -> float:
        """The mean loss over the samples of the step; reading it waits for it to arrive."""
        if self._loss is None:
            self._loss = self._fetch()
        return self._loss
