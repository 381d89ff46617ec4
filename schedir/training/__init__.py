"""What stands around a step: cut a model into stages, feed it, train it, keep it.

All of it can be done without it: the executor takes any modules and any batches.
"""

from schedir.training.batches import Batches
from schedir.training.cuts import balanced
from schedir.training.deferred import deferred
from schedir.training.partitioning import partition
from schedir.training.skips import pop, stash
from schedir.training.stages import Stages

__all__ = ["Batches", "Stages", "balanced", "deferred", "partition", "pop", "stash"]
