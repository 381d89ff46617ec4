"""The record of one call: of which kind it is, and how each rank makes it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch

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
