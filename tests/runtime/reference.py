"""Single-process training, written from the textbook: what every executed schedule must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedir.runtime import rng

Loss = Callable[[Any, Any], Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def run_stages(
    stages: Sequence[nn.Module], x: Any, seed: tuple[int, int, int] | None = None
) -> Any:
    """The whole model on one microbatch; `seed` is (seed, step, microbatch)."""
    for index, stage in enumerate(stages):
        if seed is not None:
            rng(seed[0], seed[1], index, seed[2])
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    return x


def accumulate(
    stages: Sequence[nn.Module],
    loss_fn: Loss,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatches: Sequence[tuple[Any, Any]],
    order: Sequence[int] | None = None,
    seed: tuple[int, int] | None = None,
) -> float:
    """One step of gradient accumulation, the loop everybody writes; returns the mean loss."""
    counts = [len(y) for _, y in microbatches]
    total = sum(counts)
    losses: dict[int, float] = {}
    for m in order or range(len(microbatches)):
        x, y = microbatches[m]
        loss = loss_fn(run_stages(stages, x, (*seed, m) if seed else None), y)
        (loss * (counts[m] / total)).backward()
        losses[m] = float(loss.detach())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return sum(counts[m] * losses[m] for m in sorted(losses)) / total


def pipedream(
    stages: Sequence[nn.Module],
    loss_fn: Loss,
    optimizers: Sequence[torch.optim.Optimizer],
    minibatches: Sequence[tuple[Any, Any]],
    vertical_sync: bool = False,
) -> float:
    """PipeDream's recurrence: w_s^{m+1} = OPT(w_s^m, g_s(m)), the gradient at versions v_s(m).

    v_s(m) = max(0, m - (S-1-s)), with vertical sync max(0, m - S + 1) on every stage. The
    gradient is taken on copies of the stages that hold those versions.
    """
    number = len(stages)
    history: list[list[dict[str, Tensor]]] = [[] for _ in stages]
    losses = []
    for m, (x, y) in enumerate(minibatches):
        at_version = []
        for s, stage in enumerate(stages):
            history[s].append(copy.deepcopy(stage.state_dict()))
            version = max(0, m - number + 1) if vertical_sync else max(0, m - (number - 1 - s))
            replica = copy.deepcopy(stage)
            replica.load_state_dict(history[s][version])
            replica.zero_grad(set_to_none=True)
            at_version.append(replica)
        loss = loss_fn(run_stages(at_version, x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        for stage, replica, optimizer in zip(stages, at_version, optimizers, strict=True):
            for own, copied in zip(stage.parameters(), replica.parameters(), strict=True):
                own.grad = copied.grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    counts = [len(y) for _, y in minibatches]
    return sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)


def delayed(
    stages: Sequence[nn.Module],
    loss_fn: Loss,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatches: Sequence[tuple[Any, Any]],
    size: Sequence[int],
    version: Callable[[int, int], int],
) -> float:
    """Stage s updates after every `size[s]` microbatches, the rest at the end; it runs microbatch m
    at its version `version(s, m)`.

    With G the microbatches of an update, w_m the share of m in the update of the last stage that it
    goes into, w_s^{k+1} = OPT(w_s^k, sum of w_m g_s(m) over G / sum of w_m over G). PipeDream-2BW
    with equal sizes, 1F1B-RR with the replicas of each stage. The gradient is taken on copies of
    the stages that hold those versions.
    """
    counts = [len(y) for _, y in microbatches]
    losses = []
    history = [[copy.deepcopy(stage.state_dict())] for stage in stages]
    sums: list[list[Tensor | None]] = [[None] * len(list(stage.parameters())) for stage in stages]
    weights = [0.0 for _ in stages]
    for m, (x, y) in enumerate(microbatches):
        first = m - m % size[-1]
        weight = counts[m] / sum(counts[first : first + size[-1]])
        at_version = []
        for s, stage in enumerate(stages):
            replica = copy.deepcopy(stage)
            replica.load_state_dict(history[s][version(s, m)])
            replica.zero_grad(set_to_none=True)
            at_version.append(replica)
        loss = loss_fn(run_stages(at_version, x), y)
        (loss * weight).backward()
        losses.append(float(loss.detach()))
        for s, (stage, replica) in enumerate(zip(stages, at_version, strict=True)):
            weights[s] += weight
            found = [copied.grad for copied in replica.parameters()]
            sums[s] = [
                old if new is None else new if old is None else old + new
                for old, new in zip(sums[s], found, strict=True)
            ]
            if (m + 1) % size[s] and m + 1 < len(microbatches):
                continue
            same = size[s] == size[-1]  # the weights add up to one but for rounding
            for own, total in zip(stage.parameters(), sums[s], strict=True):
                own.grad = total if same or total is None else total * (1 / weights[s])
            optimizers[s].step()
            optimizers[s].zero_grad(set_to_none=True)
            history[s].append(copy.deepcopy(stage.state_dict()))
            sums[s], weights[s] = [None] * len(sums[s]), 0.0
    return sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)


def pipedream_2bw(
    stages: Sequence[nn.Module],
    loss_fn: Loss,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatches: Sequence[tuple[Any, Any]],
    size: int,
) -> float:
    """2BW's recurrence: batch t of `size` microbatches runs at version max(0, t - 1) everywhere."""
    sizes = [size] * len(stages)
    return delayed(
        stages, loss_fn, optimizers, microbatches, sizes, lambda _, m: max(0, m // size - 1)
    )


def round_robin(
    stages: Sequence[nn.Module],
    loss_fn: Loss,
    optimizers: Sequence[torch.optim.Optimizer],
    microbatches: Sequence[tuple[Any, Any]],
    replicas: Sequence[int],
) -> float:
    """1F1B-RR's recurrence, without a flush: a stage updates once in a round of its replicas, and
    runs a microbatch as many rounds late as a replica has others in flight before it, which are
    ceil(ranks from its stage on / replicas) with it."""

    def version(s: int, m: int) -> int:
        in_flight = -(-sum(replicas[s:]) // replicas[s])
        return max(0, m // replicas[s] - (in_flight - 1))

    return delayed(stages, loss_fn, optimizers, microbatches, replicas, version)
