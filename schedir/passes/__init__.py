"""Passes: Schedule → Schedule. A valid schedule stays valid."""

from schedir.passes.activations import offload, recompute
from schedir.passes.batches import batch_communication, split_batches
from schedir.passes.communication import insert_communication, strip_communication
from schedir.passes.receives import advance_receives
from schedir.passes.sharding import shard
from schedir.passes.steps import append_steps, forward_only, insert_reductions

__all__ = [
    "advance_receives",
    "append_steps",
    "batch_communication",
    "forward_only",
    "insert_communication",
    "insert_reductions",
    "offload",
    "recompute",
    "shard",
    "split_batches",
    "strip_communication",
]
