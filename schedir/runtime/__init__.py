"""Runs schedules under torchrun: each rank runs its own list.

Of schedir's packages only this one and `schedir.training` import torch.
"""

from schedir.runtime.call import StepResult
from schedir.runtime.executor import Executor
from schedir.runtime.stage.stage import rng

__all__ = ["Executor", "StepResult", "rng"]
