"""The training of a schedule, done in one process without schedir's runtime: a run must equal it.

A `Recurrence` says what a call computes: at which version of its weights each stage runs each
microbatch, and which microbatches each of its updates applies. `recurrence_of` reads that from the
lists of a schedule. Nothing else of the schedule is used.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from schedir import Kind, Schedule
from schedir.runtime import rng

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Optimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]
Gradients: TypeAlias = Iterable[Tensor | None]
Tie: TypeAlias = Sequence[tuple[int, str]]


@attrs.frozen
class Recurrence:
    """What a call computes.

    Stage s runs microbatch m at version `reads(s, m)` of its weights: after so many updates of this
    call. `updates[s]` are its updates. Each has the microbatches that it applies, rank by rank, in
    the order in which the rank adds up their gradients; then the sums of the ranks are added.
    Forwards run in the order of `forwards`, as BatchNorm keeps running statistics.
    """

    reads: Callable[[int, int], int]
    updates: Sequence[Sequence[Sequence[Sequence[int]]]]
    forwards: Sequence[int]


def accumulation(stages: int, order: Sequence[int]) -> Recurrence:
    """All microbatches, in this order, go into one update of every stage."""
    return Recurrence(lambda stage, microbatch: 0, [[[order]]] * stages, order)


def recurrence_of(schedule: Schedule, pipelines: int = 1) -> Recurrence:
    """What the lists of a schedule say, if so many `pipelines` train as one.

    Each pipeline has its own microbatches: the first pipeline has the first ones.
    """
    read: dict[tuple[int, int], int] = {}
    forwards: list[int] = []
    updates = []
    for stage, ranks in enumerate(schedule.placement):
        by_rank = []
        for rank in ranks:
            parts: list[list[int]] = [[]]
            for action in schedule.flat[rank]:
                if action.stage != stage:
                    continue
                if action.kind is Kind.OPTIM_STEP:
                    parts.append([])
                elif action.microbatch is None:
                    continue
                elif action.kind is Kind.FORWARD:
                    newest = len(parts) - 1
                    version = newest if action.version is None else action.version
                    read[stage, action.microbatch] = version
                    if stage == 0:
                        forwards.append(action.microbatch)
                elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    parts[-1].append(action.microbatch)
            by_rank.append(parts[:-1] or parts)  # no update comes after the last one
        updates.append([*zip(*by_rank, strict=True)])
    number = schedule.microbatches
    firsts = [number * pipeline for pipeline in range(pipelines)]
    return Recurrence(
        lambda stage, microbatch: read[stage, microbatch % number],
        [
            [[[first + m for m in part] for first in firsts for part in parts] for parts in own]
            for own in updates
        ],
        [first + m for first in firsts for m in forwards],
    )


def run_stages(
    stages: Sequence[nn.Module],
    x: Any,
    seed: tuple[int, int, int] | None = None,
    weights: Mapping[int, dict[str, Tensor]] | None = None,
) -> Any:
    """The whole model on one microbatch. `seed` is (seed, step, microbatch), for dropout as the
    executor draws it. `weights` take the place of those that the stages of these numbers have."""
    for number, stage in enumerate(stages):
        with rng(seed[0], seed[1], number, seed[2]) if seed else nullcontext():
            x = _called(stage, x, weights.get(number, {}) if weights else {})
    return x


def plain_step(
    stages: Sequence[nn.Module],
    loss_fn: Loss,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatches: Sequence[tuple[Any, Any]],
    recurrence: Recurrence | None = None,
    *,
    seed: tuple[int, int] | None = None,
    weigh: str | None = "samples",
    count: Callable[[Any], float | Tensor] = len,
    ties: Sequence[Tie] = (),
) -> float:
    """One call on these inputs and targets; returns the mean loss over the samples.

    Without a recurrence it is gradient accumulation, the loop that everybody writes. There is an
    optimiser for each stage; without any the gradients are left in `.grad`. `seed` is (seed, step).
    `weigh` is the Executor's; with None the losses are summed.
    """
    recurrence = recurrence or accumulation(len(stages), range(len(microbatches)))
    counts = [float(count(y)) if weigh == "samples" else 1.0 for _, y in microbatches]
    # A microbatch has its share of the samples that the last stage's update of it applies.
    groups = [{*chain(*parts)} for parts in recurrence.updates[-1]]
    shares = {m: counts[m] / sum(counts[n] for n in group) for group in groups for m in group}
    if weigh is None:
        shares = dict.fromkeys(shares, 1.0)
    copies = [[(s, stages[s].get_parameter(name)) for s, name in tie] for tie in ties]
    before = [[_taken(weight) for weight in stage.parameters()] for stage in stages]
    past: list[list[dict[str, Tensor]]] = [[] for _ in stages]  # older weights, by version
    found: dict[tuple[int, int], list[Tensor | None]] = {}  # gradients, by stage and microbatch
    losses: dict[int, float] = {}

    def run(m: int) -> None:
        """Find the gradients of a microbatch, at the versions that it reads."""
        if m in losses:
            return
        for s in range(len(stages)):
            update_until(s, recurrence.reads(s, m))
        versions = [recurrence.reads(s, m) for s in range(len(stages))]
        old = {s: past[s][v] for s, v in enumerate(versions) if v < len(past[s])}
        x, y = microbatches[m]
        loss = loss_fn(run_stages(stages, x, (*seed, m) if seed else None, old), y)
        (loss * shares[m]).backward()
        losses[m] = loss.item()
        for s, stage in enumerate(stages):
            weights = old[s].values() if s in old else stage.parameters()
            found[s, m] = [_taken(weight) for weight in weights]

    def total(s: int, number: int) -> dict[nn.Parameter, Tensor | None]:
        """The gradients of a stage that an update of this number applies."""
        parts = recurrence.updates[s][number]
        for m in chain(*parts):
            run(m)
        rows = [[found[s, m] for m in part] for part in parts]
        if number == 0:
            rows[0].insert(0, before[s])
        sums = _sums([_sums(row) for row in rows if row])
        if weigh is not None and {*chain(*parts)} not in groups:
            scale = 1 / sum(shares[m] for m in chain(*parts))  # the mean over its own microbatches
            sums = [None if each is None else each * scale for each in sums]
        return dict(zip(stages[s].parameters(), sums, strict=True))

    def update_until(s: int, version: int) -> None:
        """Update a stage until its weights are of that version."""
        while (number := len(past[s])) < version:
            gradients = total(s, number)
            for tied in copies:  # of one parameter: each gets the gradients of all
                if any(stage == s for stage, _ in tied):
                    shared = _sum(total(stage, number)[weight] for stage, weight in tied)
                    gradients |= {weight: shared for stage, weight in tied if stage == s}
            # Nothing reads an old version once all microbatches have run.
            past[s].append({} if len(losses) == len(microbatches) else _copied(stages[s]))
            for weight, gradient in gradients.items():
                weight.grad = gradient
            if optimizers:
                optimizers[s].step()
                optimizers[s].zero_grad()

    for m in recurrence.forwards:
        run(m)
    for s, updates in enumerate(recurrence.updates):
        update_until(s, len(updates))
    total_loss = sum(counts[m] * losses[m] for m in sorted(losses))
    return total_loss if weigh is None else total_loss / sum(counts)


class Reference:
    """Trains all stages in this process as `schedule` says; the arguments are the Executor's.

    A model that is not cut may stand for all stages; it is updated as the last one is.
    A batch is a tensor, or a tuple or mapping of tensors. `scheduler` makes the learning-rate
    scheduler of a stage's optimiser, stepped once per step. `replicas` is the number of pipelines
    that train as one: a batch has the first one's batch, then the second one's, and so on. A
    transport may add more than two sums of gradients in another order.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        loss_fn: Loss,
        optimizer: Optimizer,
        seed: int = 0,
        *,
        count: Callable[[Any], float | Tensor] = len,
        ties: Sequence[Tie] = (),
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        replicas: int = 1,
    ) -> None:
        self.stages = stages
        self.loss_fn = loss_fn
        self.optimizers = [optimizer(stage.parameters()) for stage in stages]
        self.schedulers = [scheduler(each) for each in self.optimizers] if scheduler else []
        self.seed = seed
        self.count = count
        self.ties = ties
        self.replicas = replicas
        self.microbatches = schedule.microbatches
        self.recurrence = recurrence_of(schedule, replicas)
        if len(stages) < schedule.stages:
            last, cut = schedule.stages - 1, self.recurrence
            self.recurrence = Recurrence(
                lambda _, m: cut.reads(last, m), cut.updates[last:], cut.forwards
            )
        self.steps = 0

    def step(self, inputs: Any, target: Any) -> float:
        """Train on one batch. Returns its mean loss."""
        loss = plain_step(
            self.stages,
            self.loss_fn,
            self.optimizers,
            [*zip(self._microbatches(inputs), self._microbatches(target), strict=True)],
            self.recurrence,
            seed=(self.seed, self.steps),
            count=self.count,
            ties=self.ties,
        )
        for scheduler in self.schedulers:
            scheduler.step()
        self.steps += 1
        return loss

    def _microbatches(self, batch: Any) -> list[Any]:
        """Those of all pipelines, one after the other, on the device of the stages."""
        device = next(self.stages[0].parameters()).device
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        each = _cut(batch, self.replicas)
        return [m for pipeline in each for m in _cut(pipeline, self.microbatches)]


def _copied(stage: nn.Module) -> dict[str, Tensor]:
    return {
        name: weight.detach().clone().requires_grad_(weight.requires_grad)
        for name, weight in stage.named_parameters()
    }


def _taken(weight: Tensor) -> Tensor | None:
    """Take the gradient of a weight away."""
    gradient, weight.grad = weight.grad, None
    return gradient


def _sums(rows: Sequence[Gradients]) -> list[Tensor | None]:
    """Column by column."""
    return [_sum(column) for column in zip(*rows, strict=True)]


def _sum(gradients: Gradients) -> Tensor | None:
    """The sum of the values that are not None, from the first to the last."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _called(stage: nn.Module, x: Any, weights: dict[str, Tensor]) -> Any:
    """Run the stage on x: a tuple by position, a mapping by keyword, if the stage takes them so."""
    args: tuple[Any, ...] = x if isinstance(x, tuple) else (x,)
    kwargs: dict[str, Any] = {}
    if isinstance(x, Mapping):
        args, kwargs = (), dict(x)
    try:
        inspect.signature(stage.forward).bind(*args, **kwargs)
    except TypeError:
        args, kwargs = (x,), {}
    return functional_call(stage, weights, args, kwargs) if weights else stage(*args, **kwargs)


def _cut(batch: Any, microbatches: int) -> Sequence[Any]:
    """The microbatches of a batch: its tensors are split along their first dimension."""
    if isinstance(batch, Mapping):
        columns = zip(*(_cut(batch[key], microbatches) for key in batch), strict=True)
        return [dict(zip(batch, column, strict=True)) for column in columns]
    if isinstance(batch, tuple):
        return list(zip(*(_cut(part, microbatches) for part in batch), strict=True))
    parts: Sequence[Any] = batch.tensor_split(microbatches)
    return parts
