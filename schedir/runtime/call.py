"""What a caller asks of the executor, and what holds all through one call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch


@attrs.frozen(eq=False)  # each is one object: compared at every step
class Request:
    """One kind of call, as every rank has to make it.

    `name` is what the caller wrote. `trains` where gradients are computed, `updates` where
    OPTIM_STEPs are carried out, `has_loss` where there is a target to compare with.
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
REQUESTS = (STEP, RUN, ACCUMULATE, EVALUATE, INFER, CLOSE, GATHER, COLLECT)


Keep: TypeAlias = Callable[[Any, Any], Any]
"""(output, target) → what is to be kept of a microbatch."""


@lru_cache
def autocast_kinds(device: torch.device) -> Collection[str]:
    """The types of device on which what runs there may be computed in lower precision."""
    return frozenset(filter(torch.amp.is_autocast_available, {"cpu", device.type}))


@attrs.frozen(eq=False)
class Call:
    """One call of the executor.

    `number` counts the calls before this one, `step` the calls of `step`; with the executor's seed
    that seeds the forwards. `keeps` makes of the last stage's output and the target what the result
    holds of a microbatch, None for nothing. `autocast` are the types of device on which the caller
    computes in lower precision, which forwards alone do; `precision` is the type that it computes
    in on the stages' device, None for no autocast.
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
    """The call that a program is run for: bound calls that depend on it read it here."""

    call: Call = attrs.field(factory=lambda: Call(STEP, 0))
