"""What stands around a step: cut a model into stages, feed it, train it, keep it.

All of it can be done without it: the executor takes any modules and any batches.
"""

from schedir.training.callbacks import Callback
from schedir.training.checkpoints.checkpoint import Checkpoint
from schedir.training.checkpoints.gathering import gathered_state
from schedir.training.cutting.cuts import balanced
from schedir.training.cutting.deferred import deferred
from schedir.training.cutting.measuring import measured_costs
from schedir.training.cutting.partitioning import partition
from schedir.training.cutting.piped import stages_of_pipe
from schedir.training.cutting.skips import pop, stash
from schedir.training.cutting.stages import Stages
from schedir.training.data import Batches
from schedir.training.evaluation import accuracy, evaluate, perplexity
from schedir.training.history import Epoch, Evaluation, History
from schedir.training.losses import causal_lm_loss, causal_lm_tokens
from schedir.training.pretrained import stages_of
from schedir.training.rates import warmup_cosine
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
