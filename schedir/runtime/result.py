"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedir.errors import ExecutionError


class StepResult:
    """The result of one step, on every rank.

    `outputs` is what the last stage returned, by microbatch, without its graph: where that was
    asked for, on the rank of the last stage; else None. `grad_norm` is the norm of all gradients
    before they were clipped, on every rank with a stage; None where they were not. `busy` is the
    time that this rank spent in compute, `elapsed` that of the whole step, both in seconds.
    """

    def __init__(
        self,
        loss: Callable[[], float] | None,
        grad_norm: float | None,
        outputs: list[Any] | None,
        busy: float,
        elapsed: float,
    ) -> None:
        self._fetch = loss
        self.grad_norm = grad_norm
        self.outputs = outputs
        self._loss: float | None = None
        self.busy = busy
        self.elapsed = elapsed

    @property
    def loss(self) -> float:
        """The mean loss over the samples of the step; reading it waits for it to arrive."""
        if self._loss is None:
            if self._fetch is None:
                raise ExecutionError("inference has no loss")
            self._loss = self._fetch()
        return self._loss
