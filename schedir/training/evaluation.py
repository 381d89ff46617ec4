"""Evaluate a model on a whole data set, with the same result on every rank; losses and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.history import Evaluation, MeanLoss
from schedir.training.schedulers import takes

_IGNORED = -100  # as torch's cross-entropy does

Metric: TypeAlias = Callable[[Any, Any], tuple[float | Tensor, float | Tensor]]
"""(output, target) of a microbatch → (sum, count): the metric is all sums over all counts."""


def evaluate(
    executor: Executor,
    batches: Iterable[tuple[Any, Any]],
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """Compute the loss and metrics of the current weights over all of `batches`, on every rank.

    >>> import torch
    >>> import schedir
    >>> from schedir.runtime import Executor
    >>> from schedir.training import accuracy, evaluate
    >>> schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    >>> executor = Executor(schedule, {0: torch.nn.Identity()}, torch.nn.CrossEntropyLoss())
    >>> batches = [(torch.eye(4), torch.tensor([0, 1, 2, 0]))]
    >>> evaluate(executor, batches, {"accuracy": accuracy}).metrics
    {'accuracy': 0.75}

    Every rank calls it, with the same number of batches (inputs, target). The last batch may be
    short: the loss is weighted by the executor's `count`. With `weigh=None` it is the sum of the
    batches' losses. A metric is a function of (output,
    target), called for each microbatch on the rank and the device of the last stage. It returns
    (sum, count), each a number or a tensor of one. Sums and counts are added up over all
    microbatches, replicas and pipelines, and the metric is sum / count. All metrics together cost
    one message for the whole set.

    Raises ExecutionError if there is no batch, or if a metric returns no pair of numbers.
    """
    known = measures(metrics)
    loss = MeanLoss(adds=executor.weigh is None)
    sums: dict[str, tuple[float | Tensor, float | Tensor]] = dict.fromkeys(known, (0.0, 0.0))

    def measured(output: Any, target: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: _pair(name, metric(output, target)) for name, metric in known.items()}

    for inputs, target in pairs(batches, "evaluation"):
        result = executor.evaluate(inputs, target=target, outputs=measured if known else False)
        loss.add(result)
        for found in filter(None, result.outputs or ()):
            for name, (total, count) in sums.items():
                sums[name] = total + found[name][0], count + found[name][1]
    ratios = {}
    if known:
        here = {name: (float(total), float(count)) for name, (total, count) in sums.items()}
        everywhere = executor.gather(here)
        for name in known:
            total, count = map(sum, zip(*(found[name] for found in everywhere), strict=True))
            ratios[name] = total / count if count else math.nan
    return Evaluation(loss.mean, ratios)


def measures(metrics: object) -> Mapping[str, Metric]:
    """Check metrics, by name. Raises ExecutionError for a value that is no metric."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ExecutionError(f"metrics must be a dict of functions, not {type(metrics).__name__}")
    for name, metric in (metrics or {}).items():
        if not (callable(metric) and takes(metric, None, None)):
            raise ExecutionError(
                f"metric {name!r} must be a function (output, target) -> (sum, count), not "
                f"{getattr(metric, '__name__', type(metric).__name__)}"
            )
    return metrics or {}


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A metric: the share of targets whose class has the largest output.

    >>> import torch
    >>> from schedir.training import accuracy
    >>> right, counted = accuracy(torch.eye(3), torch.tensor([0, 2, -100]))
    >>> int(right), int(counted)
    (1, 2)

    `output` has the shape [..., classes]. `target` holds classes and has the shape [...]; negative
    ones do not count, such as the -100 that torch's cross-entropy ignores. Raises ExecutionError
    for other shapes.
    """
    if output.shape[:-1] != target.shape:
        raise ExecutionError(
            f"accuracy needs outputs [..., classes] and targets [...], not {list(output.shape)} "
            f"and {list(target.shape)}"
        )
    counted = target >= 0
    return ((output.argmax(-1) == target) & counted).sum(), counted.sum()


def perplexity(loss: float) -> float:
    """The exponential of a mean cross-entropy in nats; infinity if a float can't hold it.

    >>> from schedir.training import perplexity
    >>> perplexity(0.0), round(perplexity(2.0), 2)
    (1.0, 7.39)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy, in nats, of logits that predict the next token.

    >>> import torch
    >>> from schedir.training import causal_lm_loss
    >>> labels = torch.tensor([[1, 2, -100]])
    >>> round(causal_lm_loss(torch.zeros(1, 3, 4), labels).item(), 4)  # the log of 4
    1.3863

    `logits` have the shape (rows, tokens, vocabulary). `labels` have the shape (rows, tokens): the
    input tokens themselves, not shifted, and -100 for tokens that do not count, such as padding.
    The result is the loss that a model of transformers computes; 0 if no token counts. Pass
    `count=causal_lm_tokens` to the executor, so that it is right over a batch whose microbatches
    count different numbers of tokens.
    """
    following = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED).flatten()
    total = functional.cross_entropy(
        logits.float().flatten(0, 1), following, ignore_index=_IGNORED, reduction="sum"
    )
    return total / causal_lm_tokens(labels).clamp_min(1)


def causal_lm_tokens(labels: Tensor) -> Tensor:
    """The number of tokens that `causal_lm_loss` is the mean over: the executor's `count=`.

    >>> import torch
    >>> from schedir.training import causal_lm_tokens
    >>> int(causal_lm_tokens(torch.tensor([[1, 2, -100]])))
    1
    """
    return (labels[:, 1:] != _IGNORED).sum()


def pairs(batches: Iterable[Any], what: str, after: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield pairs (inputs, target). Raises ExecutionError for another batch, or if there is none
    and none was handed out before (`after` is 0)."""
    number = 0
    for number, batch in enumerate(batches, 1):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ExecutionError(
                f"{what}: batch {number} is no pair (inputs, target) but {type(batch).__name__}; "
                "make pairs with Batches(loader, split=…)"
            )
        yield batch[0], batch[1]
    if not number and not after:
        raise ExecutionError(
            f"{what}: there is no batch. With drop_last=True a data set smaller than a batch has "
            "none; a generator yields its batches only once: make a list of it, or a DataLoader"
        )


def _pair(name: str, found: Any) -> tuple[Tensor, Tensor]:
    """Check a metric's sum and count, without waiting for those on a device."""
    try:
        total, count = found
        # In double precision: counts of a large data set are exact.
        total, count = (
            torch.as_tensor(x, dtype=torch.float64).detach().reshape(()) for x in (total, count)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ExecutionError(
            f"metric {name!r} must return (sum, count), two numbers or tensors of one, not "
            f"{type(found).__name__}: {error}"
        ) from error
    return total, count
