"""Cut a model into stages, feed it batches, train it, and keep checkpoints.

You can do all of this without it: the executor takes any modules and any batches.
"""

from schedir.training.callbacks import Callback, Logger, Monitor
from schedir.training.checkpoint.checkpoint import Checkpoint
from schedir.training.checkpoint.saving import Saving
from schedir.training.cutting.cuts import balanced
from schedir.training.cutting.from_torch_pipeline import stages_of_pipe
from schedir.training.cutting.layers import deferred, pop, stash
from schedir.training.cutting.partition import partition
from schedir.training.cutting.stages import Stages
from schedir.training.data import Batches
from schedir.training.evaluation import (
    accuracy,
    causal_lm_loss,
    causal_lm_tokens,
    evaluate,
    perplexity,
)
from schedir.training.history import Evaluation, History, Record
from schedir.training.huggingface.stages import stages_of
from schedir.training.huggingface.writing import save_pretrained
from schedir.training.loggers import CSV, JSONLines, TensorBoard, WandB
from schedir.training.measured_costs import measured_costs
from schedir.training.schedulers import warmup_cosine
from schedir.training.trainer import Trainer
from schedir.training.whole_names import gathered_state

__all__ = [
    "CSV",
    "Batches",
    "Callback",
    "Checkpoint",
    "Evaluation",
    "History",
    "JSONLines",
    "Logger",
    "Monitor",
    "Record",
    "Saving",
    "Stages",
    "TensorBoard",
    "Trainer",
    "WandB",
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
    "save_pretrained",
    "stages_of",
    "stages_of_pipe",
    "stash",
    "warmup_cosine",
]
