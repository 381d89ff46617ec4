"""The loss of a causal language model, as transformers computes it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

_IGNORED = -100


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """How well logits, (rows, tokens, vocabulary), foretell the token after each.

    `labels`, (rows, tokens), are the very tokens, -100 where none is to be foretold (padding); they
    are shifted here. The mean over those counted, in nats, as a model of transformers gives; with
    `count=causal_lm_tokens` of the executor also over a batch whose microbatches have different
    numbers of them. 0 where there are none.
    """
    following = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED).flatten()
    total = functional.cross_entropy(
        logits.float().flatten(0, 1), following, ignore_index=_IGNORED, reduction="sum"
    )
    return total / causal_lm_tokens(labels).clamp_min(1)


def causal_lm_tokens(labels: Tensor) -> Tensor:
    """How many tokens of (rows, tokens) `causal_lm_loss` is the mean over: `count=` of the
    executor."""
    return (labels[:, 1:] != _IGNORED).sum()
