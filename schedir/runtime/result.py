"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from schedir.errors import ExecutionError


class StepResult:
    """The result of one step, on every rank.

    `outputs` is what the last stage returned, by microbatch, without its graph: where that was
    asked for, on the rank of the last stage; else None. On a device that queues its work all other
    is known when that has come to it: it is waited for where it is read.
    """

    def __init__(
        self,
        loss: Callable[[], float] | None,
        grad_norm: Callable[[], float] | None,
        outputs: list[Any] | None,
        busy: Callable[[], float],
        elapsed: Callable[[], float],
        read: Callable[[Callable[[], float], str], float],
    ) -> None:
        self._loss = loss
        self._grad_norm = grad_norm
        self.outputs = outputs
        self._busy = busy
        self._elapsed = elapsed
        self._read = read

    @cached_property
    def loss(self) -> float:
        """The mean loss over the samples of the step; reading it waits for it to arrive."""
        if self._loss is None:
            raise ExecutionError("inference has no loss")
        return self._read(self._loss, "loss")

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of all gradients before they were clipped, on every rank with a stage; None
        where they were not."""
        return None if self._grad_norm is None else self._read(self._grad_norm, "norm")

    @cached_property
    def busy(self) -> float:
        """The seconds that this rank spent in compute."""
        return self._read(self._busy, "time")

    @cached_property
    def elapsed(self) -> float:
        """The seconds that the whole step took."""
        return self._read(self._elapsed, "time")
