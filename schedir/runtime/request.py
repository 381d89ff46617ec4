"""What a caller asks of the executor."""

from __future__ import annotations

import attrs


@attrs.frozen(eq=False)  # each is one object: compared at every step
class Request:
    """One call of the executor, as every rank has to make it.

    `name` is what the caller wrote. `trains` where gradients are computed, `updates` where
    OPTIM_STEPs are carried out, `has_loss` where there is a target to compare with.
    """

    name: str
    trains: bool = False
    updates: bool = False
    has_loss: bool = True


STEP = Request("step", trains=True, updates=True)
ACCUMULATE = Request("step(update=False)", trains=True)
EVALUATE = Request("evaluate")
INFER = Request("infer", has_loss=False)
CLOSE = Request("close", has_loss=False)
REQUESTS = (STEP, ACCUMULATE, EVALUATE, INFER, CLOSE)
