"""The training that a schedule stands for, done in one process: what a pipelined run must equal.

Of the schedule's list only this is used: which microbatches each update applies, and in which
order; and, where weights change in between, which version of them each forward reads.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from schedir import Kind, Schedule
from schedir.runtime import rng

Weights: TypeAlias = dict[str, Tensor]


def updates(schedule: Schedule) -> list[list[int]]:
    """The microbatches that each update applies, in the order of the last stage's backwards."""
    last = schedule.stages - 1
    groups: dict[int, list[int]] = {}
    for rank in schedule.placement[last]:
        order: list[int] = []
        complete: set[int] = set()
        done = 0
        for action in schedule.flat[rank]:
            if action.stage != last:
                continue
            if action.kind is Kind.OPTIM_STEP:
                groups.setdefault(done, []).extend(m for m in order if m in complete)
                order = [m for m in order if m not in complete]
                complete.clear()
                done += 1
            elif action.microbatch is not None:
                if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                    order.append(action.microbatch)
                if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    complete.add(action.microbatch)
    return [groups[i] for i in range(len(groups))]


def versions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The weight version at which each (stage, microbatch) runs.

    It is the one that its forward names, else the number of updates of that stage listed before.
    """
    read: dict[tuple[int, int], int] = {}
    for actions in schedule.flat:
        done: Counter[int] = Counter()
        for action in actions:
            if action.kind is Kind.OPTIM_STEP:
                done[action.stage] += 1
            elif action.kind is Kind.FORWARD and action.microbatch is not None:
                newest = done[action.stage]
                version = newest if action.version is None else action.version
                read[action.stage, action.microbatch] = version
    return read


class Reference:
    """Trains all stages in this process as `schedule` says; the arguments are the Executor's.

    A batch is a tensor, or a tuple or mapping of them; a stage gets a tuple's entries by position.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        seed: int = 0,
        *,
        count: Callable[[Any], float | Tensor] = len,
        ties: Sequence[Sequence[tuple[int, str]]] = (),
    ) -> None:
        self.stages = stages
        self.loss_fn = loss_fn
        self.optimizers = [optimizer(stage.parameters()) for stage in stages]
        self.seed = seed
        self.count = count
        self.ties = [[stages[i].get_parameter(name) for i, name in tie] for tie in ties]
        self.microbatches = schedule.microbatches
        self.updates = updates(schedule)
        self.versions = versions(schedule)
        self.steps = 0

    def step(self, inputs: Any, target: Any) -> float:
        """Train on one batch. Returns its mean loss."""
        xs = _cut(inputs, self.microbatches)
        ys = _cut(target, self.microbatches)
        counts = [float(self.count(y)) for y in ys]
        # past[stage][v]: the stage's weights at version v; versions restart with every step.
        past: list[list[Weights]] = [[] for _ in self.stages]
        losses: dict[int, float] = {}
        for microbatches in self.updates:
            samples = sum(counts[m] for m in microbatches)
            if len(self.updates) > 1:
                for stage, weights in zip(self.stages, past, strict=True):
                    weights.append(_copy(stage))
            for m in microbatches:
                share = counts[m] / samples
                if len(self.updates) > 1:
                    loss = self._backward_at_versions(m, xs[m], ys[m], share, past)
                else:
                    loss = self._loss(self.stages, m, xs[m], ys[m])
                    (loss * share).backward()
                losses[m] = loss.item()
            self._update()
        self.steps += 1
        return sum(counts[m] * losses[m] for m in sorted(losses)) / sum(counts)

    def _update(self) -> None:
        for tied in self.ties:  # copies of one parameter: each gets the gradients of all
            gradients = [weight.grad for weight in tied if weight.grad is not None]
            for weight in tied:
                weight.grad = torch.stack(gradients).sum(0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _loss(self, stages: Sequence[Callable[..., Any]], m: int, x: Any, target: Any) -> Tensor:
        for number, stage in enumerate(stages):
            with rng(self.seed, self.steps, number, m):  # as the executor does, for dropout
                x = stage(*x) if isinstance(x, tuple) else stage(x)
        return self.loss_fn(x, target)

    def _backward_at_versions(
        self, m: int, x: Any, target: Any, share: float, past: list[list[Weights]]
    ) -> Tensor:
        """Add to the newest weights' gradients that of the loss at the versions that `m` reads."""
        read = [past[number][self.versions[number, m]] for number in range(len(self.stages))]
        stages = [partial(_called, *both) for both in zip(self.stages, read, strict=True)]
        loss = self._loss(stages, m, x, target)
        leaves = [weight for weights in read for weight in weights.values()]
        newest = [weight for stage in self.stages for weight in stage.parameters()]
        gradients = torch.autograd.grad(loss * share, leaves, allow_unused=True)
        for weight, gradient in zip(newest, gradients, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return loss


def _called(stage: nn.Module, weights: Weights, *x: Any) -> Any:
    return functional_call(stage, weights, x)


def _cut(batch: Any, microbatches: int) -> Sequence[Any]:
    """The microbatches of a batch: its tensors are split along their first dimension."""
    if isinstance(batch, Mapping):
        columns = zip(*(_cut(batch[key], microbatches) for key in batch), strict=True)
        return [dict(zip(batch, column, strict=True)) for column in columns]
    if isinstance(batch, tuple):
        return list(zip(*(_cut(part, microbatches) for part in batch), strict=True))
    parts: Sequence[Any] = batch.tensor_split(microbatches)
    return parts


def _copy(stage: nn.Module) -> Weights:
    return {name: w.detach().clone().requires_grad_() for name, w in stage.named_parameters()}
