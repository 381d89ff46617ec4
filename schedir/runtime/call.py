"""The kinds of calls of the executor, and the state of one call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch


@attrs.frozen(eq=False)  # compared by identity, at every step
class Request:
    """One kind of call; every rank must make the same one.

    `name` is the call as the user wrote it. `trains`: it computes gradients. `updates`: it runs the
    OPTIM_STEPs. `has_loss`: it has a target.
    """

    name: str
    trains: bool = False
    updates: bool = False
    has_loss: bool = True


STEP = Request("step", trains=True, updates=True)
RUN = Request("run", trains=True, updates=True)
ACCUMULATE = Request("step(update=False)", trains=True)
EVALUATE = Request("evaluate")
INFER = Request("infer", has_loss=False)
CLOSE = Request("close", has_loss=False)
GATHER = Request("gather", has_loss=False)
COLLECT = Request("collect", has_loss=False)
TIMELINES = Request("timelines", has_loss=False)
REQUESTS = (
    *(STEP, RUN, ACCUMULATE, EVALUATE, INFER),
    *(CLOSE, GATHER, COLLECT, TIMELINES),
)


Keep: TypeAlias = Callable[[Any, Any], Any]
"""(output, target) → the value to keep for a microbatch."""


@lru_cache
def autocast_kinds(device: torch.device) -> Collection[str]:
    """The device types whose autocast may matter to stages on this device."""
    return frozenset(filter(torch.amp.is_autocast_available, {"cpu", device.type}))


@attrs.frozen(eq=False)
class Call:
    """One call of the executor.

    `number` counts the calls before this one, `step` the calls of `step`, which with the executor's
    seed seeds the forwards. `keeps` maps the last stage's output and the target to the value that
    the result keeps; None keeps nothing. `autocast` are the device types on which the caller has
    autocast on; only forwards run under it. `precision` is the autocast dtype on the stages'
    device, None without autocast.
    """

    request: Request
    number: int
    step: int = 0
    keeps: Keep | None = None
    autocast: tuple[str, ...] = ()
    precision: torch.dtype | None = None

    def __str__(self) -> str:
        return f"call {self.number}, {self.request.name}"


@attrs.define(eq=False)
class Now:
    """The current call of a program; bound calls that depend on it read it here. `at` says where
    this process stands; see `schedir.runtime.processes.noticeboard`."""

    at: list[int] | memoryview[int]
    call: Call = attrs.field(factory=lambda: Call(STEP, 0))
