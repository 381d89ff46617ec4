"""Learning-rate schedulers, and what their steps take."""

from __future__ import annotations

import inspect
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from schedir.errors import ExecutionError


def warmup_cosine(optimizer: Optimizer, *, warmup: int, steps: int, floor: float = 0.0) -> LambdaLR:
    """Make a scheduler, stepped once after each step: up in a line, down along half a cosine.

    Over `warmup` steps the learning rate rises to the optimiser's own, which step number `warmup`
    is the first to have; it has fallen to `floor` times that after `steps` steps in all, and stays
    there. Of an executor it takes `executor.optimizer`.

    The warmup is that of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2, the
    cosine that of Loshchilov and Hutter, "SGDR" (2017), equation 5, without restarts.

    Raises ExecutionError unless 0 ≤ `warmup` < `steps` and 0 ≤ `floor` ≤ 1.
    """
    if not 0 <= warmup < steps:
        raise ExecutionError(
            f"warmup must be 0 or more steps, and fewer than all: not {warmup} of {steps}"
        )
    if not 0 <= floor <= 1:
        raise ExecutionError(f"floor is a share of the learning rate, from 0 to 1, not {floor}")

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        fallen = min(1.0, (step - warmup) / (steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * fallen)) / 2

    return LambdaLR(optimizer, share)


def takes_metric(scheduler: object) -> bool:
    """Whether a scheduler's `step` takes a metric, as that of torch's ReduceLROnPlateau.

    Raises ExecutionError for what is no scheduler, or takes something else.
    """
    step = getattr(scheduler, "step", None)
    if isinstance(scheduler, type) or not callable(step):
        raise ExecutionError(f"scheduler must be an object with step(), unlike {scheduler!r}")
    for given in range(2):
        try:
            inspect.signature(step).bind(*[0.0] * given)
        except TypeError:
            continue
        return given > 0
    raise ExecutionError(
        f"{type(scheduler).__name__}.step{inspect.signature(step)} takes more than a metric: step "
        "it in a callback, and give it in others="
    )
