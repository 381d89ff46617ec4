"""Runs schedules under torchrun: each rank runs its own list.

Of schedir's packages only this one and `schedir.training` import torch.
"""

from typing import TYPE_CHECKING

from schedir.lazy import on_demand
from schedir.runtime.call import StepResult
from schedir.runtime.executor import Executor
from schedir.runtime.stage.stage import rng

if TYPE_CHECKING:
    from schedir.runtime.torch_schedule import TorchSchedule

__all__ = ["Executor", "StepResult", "TorchSchedule", "rng"]

__getattr__ = on_demand(__name__, {"schedir.runtime.torch_schedule": ("TorchSchedule",)})
