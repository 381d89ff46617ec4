"""Scales the gradients of stages that step after other microbatches than the last stage.

Every gradient is accumulated with the share that the last stage gave its microbatch. The shares of
each of the last stage's OPTIM_STEPs add up to one. A stage that groups the microbatches in another
way takes the mean over its own group: before it steps, it divides its sum by the sum of the group's
shares. In 1F1B-RR (PipeDream, SOSP 2019, section 3.2), with two replicas of stage 0:

    stage 1   0 | 1 | 2 | 3     a step for each: all shares are 1
    stage 0   0   1 | 2   3     a step for two: their sum is 2, and the scale is a half

The shares of a whole group of the last stage add up to 1, so n whole groups have the sum n, known
before the call. The sum of a part depends on the samples of the microbatches, which the last
stage's process knows. It tells the others when the call begins, and they wait for the message at
their first scaled step. Counts on a device stay there, and go through a sum over the processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Late, Unread
from schedir.runtime.call import Call
from schedir.runtime.microbatches import LEAST, Count, check_total, rows
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import SHARES_TAG, Control, Exchange
from schedir.runtime.processes.groups import Group, Groups, wait_for_sum

_Step = tuple[int, int]
"""A stage, and the number of one of its OPTIM_STEPs."""


class Scaling:
    """The scale of the gradients of each OPTIM_STEP."""

    def __init__(self, plan: Plan, control: Control, groups: Groups) -> None:
        self._plan, self._control = plan, control
        apart = steps_apart(plan.schedule) if plan.updates else {}
        self._share_sums: dict[_Step, Count] = {s: float(n) for s, (_, n) in apart.items() if n}
        self._counted = {step: group for step, (group, whole) in apart.items() if not whole}
        grid, placement = plan.grid, plan.schedule.placement
        lines = range(grid.pipelines)
        concerned = {rank for stage, _ in self._counted for rank in placement[stage]}
        # The first of a pipeline's processes that have the loss tells what its shares add up to.
        self._tellers = [grid.number(placement[-1][0], line) for line in lines]
        self._told = sorted({grid.number(rank, line) for line in lines for rank in concerned})
        own = grid.number(grid.rank)
        self._tells, self._needs = own in self._tellers, own in self._told
        self._group: Group | None = None
        self._on_device = plan.accelerator.queues and plan.arguments.count is not rows
        if self._counted and self._on_device and (self._tells or self._needs):
            members = sorted({*self._told, *self._tellers})
            processes = tuple(grid.everyone[number] for number in members)
            if len(processes) > 1:
                self._group = groups.for_numbers(processes, plan.device)
        self._exchange: Exchange | None = None
        self._unread = Unread()

    @property
    def active(self) -> bool:
        """Whether there is any such step."""
        return bool(self._share_sums or self._counted)

    def begin(self, shares: Sequence[Count], kind: Call) -> None:
        """A call begins; `shares` are those of the microbatches of this pipeline, on a rank of the
        loss.

        Raises ExecutionError for gradients from before the call, which must not be scaled.
        """
        if not kind.updates:
            return
        self._refuse_earlier()
        if not self._counted or not (self._tells or self._needs):
            return
        own: list[Count] = []
        if self._tells:
            own = [sum(shares[m] for m in group) for group in self._counted.values()]
        if self._on_device:
            self._sum_on_device(own)
            return
        if self._needs:
            sizes = dict.fromkeys(self._tellers, len(self._counted))
            self._exchange = self._control.expect(sizes, SHARES_TAG)
        if self._tells:
            vector = torch.tensor(own, dtype=torch.float64, device="cpu")
            if self._exchange is not None:
                self._exchange.give(vector, self._told)
            else:
                self._control.tell(vector, self._told, SHARES_TAG)

    def _sum_on_device(self, own: Sequence[Count]) -> None:
        """Over the pipelines; who has nothing to tell puts in zeros."""
        device = self._plan.device
        sums = torch.zeros(len(self._counted), dtype=torch.float64, device=device)
        for place, part in enumerate(own):
            sums[place] = part
        if self._group is not None:
            wait_for_sum([self._group.allreduce([sums])], "the weights of steps")
        # Of nothing there is no mean; it is said once the host sees it.
        self._unread.add(
            Late(self._plan.accelerator, sums, lambda copied: self._check(copied.tolist()))
        )
        self._share_sums.update(zip(self._counted, sums.clamp_min(LEAST).unbind(), strict=True))

    def _check(self, weights: Sequence[float]) -> None:
        for weight, group in zip(weights, self._counted.values(), strict=True):
            check_total(weight, group)

    def look(self, wait: bool = False) -> None:
        """Check the weights of earlier calls that have arrived; with `wait`, all of them.

        Raises ExecutionError where a step has no samples.
        """
        self._unread.look(wait)

    def reset(self) -> None:
        """A call has failed: nobody answers any more."""
        self._exchange = None

    def scales(self, stage: int, step: int) -> bool:
        """Whether an OPTIM_STEP has another scale than the loss stage's."""
        return (stage, step) in self._counted or (stage, step) in self._share_sums

    def scale(self, parameters: Sequence[nn.Parameter], stage: int, step: int) -> None:
        """Scale what has been accumulated for an OPTIM_STEP, after all sums over replicas."""
        if self._exchange is not None and (stage, step) in self._counted:
            over_pipelines = torch.stack(self._exchange.result()).sum(0).tolist()
            self._check(over_pipelines)
            self._share_sums.update(zip(self._counted, over_pipelines, strict=True))
            self._exchange = None
        scale = 1.0 / self._share_sums[stage, step]
        for parameter in parameters:
            if parameter.grad is not None:  # out of place: another's may share its memory
                parameter.grad = parameter.grad * scale

    def _refuse_earlier(self) -> None:
        """What earlier calls have accumulated has its scale already."""
        for stage in self._plan.local_stages:
            if self.scales(stage, 0) and any(
                p.grad is not None for p in self._plan.trained[stage].parameters()
            ):
                raise ExecutionError(
                    f"stage {stage} has gradients from before this call, but its first OPTIM_STEP "
                    "scales them too, because it steps after other microbatches than the loss "
                    "stage; clear them (zero_grad), and leave update=False out"
                )


def steps_apart(schedule: Schedule) -> dict[_Step, tuple[list[int], int]]:
    """The OPTIM_STEPs that apply other microbatches than those of the loss stage: these, and how
    many whole groups of the loss stage they are, 0 where they hold a part of one."""
    flow = graph_of(schedule)
    turns = flow.turn[flow.weight_gradients]
    if (turns == turns[-1]).all():
        return {}
    by_stage = [_groups(own) for own in turns.tolist()]
    of_microbatch = {m: group for group in by_stage[-1].values() for m in group}
    found = {}
    for stage, groups in enumerate(by_stage):
        for step, group in sorted(groups.items()):
            within = {min(of_microbatch[m]): of_microbatch[m] for m in group}
            if list(within.values()) != [group]:
                whole = all(part <= group for part in within.values())
                found[stage, step] = sorted(group), len(within) if whole else 0
    return found


def _groups(turns: Sequence[int]) -> dict[int, set[int]]:
    """The microbatches of each step."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for m, turn in enumerate(turns):
        found[turn].add(m)
    return found
