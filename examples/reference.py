"""The training of a schedule, done in one process: a pipelined run must equal it.

It uses only this of the schedule's list: the microbatches that each update applies, and their
order; and, if weights change in between, the version that each forward reads.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

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

    It is the version that the forward names, otherwise the number of the stage's updates before it.
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


def forwards(schedule: Schedule) -> list[int]:
    """The microbatches in the order of the first stage's forwards."""
    return [
        action.microbatch
        for rank in schedule.placement[0]
        for action in schedule.flat[rank]
        if action.kind is Kind.FORWARD and action.stage == 0 and action.microbatch is not None
    ]


def holders(schedule: Schedule) -> dict[int, list[int]]:
    """The rank that runs each microbatch, for the stages that several ranks hold."""
    ran: dict[int, dict[int, int]] = {}
    for rank, actions in enumerate(schedule.flat):
        for action in actions:
            if action.kind is Kind.FORWARD and len(schedule.placement[action.stage]) > 1:
                ran.setdefault(action.stage, {})[action.microbatch or 0] = rank
    return {stage: [of[m] for m in sorted(of)] for stage, of in ran.items()}


class Reference:
    """Trains all stages in this process as `schedule` says; the arguments are the Executor's.

    A batch is a tensor, or a tuple or mapping of tensors. `scheduler` makes the learning-rate
    scheduler of a stage's optimiser, stepped once per step. `replicas` is the number of pipelines
    that train as one: a batch has the first one's batch, then the second one's, and so on. If
    several ranks hold a stage, each adds up the gradients of its own microbatches; a transport may
    add more than two such sums in another order.
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
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        replicas: int = 1,
    ) -> None:
        self.stages = stages
        self.loss_fn = loss_fn
        self.optimizers = [optimizer(stage.parameters()) for stage in stages]
        self.schedulers = [scheduler(each) for each in self.optimizers] if scheduler else []
        self.seed = seed
        self.count = count
        self.ties = [[stages[i].get_parameter(name) for i, name in tie] for tie in ties]
        self.replicas = replicas
        self.microbatches = schedule.microbatches
        self.forwards = forwards(schedule)
        self.updates = updates(schedule)
        self.versions = versions(schedule)
        self.holders = holders(schedule)
        self.held: dict[tuple[int, int], dict[nn.Parameter, Tensor | None]] = {}
        self.steps = 0

    def step(self, inputs: Any, target: Any) -> float:
        """Train on one batch. Returns its mean loss."""
        xs, ys = self._microbatches(self._placed(inputs)), self._microbatches(self._placed(target))
        counts = [float(self.count(y)) for y in ys]
        # past[stage][v]: the stage's weights at version v; versions restart with every step.
        past: list[list[Weights]] = [[] for _ in self.stages]
        losses: dict[int, float] = {}
        for microbatches in self.updates:
            each = [[m + i * self.microbatches for m in microbatches] for i in range(self.replicas)]
            samples = sum(counts[m] for pipeline in each for m in pipeline)
            if len(self.updates) > 1:
                for stage, weights in zip(self.stages, past, strict=True):
                    weights.append(_copy(stage))
            sums: list[list[Tensor | None]] = []  # of each pipeline's gradients
            for pipeline in each:
                shares = {m: counts[m] / samples for m in pipeline}
                if len(self.updates) > 1:
                    losses |= self._accumulate_at_versions(shares, xs, ys, past)
                else:
                    losses |= self._accumulate(shares, xs, ys)
                self._join()
                sums.append([weight.grad for weight in self._weights()])
                self._clear()
            for weight, gradients in zip(self._weights(), zip(*sums, strict=True), strict=True):
                weight.grad = _sum(gradients)
            self._update()
        for scheduler in self.schedulers:
            scheduler.step()
        self.steps += 1
        return sum(counts[m] * losses[m] for m in sorted(losses)) / sum(counts)

    def _placed(self, batch: Any) -> Any:
        """The device of the stages."""
        device = self._weights()[0].device
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    def _microbatches(self, batch: Any) -> list[Any]:
        """Those of all pipelines, one after the other."""
        each = _cut(batch, self.replicas)
        return [m for pipeline in each for m in _cut(pipeline, self.microbatches)]

    def _weights(self) -> list[nn.Parameter]:
        return [weight for stage in self.stages for weight in stage.parameters()]

    def _clear(self) -> None:
        for weight in self._weights():
            weight.grad = None

    def _update(self) -> None:
        for tied in self.ties:  # copies of one parameter: each gets the gradients of all
            gradient = _sum([weight.grad for weight in tied])
            for weight in tied:
                weight.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
        self._clear()

    def _accumulate(self, shares: Mapping[int, float], xs: Any, ys: Any) -> dict[int, float]:
        """Add up the gradients of these microbatches, in this order. Returns their losses.

        The forwards keep the order of the list, for BatchNorm's running statistics.
        """
        stages = [partial(_called, stage) for stage in self.stages]
        first = min(shares) // self.microbatches * self.microbatches
        waiting = [m + first for m in self.forwards if m + first in shares]
        losses: dict[int, Tensor] = {}
        for m, share in shares.items():
            while m not in losses:
                n = waiting.pop(0)
                losses[n] = self._loss(stages, n, xs[n], ys[n])
            (losses[m] * share).backward()
            self._set_apart(m)
        return {m: loss.item() for m, loss in losses.items()}

    def _loss(self, stages: Sequence[Callable[..., Any]], m: int, x: Any, target: Any) -> Tensor:
        for number, stage in enumerate(stages):
            with rng(self.seed, self.steps, number, m):  # as the executor does, for dropout
                x = stage(x)
        return self.loss_fn(x, target)

    def _accumulate_at_versions(
        self, shares: Mapping[int, float], xs: Any, ys: Any, past: list[list[Weights]]
    ) -> dict[int, float]:
        """As `_accumulate`, but with the gradients at the versions that each microbatch reads."""
        losses = {}
        for m, share in shares.items():
            number = m % self.microbatches
            read = [of[self.versions[i, number]] for i, of in enumerate(past)]
            stages = [
                partial(_called, stage, weights=weights)
                for stage, weights in zip(self.stages, read, strict=True)
            ]
            loss = self._loss(stages, m, xs[m], ys[m])
            leaves = [weight for weights in read for weight in weights.values()]
            gradients = torch.autograd.grad(loss * share, leaves, allow_unused=True)
            for weight, gradient in zip(self._weights(), gradients, strict=True):
                weight.grad = _sum([weight.grad, gradient])
            self._set_apart(m)
            losses[m] = loss.item()
        return losses

    def _set_apart(self, m: int) -> None:
        """Move the gradients of stages that several ranks hold to what m's rank has added up."""
        for stage, ranks in self.holders.items():
            held = self.held.setdefault((stage, ranks[m % self.microbatches]), {})
            for weight in self.stages[stage].parameters():
                held[weight] = _sum([held.get(weight), weight.grad])
                weight.grad = None

    def _join(self) -> None:
        """Add up what these ranks have, the lowest first."""
        for _, held in sorted(self.held.items(), key=lambda item: item[0]):
            for weight, gradient in held.items():
                weight.grad = _sum([weight.grad, gradient])
        self.held.clear()


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of the values that are not None, from the first to the last."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _called(stage: nn.Module, x: Any, weights: Weights | None = None) -> Any:
    """Run the stage on x: a tuple by position, a mapping by keyword, if the stage takes them so."""
    args: tuple[Any, ...] = x if isinstance(x, tuple) else (x,)
    kwargs: dict[str, Any] = {}
    if isinstance(x, Mapping):
        args, kwargs = (), dict(x)
    try:
        inspect.signature(stage.forward).bind(*args, **kwargs)
    except TypeError:
        args, kwargs = (x,), {}
    return functional_call(stage, weights or {}, args, kwargs)


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
