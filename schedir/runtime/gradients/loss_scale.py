"""The scale of the loss under float16: a GradScaler whose decision all stages share.

    backward of the last stage   starts from scale x share of the microbatch
    before OPTIM_STEP            every gradient is divided by the scale, after all sums
    end of the call              the scale grows, or shrinks if a gradient was not finite

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2. All processes begin with
the same scale and share each decision, so their scales stay equal without a message.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler

from schedir.runtime.accelerator import Accelerator


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
