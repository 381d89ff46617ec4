"""Parameters that exist more than once: in replicas of a stage, in pipelines that train alike, in
tied stages. All copies start equal, get equal gradients, and so stay equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Kind
from schedir.runtime.arguments import TieOf
from schedir.runtime.gradients.accumulated import Accumulated
from schedir.runtime.gradients.barriers import Barrier, Barriers
from schedir.runtime.gradients.clipping import Clipping
from schedir.runtime.gradients.drift import Drift
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.norms import NormsBetweenHosts, NormsOnDevice, NormSource
from schedir.runtime.gradients.partners import partners
from schedir.runtime.gradients.presence import Presence
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.gradients.ties import Tie
from schedir.runtime.plan import Plan
from schedir.runtime.processes.groups import Group, in_turn
from schedir.runtime.session import Claim, Session, agree, digest


class Shared:
    """The parameters of this process's stages that other processes or stages have as well.

    Raises ExecutionError, on all processes, where copies are not equal, or schedules or arguments
    differ.
    """

    def __init__(self, plan: Plan, session: Session) -> None:
        self._plan, self._schedule, self._stages = plan, plan.schedule, plan.trained
        self._grid, self._control, self._groups = session.grid, session.control, session.groups
        self._accelerator, self._device = plan.accelerator, plan.device
        self._presences: list[Presence] = []
        self._own = self._grid.processes[self._grid.pipeline][self._grid.rank]
        # The stages whose sums share a group, and the group's processes.
        self._summed = [
            (stages, processes)
            for stages in partners(self._schedule)
            if len(processes := self._processes(stages[0])) > 1
        ]
        row = self._grid.processes[self._grid.pipeline]
        # Of each tie, in this pipeline.
        self._tied = [
            tuple(sorted({row[rank] for rank in self._holders(tie)})) for tie, _ in plan.tied
        ]
        self._fixed: dict[int, tuple[list[nn.Parameter], list[bool]]] = {}
        for _, held in plan.tied:
            for stage in held:
                self._fix_trained(stage)
        # Of the copies of a tied parameter the first one's gradient counts.
        self._skipped = {
            copy for tie, held in plan.tied for stage, copy in held.items() if stage != tie[0][0]
        }
        sizes = {stage: len(self._counted(stage)) for stage in self._stages}
        doubles = any(
            p.dtype is torch.float64 for m in self._stages.values() for p in m.parameters()
        )
        own = Claim(
            self._schedule.content_hash,
            plan.device.type,
            "" if "NCCL_HOSTID" in os.environ else plan.accelerator.name,
            plan.accelerator.processors,
            plan.compared,
            self._digests(),
            sizes,
            doubles,
            getattr(plan.arguments.stages, "cut", None),  # of schedir.training's Stages
        )
        claims = agree(session.control, own, plan.schedule)
        self.processors = min(claim.processors for claim in claims)
        self._sizes = {stage: size for claim in claims for stage, size in claim.sizes.items()}
        self._norm_type = torch.float64 if any(c.doubles for c in claims) else torch.float32

    def _digests(self) -> dict[str, tuple[int, ...]]:
        """Of each copy here its digest, by what it is called."""
        found: dict[str, tuple[int, ...]] = {}
        for stage, module in self._stages.items():
            if len(self._processes(stage)) > 1:
                parameters = list(module.parameters())
                found[f"stage {stage}"] = tuple(map(digest, parameters))
                found[f"what is frozen of stage {stage}"] = tuple(
                    not p.requires_grad for p in parameters
                )
        for tie, held in self._plan.tied:
            for stage, copy in held.items():
                own = (digest(copy), *copy.shape)
                if found.setdefault(_label(tie), own) != own:
                    raise ExecutionError(
                        f"{_label(tie)} differs in stage {stage}, in shape or values; load the same"
                    )
        return found

    def _holders(self, tie: TieOf) -> set[int]:
        """The ranks that hold a copy of a tied parameter."""
        return {rank for stage, _ in tie for rank in self._schedule.placement[stage]}

    def _processes(self, stage: int) -> tuple[int, ...]:
        return self._grid.holders(self._schedule.placement[stage])

    def _counted(self, stage: int) -> list[nn.Parameter]:
        return [
            p
            for p in self._stages[stage].parameters()
            if p.requires_grad and p not in self._skipped
        ]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The processes of every group for sums that takes in a part of this pipeline."""
        tied = [processes for processes in self._tied if len(processes) > 1]
        return [*(processes for _, processes in self._summed), *tied]

    def reductions(self) -> dict[int, Reduction]:
        """The sums that REDUCE_GRADs are, of the stages that several processes run."""
        found: dict[int, Reduction] = {}
        for number in in_turn([processes for _, processes in self._summed], self._own):
            stages, processes = self._summed[number]
            trained = {
                stage: [p for p in self._stages[stage].parameters() if p.requires_grad]
                for stage in stages
            }
            if not any(trained.values()):
                continue
            purpose = f"stages/{','.join(map(str, stages))}"
            group = self._groups.make(purpose, processes, self._device)
            beside = self._beside(purpose, processes, group)
            for stage, parameters in trained.items():
                if parameters:
                    self._fix_trained(stage)
                    whose, each_call = f"stage {stage}'s", not self._plan.updates
                    presence = self._presence(beside, whose)
                    found[stage] = Reduction(parameters, group, presence, whose, each_call)
        return found

    def accumulated(self) -> Accumulated:
        """The gradients that are summed in every call, as the caller steps."""
        if self._plan.updates:  # sums are over all that an update applies
            return Accumulated([])
        summed = [stage for stages, _ in self._summed for stage in stages if stage in self._stages]
        copies = [copy for _, held in self._plan.tied for copy in held.values()]
        return Accumulated([*copies, *(p for s in summed for p in self._stages[s].parameters())])

    def _beside(self, purpose: str, processes: Sequence[int], group: Group) -> Group:
        """The group in which hosts tell each other what gradients there are: that of the sums on
        the CPU, else one beside it."""
        if self._accelerator.queues:
            return self._groups.make(f"{purpose}/presence", processes)
        return group

    def _presence(self, beside: Group, whose: str) -> Presence:
        """What tells of gradients that are summed over processes."""
        self._presences.append(Presence(beside, whose))
        return self._presences[-1]

    def settle(self) -> None:
        """Wait for what processes have told each other, before they leave."""
        for presence in self._presences:
            presence.settle()

    def reset(self) -> None:
        """A call has failed: nobody answers any more."""
        for presence in self._presences:
            presence.forget()

    def drift(self) -> Drift:
        """The copies here that exist elsewhere, or here, as well: to be compared now and then."""
        copies: dict[str, list[list[nn.Parameter]]] = {}
        holders: dict[str, Sequence[int]] = {}
        for stage, module in self._stages.items():
            processes = self._processes(stage)
            if len(processes) > 1:
                copies[f"stage {stage}"] = [list(module.parameters())]
                holders[f"stage {stage}"] = [*map(self._grid.everyone.index, processes)]
        for tie, held in self._plan.tied:
            if held:
                copies[_label(tie)] = [[copy] for copy in held.values()]
                holders[_label(tie)] = [*map(self._grid.number, self._holders(tie))]
        own = self._grid.number(self._grid.rank)
        return Drift(copies, holders, own, self._control, self._accelerator)

    def _fix_trained(self, stage: int) -> None:
        """From here on the same parameters of the stage must be trained."""
        parameters = list(self._stages[stage].parameters())
        self._fixed[stage] = parameters, [p.requires_grad for p in parameters]

    def check_frozen(self) -> None:
        """Raise ExecutionError where a parameter was frozen or thawed since the executor was made,
        though who takes part in sums, ties or clipping was settled there."""
        for stage, (parameters, flags) in self._fixed.items():
            if [p.requires_grad for p in parameters] != flags:
                names = self._stages[stage].named_parameters()
                name, was = next(
                    (name, was)
                    for (name, p), was in zip(names, flags, strict=True)
                    if p.requires_grad is not was
                )
                raise ExecutionError(
                    f"{name} of stage {stage} was {'frozen' if was else 'thawed'} since the "
                    "executor was made, which settles what is summed over processes, tied or "
                    "clipped; make a new Executor"
                )

    def clipping(self, nonfinite: NonFinite) -> Clipping | None:
        """Clipping by the norm over all stages, where that is asked for."""
        max_norm = self._plan.arguments.clip_grad_norm
        if max_norm is None:
            return None
        for stage in self._stages:
            self._fix_trained(stage)
        trained = {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in self._stages.items()
        }
        how: NormSource
        if self._accelerator.queues:
            how = NormsOnDevice(self._plan, self._groups, self._sizes, self._norm_type)
        else:
            how = NormsBetweenHosts(self._plan, self._control, self._sizes, self._norm_type)
        return Clipping(max_norm, trained, self._skipped, how, nonfinite, self._accelerator)

    def ties(self) -> list[Tie]:
        """The ties that have copies here."""
        placement, local_ranks = self._schedule.placement, self._plan.local_ranks
        summed = {stage for stages, _ in self._summed for stage in stages}
        groups = self._groups_of_ties()
        return [
            Tie(
                held,
                # What replicas have is the sum over them already, where a REDUCE_GRAD is listed.
                [c for s, c in held.items() if s not in summed or placement[s][0] in local_ranks],
                *groups.get(number, (None, None)),
            )
            for number, (_, held) in enumerate(self._plan.tied)
            if held
        ]

    def barriers(self, ties: Sequence[Tie], together: Callable[[], None] | None) -> Barriers:
        """What the ranks here wait for before they step: ties, and what all do `together`."""
        actions, local_ranks = self._schedule.flat, self._plan.local_ranks
        tied = []
        for tie in ties:
            holders = {rank for stage in tie.copies for rank in self._plan.local_holders(stage)}
            barrier = Barrier(len(holders), tie.sum, self._accelerator, [*tie.copies.values()])
            tied.append((set(tie.copies), barrier))
        common = []
        if together is not None:
            steps = [any(a.kind is Kind.OPTIM_STEP for a in actions[rank]) for rank in local_ranks]
            common.append(Barrier(sum(steps), together, self._accelerator))
        return Barriers(tied, common)

    def _groups_of_ties(self) -> dict[int, tuple[Group, Presence]]:
        """By the number of the tie, the group in which its copies are summed, and what tells
        whether there is a gradient; none where all of them are here."""
        found: dict[int, tuple[Group, Presence]] = {}
        for number in in_turn(self._tied, self._own):
            if len(processes := self._tied[number]) > 1:
                purpose = f"tie/{number}/{','.join(map(str, processes))}"
                group = self._groups.make(purpose, processes, self._device)
                beside = self._beside(purpose, processes, group)
                found[number] = group, self._presence(beside, "a tied parameter's")
        return found


def _label(tie: TieOf) -> str:
    return "the parameter tied as " + " and ".join(f"{stage}:{name}" for stage, name in tie)
