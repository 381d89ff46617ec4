"""What stands around a step: cut a model into stages, feed it, train it, keep it.

All of it can be done without it: the executor takes any modules and any batches.
"""

from schedir.training.batches import Batches
from schedir.training.callbacks import Callback
from schedir.training.checkpoint import Checkpoint
from schedir.training.cuts import balanced
from schedir.training.deferred import deferred
from schedir.training.evaluation import accuracy, evaluate, perplexity
from schedir.training.gathering import gathered_state
from schedir.training.history import Epoch, Evaluation, History
from schedir.training.losses import causal_lm_loss, causal_lm_tokens
from schedir.training.measuring import measured_costs
from schedir.training.partitioning import partition
from schedir.training.piped import stages_of_pipe
from schedir.training.pretrained import stages_of
from schedir.training.rates import warmup_cosine
from schedir.training.skips import pop, stash
from schedir.training.stages import Stages
from schedir.training.trainer import Trainer

__all__ = [
    "Batches",
    "Callback",
    "Checkpoint",
    "Epoch",
    "Evaluation",
    "History",
    "Stages",
    "Trainer",
    "accuracy",
    "balanced",
    "causal_lm_loss",
    "causal_lm_tokens",
    "deferred",
    "evaluate",
    "gathered_state",
    "measured_costs",
    "partition",
    "perplexity",
    "pop",
    "stages_of",
    "stages_of_pipe",
    "stash",
    "warmup_cosine",
]
