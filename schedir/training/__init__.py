"""What stands around a step: cut a model into stages, feed it, train it, keep it.

All of it can be done without it: the executor takes any modules and any batches.
"""

from schedir.training.batches import Batches
from schedir.training.stages import Stages

__all__ = ["Batches", "Stages"]
