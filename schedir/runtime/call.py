"""One call: of which kind it is, how each rank makes it, and its result."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import attrs
import torch

from schedir.display import Displayed
from schedir.errors import ExecutionError

Keep: TypeAlias = Callable[[Any, Any], Any]
"""(output, target) → the value to keep for a microbatch."""

NOTHING = 0
"""The fingerprint of what can't be compared: of no batch, or of an iterator, which is read once."""


@attrs.define(eq=False)  # kinds are compared by identity, at every step
class Call:
    """One call of the executor, or a kind of calls; every rank must make the same one.

    A kind has a `name`, the call as the user wrote it. `trains`: it computes gradients. `updates`:
    it runs the OPTIM_STEPs. `has_loss`: it has a target. `evaluates`: modules are in eval mode.

    `number` counts the calls before this one, `step` the calls of `step`, which with the executor's
    seed seeds the forwards. `precision` is the autocast dtype on the stages' device, None without
    autocast. `rows` are those of the whole batches that are cut, None if none is; `inputs` and
    `target` are the fingerprints of the arguments. The first stage's rank knows the number of the
    input `signature`, and whether all are to `stop` after this call.

    The rest stays here: `keeps` maps the last stage's output and the target to the value that the
    result keeps; None keeps nothing. `autocast` are the device types on which the caller has
    autocast on; only forwards run under it.
    """

    name: str
    trains: bool = False
    updates: bool = False
    has_loss: bool = True
    evaluates: bool = False
    number: int = 0
    step: int = 0
    precision: torch.dtype | None = None
    rows: int | None = None
    inputs: int = NOTHING
    target: int = NOTHING
    signature: int | None = None
    stop: bool = False
    keeps: Keep | None = None
    autocast: tuple[str, ...] = ()

    def of_number(self, number: int, step: int = 0, precision: torch.dtype | None = None) -> Call:
        """A call of this kind."""
        kind = self.name, self.trains, self.updates, self.has_loss, self.evaluates
        return Call(*kind, number, step, precision)

    @property
    def what(self) -> str:
        """What all ranks must agree on, in words."""
        under = "" if self.precision is None else f" under autocast to {self.precision}"
        return f"{self.name}{under}"

    def __str__(self) -> str:
        return f"call {self.number}, {self.name}"


STEP = Call("step", trains=True, updates=True)
RUN = Call("run", trains=True, updates=True)
ACCUMULATE = Call("step(update=False)", trains=True)
EVALUATE = Call("evaluate", evaluates=True)
INFER = Call("infer", has_loss=False, evaluates=True)
EVAL = Call("eval")
FORWARDS = Call("eval without a loss", has_loss=False)
CLOSE = Call("close", has_loss=False)
GATHER = Call("gather", has_loss=False)
COLLECT = Call("collect", has_loss=False)
TIMELINES = Call("timelines", has_loss=False)
KINDS = (
    *(STEP, RUN, ACCUMULATE, EVALUATE, INFER, EVAL, FORWARDS),
    *(CLOSE, GATHER, COLLECT, TIMELINES),
)


@lru_cache
def autocast_kinds(device: torch.device) -> Collection[str]:
    """The device types whose autocast may matter to stages on this device."""
    return frozenset(filter(torch.amp.is_autocast_available, {"cpu", device.type}))


@attrs.define(eq=False)
class Now:
    """The current call of a program; bound calls that depend on it read it here. `at` says where
    this process stands; see `schedir.runtime.processes.noticeboard`."""

    at: list[int] | memoryview[int]
    call: Call = STEP


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
    _busy: Callable[[], float]
    _elapsed: Callable[[], float]
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
        return self._losses()

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
        return None if self._grad_norm is None else self._grad_norm()

    @cached_property
    def busy(self) -> float:
        """The seconds that this rank spent in compute."""
        return self._busy()

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
        return self._elapsed()
