"""The result of a step: its loss, its outputs and its times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, TypeVar

import attrs

from schedir.display import Displayed
from schedir.errors import ExecutionError

T = TypeVar("T")


class Read(Protocol):
    """Waits for a value that a call has left on its way; `what` names the value in messages."""

    def __call__(self, fetch: Callable[[], T], what: str, /) -> T:
        """Fetch it."""


@attrs.frozen
class CallLosses:
    """The losses of a call: their mean over its samples, or their sum, as they are weighed; the
    number of samples; and the losses by microbatch."""

    mean: float
    samples: float
    by_microbatch: tuple[float, ...]


@attrs.define(eq=False, repr=False, slots=False)
class StepResult(Displayed):
    """The result of one step, on every rank.

    >>> import torch
    >>> from torch import nn
    >>> from schedir import build
    >>> from schedir.runtime import Executor
    >>> stages = {0: nn.Flatten(), 1: nn.Identity()}
    >>> schedule = build("1f1b", ranks=2, microbatches=2)
    >>> executor = Executor(schedule, stages, nn.MSELoss(), in_process=True)
    >>> result = executor.evaluate(torch.tensor([[1.0], [3.0]]), target=torch.zeros(2, 1))
    >>> result.loss, result.losses, result.samples
    (5.0, (1.0, 9.0), 2.0)

    `outputs` is a list by microbatch of what the last stage returned, without its graph, or of what
    the function `outputs=` returned. It is there on the rank of the last stage, if you asked for
    it; otherwise None. An entry is None if another replica of the stage ran that microbatch.

    `skipped` has the OPTIM_STEPs of the stages here that `nonfinite="skip"` left out, each as
    (stage, number of the OPTIM_STEP among the stage's in this call, from 0).

    On a GPU the other values are known only when the GPU has come to them: reading one waits.
    """

    _losses: Callable[[], CallLosses] | None
    _grad_norm: Callable[[], float] | None
    outputs: list[Any] | None
    skipped: tuple[tuple[int, int], ...]
    _busy: float | Callable[[], float]
    _elapsed: float | Callable[[], float]
    _read: Read
    _stragglers: Callable[[], tuple[tuple[int, float], ...]] = tuple

    def __repr__(self) -> str:
        # To show a result does not wait for the loss.
        found: CallLosses | None = vars(self).get("_found")
        loss = "its loss is not read yet" if found is None else f"loss {found.mean:.6g}"
        return f"<StepResult {'without a loss' if self._losses is None else loss}>"

    def __str__(self) -> str:
        """The loss, for which it waits, and the times."""
        try:
            loss = f"loss {self.loss:.6g} over {self.samples} sample{'s' * (self.samples != 1)}"
        except ExecutionError as error:
            loss = str(error)
        return f"{loss}, {self.elapsed:.4g} s, of them {self.busy:.4g} s in compute"

    @cached_property
    def _found(self) -> CallLosses:
        if self._losses is None:
            raise ExecutionError("inference has no loss")
        return self._read(self._losses, "loss")

    @property
    def loss(self) -> float:
        """The mean loss over the samples of the step; the sum of the losses with `weigh=None`.
        Reading it waits for it to arrive."""
        return self._found.mean

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean loss of each microbatch; NaN for one without samples. With several pipelines the
        first one's microbatches come first."""
        return self._found.by_microbatch

    @property
    def samples(self) -> float:
        """The number of samples that the loss is the mean over, by the executor's `count`; the
        number of microbatches unless they are weighed by samples."""
        return self._found.samples

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of all gradients before clipping, on every rank with a stage; None if the
        executor does not clip."""
        return None if self._grad_norm is None else self._read(self._grad_norm, "norm")

    @cached_property
    def busy(self) -> float:
        """The seconds that this rank spent in compute."""
        return self._read(self._busy, "time") if callable(self._busy) else self._busy

    @cached_property
    def stragglers(self) -> tuple[tuple[int, float], ...]:
        """The ranks that hold the others up, each as (rank, ratio): their compute in the latest
        eight steps took at least 1.5 times as long as the median rank's. A stage that has more
        work than others shows as well. Ranks are those of the default process group; on a GPU,
        and with one process, it is empty."""
        return self._stragglers()

    @cached_property
    def elapsed(self) -> float:
        """The seconds that the whole step took."""
        return self._read(self._elapsed, "time") if callable(self._elapsed) else self._elapsed
