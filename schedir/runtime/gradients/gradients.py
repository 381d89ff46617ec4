"""All that happens to the gradients of this process's stages between backward and update.

    begin          set aside what earlier calls have summed, for a caller who steps
    before steps   sums over processes, ties, scaling, clipping, checks (`program.compiler`)
    end            finish sums; sum ties, for a caller who steps; compare copies
    restore        add what was set aside

Who takes part in sums, ties and clipping is settled when the executor is made: processes compare
what they hold, and make groups for it.

Every gradient is accumulated with the share that the last stage gave its microbatch. The shares of
each of the last stage's OPTIM_STEPs add up to one. A stage that groups the microbatches in another
way takes the mean over its own group: before it steps, it divides its sum by the sum of the group's
shares. In 1F1B-RR (PipeDream, SOSP 2019, section 3.2), with two replicas of stage 0:

    stage 1   0 | 1 | 2 | 3     a step for each: all shares are 1
    stage 0   0   1 | 2   3     a step for two: their sum is 2, and the scale is a half

Of n whole groups of the last stage the sum is n. Of a part of a group it is that part, as the
microbatches of such a group must hold equally many samples (`feeding`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Kind, Schedule
from schedir.runtime.accelerator import Reach
from schedir.runtime.arguments import TieOf
from schedir.runtime.gradients.clipping import Clipping
from schedir.runtime.gradients.copies import DriftCheck, copies_of_stages, copies_of_ties
from schedir.runtime.gradients.nonfinite import NonFinite, Step
from schedir.runtime.gradients.reduction import (
    Accumulated,
    Barrier,
    Reduction,
    Tie,
    reduction_groups,
)
from schedir.runtime.plan import Plan
from schedir.runtime.processes.groups import Group, Groups, in_turn
from schedir.runtime.session import Claim, Session, agree


def compared(plan: Plan, session: Session) -> Sequence[Claim]:
    """Compare what processes hold; returns their claims by number.

    Raises ExecutionError on all of them if copies, schedules or arguments differ.
    """
    shared, copies = [*copies_of_stages(plan)], dict[str, object]()
    for each in shared:
        copies[each.label] = each.digest()
        (here,) = each.here.values()
        copies[f"what is frozen of {each.label}"] = tuple(not p.requires_grad for p in here)
    ties = [*copies_of_ties(plan)]
    cut = getattr(plan.arguments.stages, "cut", None)  # of schedir.training's Stages
    skipped = _skipped(plan)
    own = Claim(
        {
            "torch": {
                "torch.__version__": torch.__version__.partition("+")[0],  # less its local part
                "torch.get_default_dtype()": torch.get_default_dtype(),
            },
            "argument": plan.compared,
            "schedule": {"": plan.schedule.content_hash},
            "device": {"": plan.device.type},
            "cut": {} if cut is None else {"": cut},
            "dtype": {each.label: each.dtypes for each in (*shared, *ties)},
            "copies": copies | {each.label: each.digest() for each in ties},
        },
        "" if "NCCL_HOSTID" in os.environ else plan.accelerator.name,
        plan.accelerator.processors,
        {
            stage: sum(p not in skipped for p in _trained(module))
            for stage, module in plan.trained.items()
        },
        any(p.dtype is torch.float64 for m in plan.trained.values() for p in m.parameters()),
        plan.described,
    )
    with session.gathering():
        return agree(session.control, own, plan.schedule)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _stages(tie: TieOf) -> frozenset[int]:
    return frozenset(stage for stage, _ in tie)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def _skipped(plan: Plan) -> set[nn.Parameter]:
    """The copies of tied parameters whose norms don't count: all but the first."""
    return {copy for tie, held in plan.tied for stage, copy in held.items() if stage != tie[0][0]}


class Gradients:
    """The gradients of the stages here; `claims` are those of all processes.

    `begin`, `end` and `restore` are what a call that trains does then, in order; `checks` come
    before it. It `updates` if OPTIM_STEPs run here; else the caller steps. `share_sums` are
    those of the OPTIM_STEPs that scale what they apply.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        claims: Sequence[Claim],
        optimizers: Mapping[int, torch.optim.Optimizer],
        reach: Reach,
    ) -> None:
        self._plan, self._groups = plan, groups
        self.updates = plan.updates
        self._row = plan.grid.processes[plan.grid.pipeline]
        self._summed = reduction_groups(plan.schedule, plan.sharded)
        made = self._made()
        self.reductions = {
            stage: Reduction(own, *made[stages], f"stage {stage}'s", not plan.updates)
            for stages in self._summed
            if stages in made
            for stage in stages
            if (own := _trained(plan.trained[stage]))
        }
        ties = self._ties(made)
        elsewhere = (tie.elsewhere for tie in ties)
        self._sums = [*self.reductions.values(), *filter(None, elsewhere)]
        weighs = plan.arguments.weigh is not None  # else every share is 1, in every group
        self.share_sums = share_sums(plan.schedule) if plan.updates and weighs else {}
        self.nonfinite = NonFinite(plan, groups, optimizers, reach)
        self.clipping = self._clipping(claims)
        self._barriers = self._made_barriers(ties)
        self._drift = DriftCheck(plan, groups, [*copies_of_stages(plan), *copies_of_ties(plan)])
        self.accumulated = Accumulated(self._accumulated())
        fixed = {*self.reductions, *(stage for _, held in plan.tied for stage in held)}
        self._fixed = [
            (stage, name, parameter, parameter.requires_grad)
            for stage, module in plan.trained.items()
            if stage in fixed or self.clipping is not None
            for name, parameter in module.named_parameters()
        ]
        self.checks = [self._check_frozen] if self._fixed else []
        self.begin = [self.accumulated.set_aside] if self.accumulated.active else []
        self.end: list[Callable[[], None]] = [
            *(reduction.finish for reduction in self.reductions.values()),
            *(tie.sum for tie in ties if not plan.updates),
            *([self._drift.step] if self._drift.active else []),
            *([self.nonfinite.end] if self.nonfinite.ends else []),
        ]
        self.restore = [self.accumulated.restore] if self.accumulated.active else []

    def _made(self) -> dict[object, tuple[Group, Group]]:
        """The groups here for the sums of stages and of ties, by the stages; with each the one in
        which hosts tell each other what gradients there are: on the CPU the same."""
        plan, own = self._plan, self._row[self._plan.grid.rank]
        placement = plan.schedule.placement
        wanted: list[tuple[str, Collection[int], tuple[int, ...]]] = [
            (f"stages/{_listed(stages)}", stages, plan.grid.holders(placement[stages[0]]))
            for stages in self._summed
        ]
        # Ties of the same stages are summed one after the other, before the same steps.
        for tied in dict.fromkeys(_stages(tie) for tie, _ in plan.tied):
            holders = tuple(sorted({self._row[rank] for s in tied for rank in placement[s]}))
            wanted.append((f"ties/{_listed(tied)}/{_listed(holders)}", tied, holders))
        found: dict[object, tuple[Group, Group]] = {}
        for number in in_turn([holders for *_, holders in wanted], own):
            purpose, stages, holders = wanted[number]
            is_tie = isinstance(stages, frozenset)
            if len(holders) > 1 and (is_tie or any(_trained(plan.trained[s]) for s in stages)):
                group = hosts = self._groups.make(purpose, holders, plan.device)
                if plan.accelerator.queues:
                    hosts = self._groups.make(f"{purpose}/presence", holders)
                found[stages] = group, hosts
        return found

    def _ties(self, made: Mapping[object, tuple[Group, Group]]) -> list[Tie]:
        """The ties that have copies here."""
        plan, found = self._plan, []
        # What replicas have is the sum over them already, where a REDUCE_GRAD is listed.
        summed = {stage for stages in self._summed for stage in stages}
        for tie, held in plan.tied:
            if held:
                counted = [
                    copy
                    for stage, copy in held.items()
                    if stage not in summed or plan.schedule.placement[stage][0] in plan.local_ranks
                ]
                elsewhere = None
                if (groups := made.get(_stages(tie))) is not None:
                    first = next(iter(held.values()))
                    elsewhere = Reduction([first], *groups, "a tied parameter's")
                found.append(Tie(held, counted, elsewhere))
        return found

    def _accumulated(self) -> list[nn.Parameter]:
        """The parameters whose gradients are summed in every call, because the caller steps."""
        plan = self._plan
        if plan.updates:  # sums are over all that an update applies
            return []
        return [
            *(copy for _, held in plan.tied for copy in held.values()),
            *(p for stage in self.reductions for p in plan.trained[stage].parameters()),
        ]

    def _clipping(self, claims: Sequence[Claim]) -> Clipping | None:
        """Clipping by the norm over all stages, if the user asked for it."""
        plan = self._plan
        if plan.arguments.clip_grad_norm is None:
            return None
        own = (claims[plan.grid.everyone.index(process)] for process in self._row)
        sizes = {stage: size for claim in own for stage, size in claim.sizes.items()}
        dtype = torch.float64 if any(claim.doubles for claim in claims) else torch.float32
        return Clipping(plan, self._groups, sizes, dtype, _skipped(plan), self.nonfinite)

    def _made_barriers(self, ties: Sequence[Tie]) -> list[tuple[Collection[int], Barrier]]:
        """The barriers before the steps of the ranks here: ties, and what all ranks do together;
        each with the stages whose OPTIM_STEPs come after it."""
        plan, accelerator = self._plan, self._plan.accelerator
        found: list[tuple[Collection[int], Barrier]] = []
        for tie in ties:
            holders = {rank for stage in tie.copies for rank in plan.local_holders(stage)}
            copies = [*tie.copies.values()]
            found.append((tie.copies, Barrier(len(holders), tie.sum, accelerator, copies)))
        together = self.nonfinite.agreement if self.clipping is None else self.clipping.clip
        if together is not None:
            steps = sum(
                any(a.kind is Kind.OPTIM_STEP for a in plan.schedule.flat[rank])
                for rank in plan.local_ranks
            )
            every = range(plan.schedule.stages)
            found.append((every, Barrier(steps, together, accelerator)))
        return found

    def barriers(self, stages: Collection[int]) -> list[Barrier]:
        """The barriers before consecutive OPTIM_STEPs of these stages, on one rank."""
        return [barrier for own, barrier in self._barriers if not set(own).isdisjoint(stages)]

    def scale(self, parameters: Sequence[nn.Parameter], step: Step) -> None:
        """Scale what has been accumulated for an OPTIM_STEP, after all sums over replicas."""
        for parameter in parameters:
            if parameter.grad is not None:  # out of place: another's may share its memory
                parameter.grad = parameter.grad * (1.0 / self.share_sums[step])

    def check_unscaled(self) -> None:
        """Raise ExecutionError for gradients from before a call that updates, which would be scaled
        once more."""
        for stage, module in sorted(self._plan.trained.items()):
            if (stage, 0) in self.share_sums and any(
                p.grad is not None for p in module.parameters()
            ):
                raise ExecutionError(
                    f"stage {stage} has gradients from before this call, but its first OPTIM_STEP "
                    "scales them too, because it steps after other microbatches than the loss "
                    "stage; clear them (zero_grad), and leave update=False out"
                )

    def _check_frozen(self) -> None:
        """Raise ExecutionError where a parameter was frozen or thawed since the executor was made,
        though who takes part in sums, ties or clipping was settled there."""
        for stage, name, parameter, was in self._fixed:
            if parameter.requires_grad is not was:
                raise ExecutionError(
                    f"{name} of stage {stage} was {'frozen' if was else 'thawed'} since the "
                    "executor was made, which settles what is summed over processes, tied or "
                    "clipped; make a new Executor"
                )

    def settle(self) -> None:
        """Wait for what processes have told each other, before they leave."""
        for reduction in self._sums:
            reduction.hear_hosts()
        self._drift.compare()

    def reset(self) -> None:
        """A call has failed: nobody answers any more."""
        for _, barrier in self._barriers:
            barrier.reset()
        self._drift.reset()
        for reduction in self._sums:
            reduction.reset()


def share_sums(schedule: Schedule) -> dict[Step, float]:
    """The sums of the shares of the OPTIM_STEPs that apply other microbatches than those of the
    loss stage."""
    flow = graph_of(schedule)
    turns = flow.turn[flow.weight_gradients]
    sizes = np.bincount(turns[-1])
    found = {}
    for stage, own in enumerate(turns):
        for step in range(own.max() + 1):
            parts = np.bincount(turns[-1][own == step], minlength=len(sizes)) / sizes
            if np.count_nonzero(parts) > 1 or parts.max() < 1:
                found[stage, step] = float(parts.sum())
    return found
