"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, TypeVar

import attrs

from schedir.display import Displayed
from schedir.errors import ExecutionError

T = TypeVar("T")


class Read(Protocol):
    """Waits for something that a call has left, which is called `what`."""

    def __call__(self, fetch: Callable[[], T], what: str, /) -> T:
        """Fetch it."""


@attrs.frozen
class CallLosses:
    """The losses of a call: the mean over its samples, how many these are, and how to list them
    by microbatch, which takes longer."""

    mean: float
    samples: float
    by_microbatch: Callable[[], tuple[float, ...]]


@attrs.define(eq=False, repr=False, slots=False)
class StepResult(Displayed):
    """The result of one step, on every rank.

    `outputs` is what the last stage returned, by microbatch, without its graph, or what was made of
    that: where it was asked for, on the rank of the last stage, None for a microbatch that another
    replica of it ran; else None. `skipped` are the OPTIM_STEPs of the stages here that were left
    out by `nonfinite="skip"`: of each its stage, and its number among those of the stage in the
    call, from 0. On a device that queues its work all other is known when that has
    come to it: it is waited for where it is read.
    """

    _losses: Callable[[], CallLosses] | None
    _grad_norm: Callable[[], float] | None
    outputs: list[Any] | None
    skipped: tuple[tuple[int, int], ...]
    _busy: float | Callable[[], float]
    _elapsed: float | Callable[[], float]
    _read: Read

    def __repr__(self) -> str:
        # What is not known yet is not waited for.
        found: CallLosses | None = vars(self).get("_found")
        loss = "its loss is not read yet" if found is None else f"loss {found.mean:.6g}"
        return f"<StepResult {'without a loss' if self._losses is None else loss}>"

    @cached_property
    def _found(self) -> CallLosses:
        if self._losses is None:
            raise ExecutionError("inference has no loss")
        return self._read(self._losses, "loss")

    @property
    def loss(self) -> float:
        """The mean loss over the samples of the step; reading it waits for it to arrive."""
        return self._found.mean

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """The mean loss of each microbatch; NaN for one without samples. Of several pipelines the
        first one's microbatches come first."""
        return self._found.by_microbatch()

    @property
    def samples(self) -> float:
        """How many samples the loss is the mean over, as the executor's `count` says."""
        return self._found.samples

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of all gradients before they were clipped, on every rank with a stage; None
        where they were not."""
        return None if self._grad_norm is None else self._read(self._grad_norm, "norm")

    @cached_property
    def busy(self) -> float:
        """The seconds that this rank spent in compute."""
        return self._read(self._busy, "time") if callable(self._busy) else self._busy

    @cached_property
    def elapsed(self) -> float:
        """The seconds that the whole step took."""
        return self._read(self._elapsed, "time") if callable(self._elapsed) else self._elapsed
