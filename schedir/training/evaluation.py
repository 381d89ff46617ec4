"""Evaluate a model on a whole data set, the same on every rank; losses and metrics for that."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from schedir.errors import ExecutionError
from schedir.runtime import Executor, StepResult
from schedir.training.history import Evaluation

Number: TypeAlias = float | Tensor
"""One number; a tensor of one where it may be on a device."""

_IGNORED = -100  # as torch's cross-entropy does

Metric: TypeAlias = Callable[[Any, Any], tuple[Number, Number]]
"""(output, target) of a microbatch → a sum over it, and what that is to be divided by."""


def evaluate(
    executor: Executor,
    batches: Iterable[tuple[Any, Any]],
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """Find the present weights' loss and metrics over all of `batches`, on every rank.

    Every rank calls it, with as many batches of (inputs, target). The last one may be short: the
    loss is weighed by the executor's `count`. A metric sees what the last stage returns for each
    microbatch, on its rank and its device, with the target, and gives (sum, count); sums and counts
    are added up over all microbatches, replicas and pipelines, and the one divided by the other.
    Metrics cost one message for the whole set.

    Raises ExecutionError where there is no batch, or a metric gives no pair of numbers.
    """
    known = measures(metrics)
    loss = MeanLoss()
    sums: dict[str, tuple[Number, Number]] = dict.fromkeys(known, (0.0, 0.0))

    def measured(output: Any, target: Any) -> dict[str, tuple[Number, Number]]:
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
    """Check metrics, by name. Raises ExecutionError for what is none."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ExecutionError(f"metrics must be a dict of functions, not {type(metrics).__name__}")
    for name, metric in (metrics or {}).items():
        if not callable(metric) or not _takes_two(metric):
            raise ExecutionError(
                f"metric {name!r} must be a function (output, target) -> (sum, count), not "
                f"{getattr(metric, '__name__', type(metric).__name__)}"
            )
    return metrics or {}


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has none
        pass
    return True


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A metric: the share of targets whose class has the largest output.

    `output` has shape [..., classes], `target` holds classes and has the shape [...]; negative
    ones, as the -100 that torch's cross-entropy ignores, do not count. Raises ExecutionError for
    other shapes.
    """
    if output.shape[:-1] != target.shape:
        raise ExecutionError(
            f"accuracy needs outputs [..., classes] and targets [...], not {list(output.shape)} "
            f"and {list(target.shape)}"
        )
    counted = target >= 0
    return ((output.argmax(-1) == target) & counted).sum(), counted.sum()


def perplexity(loss: float) -> float:
    """e to a mean cross-entropy in nats; infinite where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of logits, (rows, tokens, vocabulary), that foretell the token after each.

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
    """The number of tokens that `causal_lm_loss` is the mean over: `count=` of the
    executor."""
    return (labels[:, 1:] != _IGNORED).sum()


class MeanLoss:
    """Sums up the mean loss of many calls, each weighed by its samples.

    A call's loss is read when the next one is added: no rank waits for that of a call that it has
    just made, and none piles up. With `skips`, one that is not finite does not count. `totals`, of
    another one, are what it goes on from.
    """

    def __init__(self, skips: bool = False, totals: Sequence[float] = (0.0, 0.0)) -> None:
        self._skips = skips
        self._sum, self._samples = totals
        self._unread: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Count a call."""
        self._read()
        self._unread = result

    @property
    def mean(self) -> float:
        """The mean over all calls so far; NaN where they have no samples."""
        total, samples = self.totals
        return total / samples if samples else math.nan

    @property
    def totals(self) -> tuple[float, float]:
        """The losses of all samples so far, added up, and how many these are."""
        self._read()
        return self._sum, self._samples

    def _read(self) -> None:
        call, self._unread = self._unread, None
        if call is None or not call.samples or (self._skips and not math.isfinite(call.loss)):
            return
        self._sum += call.loss * call.samples
        self._samples += call.samples


def pairs(batches: Iterable[Any], what: str, after: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield pairs (inputs, target). Raises ExecutionError for another batch, or for none, unless
    some were given out before, `after` so many."""
    number = 0
    for number, batch in enumerate(batches, 1):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ExecutionError(
                f"{what}: batch {number} is no pair (inputs, target) but {type(batch).__name__}; "
                "Batches(loader, split=…) makes pairs of it"
            )
        yield batch[0], batch[1]
    if not number and not after:
        raise ExecutionError(
            f"{what}: there is no batch; a data set smaller than a batch gives none with "
            "drop_last=True, and a generator gives its batches once: make a list, or a DataLoader"
        )


def _pair(name: str, found: Any) -> tuple[Number, Number]:
    """Check a metric's sum and count, without waiting for those on a device."""
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(_is_number, found)):
        shown = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
        raise ExecutionError(
            f"metric {name!r} must return (sum, count), two numbers or tensors of one, not {shown}"
        )
    # In double precision: counts of a large data set are exact.
    total, count = (
        x.detach().reshape(()).to(torch.float64) if isinstance(x, Tensor) else x for x in found
    )
    return total, count


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
