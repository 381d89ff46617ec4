"""A learning-rate scheduler, and whether a scheduler's step takes a metric."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from schedir.errors import ExecutionError


def warmup_cosine(optimizer: Optimizer, *, warmup: int, steps: int, floor: float = 0.0) -> LambdaLR:
    """Make a scheduler that raises the learning rate linearly, then lowers it along half a cosine.

    >>> import torch
    >>> from schedir.training import warmup_cosine
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> scheduler = warmup_cosine(optimizer, warmup=1, steps=3)
    >>> for _ in range(4):
    ...     print(round(scheduler.get_last_lr()[0], 3))
    ...     optimizer.step()
    ...     scheduler.step()
    0.5
    1.0
    0.5
    0.0

    Step it once after each step. Over the first `warmup` steps the rate rises, and step number
    `warmup` (from 0) is the first with the optimiser's full rate. After `steps` steps in all the
    rate is `floor` times that, and stays there. For an executor pass `executor.optimizer`.

    The warmup is that of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2, the
    cosine that of Loshchilov and Hutter, "SGDR" (2017), equation 5, without restarts.

    Raises ExecutionError unless 0 ≤ `warmup` < `steps` and 0 ≤ `floor` ≤ 1.
    """
    if not 0 <= warmup < steps:
        raise ExecutionError(
            f"warmup must be at least 0 and less than steps, not {warmup} of {steps} steps"
        )
    if not 0 <= floor <= 1:
        raise ExecutionError(f"floor must be a share of the learning rate, 0 to 1, not {floor}")

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        fallen = min(1.0, (step - warmup) / (steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * fallen)) / 2

    return LambdaLR(optimizer, share)


def takes_metric(scheduler: Any) -> bool:
    """Whether a scheduler's `step` takes a metric, as torch's ReduceLROnPlateau does.

    Raises ExecutionError for an object that is no scheduler, or whose `step` needs more.
    """
    step = getattr(scheduler, "step", None)
    if isinstance(scheduler, type) or not callable(step):
        raise ExecutionError(f"scheduler must be an object with step(), not {scheduler!r}")
    if takes(step):
        return False
    if takes(step, 0.0):
        return True
    raise ExecutionError(
        f"{type(scheduler).__name__}.step{inspect.signature(step)} takes more than a metric: step "
        "it in a callback, and pass it in others= so that checkpoints have it"
    )


def takes(function: Callable[..., object], *given: object) -> bool:
    """Whether a function can be called so, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        pass
    return True
