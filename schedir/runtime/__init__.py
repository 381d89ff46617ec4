"""Runs schedules under torchrun, each rank its own list. Only this part imports torch."""

from schedir.runtime.executor import Executor
from schedir.runtime.result import StepResult
from schedir.runtime.stage.rng import rng

__all__ = ["Executor", "StepResult", "rng"]
