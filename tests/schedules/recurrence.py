"""What any schedule trains to, from its lists alone: the recurrence that their order stands for.

A stage's weights after k updates are OPT(those after k - 1, the gradients that its k-th OPTIM_STEP
applies); the gradient of a microbatch is taken at the version that each stage's FORWARD reads. A
stage accumulates in the order of its own backwards, replicas apart, whose sums are then added.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce

import attrs
import torch
from torch import Tensor, nn

from schedir import Action, Kind, Schedule
from tests.runtime.reference import Loss, run_stages

COMPLETES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@attrs.define
class Listed:
    """What the lists say of one stage: by microbatch the version that it reads; by OPTIM_STEP, and
    by rank within it, the microbatches in the order of their gradients."""

    reads: dict[int, int] = attrs.field(factory=dict)
    groups: list[list[list[int]]] = attrs.field(factory=list)


def listed(schedule: Schedule) -> list[Listed]:
    """What the lists say of each stage."""
    found = [Listed() for _ in range(schedule.stages)]
    for stage, own in enumerate(found):
        for rank in schedule.placement[stage]:
            steps = 0
            gradients: list[int] = []
            for action in schedule.flat[rank]:
                if action.stage != stage:
                    continue
                if action.kind is Kind.OPTIM_STEP:
                    if steps == len(own.groups):
                        own.groups.append([])
                    own.groups[steps].append(gradients)
                    steps, gradients = steps + 1, []
                elif action.kind is Kind.FORWARD:
                    own.reads[microbatch(action)] = (
                        steps if action.version is None else action.version
                    )
                elif action.kind in COMPLETES:
                    gradients.append(microbatch(action))
    return found


def _added(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


class Recurrence:
    """One call on the microbatches (x, y), from the stages' weights on; `stages` become the result.

    `weights[m]` is the share of microbatch m in the step of the loss stage that applies it.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        loss_fn: Loss,
        pieces: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.lists = listed(schedule)
        self.stages, self.optimizers = stages, optimizers
        self.loss_fn, self.pieces = loss_fn, pieces
        self.history = [[copy.deepcopy(stage.state_dict())] for stage in stages]
        self.gradients: dict[int, list[list[Tensor]]] = {}
        self.losses: dict[int, float] = {}
        self.weights = {
            m: len(pieces[m][1]) / sum(len(pieces[n][1]) for part in group for n in part)
            for group in self.lists[-1].groups
            for part in group
            for m in part
        }

    def run(self) -> float:
        """Apply every update; returns the mean loss."""
        for stage, own in enumerate(self.lists):
            self._reach(stage, len(own.groups))
        counts = [len(y) for _, y in self.pieces]
        return sum(n * self.losses[m] for m, n in enumerate(counts)) / sum(counts)

    def _reach(self, stage: int, version: int) -> None:
        """Update the stage until its weights are of that version."""
        while (made := len(self.history[stage]) - 1) < version:
            group = self.lists[stage].groups[made]
            own = ([self._gradients(m)[stage] for m in part] for part in group if part)
            parts = [reduce(_added, gradients) for gradients in own]
            share = sum(self.weights[m] for part in group for m in part)
            for p, *grads in zip(self.stages[stage].parameters(), *parts, strict=True):
                p.grad = sum(grads[1:], grads[0])
                if self._own_group(stage, made):
                    p.grad = p.grad * (1 / share)
            self.optimizers[stage].step()
            self.optimizers[stage].zero_grad(set_to_none=True)
            self.history[stage].append(copy.deepcopy(self.stages[stage].state_dict()))

    def _own_group(self, stage: int, step: int) -> bool:
        """Whether a step applies other microbatches than that of the loss stage."""
        mine, theirs = (
            [sorted(m for part in group for m in part) for group in self.lists[s].groups]
            for s in (stage, -1)
        )
        return mine[step : step + 1] != theirs[step : step + 1]

    def _gradients(self, m: int) -> list[list[Tensor]]:
        """Of each stage's parameters, at the versions that it reads."""
        if m not in self.gradients:
            at_version = []
            for stage, module in enumerate(self.stages):
                version = self.lists[stage].reads[m]
                self._reach(stage, version)
                replica = copy.deepcopy(module)
                replica.load_state_dict(self.history[stage][version])
                replica.zero_grad(set_to_none=True)
                at_version.append(replica)
            x, y = self.pieces[m]
            loss = self.loss_fn(run_stages(at_version, x), y)
            (loss * self.weights[m]).backward()
            self.losses[m] = float(loss.detach())
            self.gradients[m] = [
                [p.grad for p in each.parameters() if p.grad is not None] for each in at_version
            ]
        return self.gradients[m]


def train(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: Loss,
    pieces: Sequence[tuple[Tensor, Tensor]],
) -> float:
    """One call; the mean loss."""
    return Recurrence(schedule, stages, optimizers, loss_fn, pieces).run()
