"""The scale of the loss under float16, and that of stages that step after other microbatches.

A GradScaler's decision is shared by all stages:

    backward of the last stage   starts from scale x share of the microbatch
    before OPTIM_STEP            every gradient is divided by the scale, after all sums
    end of the call              the scale grows, or shrinks if a gradient was not finite

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2. All processes begin with
the same scale and share each decision, so their scales stay equal without a message.

Every gradient is accumulated with the share that the last stage gave its microbatch. The shares of
each of the last stage's OPTIM_STEPs add up to one. A stage that groups the microbatches in another
way takes the mean over its own group: before it steps, it divides its sum by the sum of the group's
shares. In 1F1B-RR (PipeDream, SOSP 2019, section 3.2), with two replicas of stage 0:

    stage 1   0 | 1 | 2 | 3     a step for each: all shares are 1
    stage 0   0   1 | 2   3     a step for two: their sum is 2, and the scale is a half

Of n whole groups of the last stage the sum is n. Of a part of a group it is that part, as the
microbatches of such a group must hold equally many samples (`feeding`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.plan import Plan

Step = tuple[int, int]
"""A stage, and the number of one of its OPTIM_STEPs in a call."""


class LossScale:
    """The scale of a GradScaler: `now` for the current call, and its `inverse` on the device."""

    def __init__(self, scaler: GradScaler, accelerator: Accelerator) -> None:
        self._scaler = scaler
        self.now = 1.0
        self.inverse = torch.ones((), dtype=torch.float32, device=accelerator.device)

    def begin(self) -> None:
        """Take the scale of the call that begins."""
        scale = self._scaler.get_scale()
        if scale != self.now:
            self.now = scale
            self.inverse.fill_(1 / scale)

    def update(self, overflowed: bool) -> None:
        """Change the scale as `GradScaler.update` does after a step that was applied or not."""
        state = self._scaler.state_dict()
        factor, applied = 1.0, state["_growth_tracker"] + 1  # in a row
        if overflowed:
            factor, applied = state["backoff_factor"], 0
        elif applied == state["growth_interval"]:
            factor, applied = state["growth_factor"], 0
        with np.errstate(over="ignore"):
            scale = float(np.float32(self.now * factor))
        if math.isfinite(scale):
            state["scale"] = scale
        state["_growth_tracker"] = applied
        self._scaler.load_state_dict(state)


class Scaling:
    """Scales the gradients of each OPTIM_STEP that applies other microbatches than the loss
    stage's; `active` says whether there is any."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        weighs = plan.arguments.weigh is not None  # else every share is 1, in every group
        self._share_sums = share_sums(plan.schedule) if plan.updates and weighs else {}
        self.active = bool(self._share_sums)

    def begin(self) -> None:
        """A call begins that updates. Raises ExecutionError for gradients from before it: they have
        their scale already."""
        for stage in self._plan.local_stages:
            if self.scales(stage, 0) and any(
                p.grad is not None for p in self._plan.trained[stage].parameters()
            ):
                raise ExecutionError(
                    f"stage {stage} has gradients from before this call, but its first OPTIM_STEP "
                    "scales them too, because it steps after other microbatches than the loss "
                    "stage; clear them (zero_grad), and leave update=False out"
                )

    def scales(self, stage: int, step: int) -> bool:
        """Whether an OPTIM_STEP has another scale than the loss stage's."""
        return (stage, step) in self._share_sums

    def scale(self, parameters: Sequence[nn.Parameter], stage: int, step: int) -> None:
        """Scale what has been accumulated for an OPTIM_STEP, after all sums over replicas."""
        scale = 1.0 / self._share_sums[stage, step]
        for parameter in parameters:
            if parameter.grad is not None:  # out of place: another's may share its memory
                parameter.grad = parameter.grad * scale


def share_sums(schedule: Schedule) -> dict[Step, float]:
    """The sums of the shares of the OPTIM_STEPs that apply other microbatches than those of the
    loss stage."""
    flow = graph_of(schedule)
    turns = flow.turn[flow.weight_gradients]
    sizes = np.bincount(turns[-1])
    found = {}
    for stage, own in enumerate(turns):
        for step in range(own.max() + 1):
            parts = np.bincount(turns[-1][own == step], minlength=len(sizes)) / sizes
            if np.count_nonzero(parts) > 1 or parts.max() < 1:
                found[stage, step] = float(parts.sum())
    return found
