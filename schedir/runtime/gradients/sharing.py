"""Parameters that exist more than once: in replicas of a stage, in pipelines that train alike, in
tied stages. All copies start equal, get equal gradients, and so stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Kind, Schedule, dumps, loads
from schedir.runtime.fitting import TieOf
from schedir.runtime.gradients.drift import Drift
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.gradients.stepping import Clipping, Meeting, Meetings, Norms, Tie
from schedir.runtime.processes.claims import Claim, compare, compare_schedules, digest
from schedir.runtime.processes.control import NORM_TAG
from schedir.runtime.world import World


class Shared:
    """What this process shares with others of the parameters of its `stages`.

    `ties` come with the copies that are here, by stage; `arguments` are the executor's that all
    processes must be given alike.

    Raises ExecutionError, on all processes, where copies are not equal, or schedules or arguments
    differ.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        ties: Sequence[tuple[TieOf, Mapping[int, nn.Parameter]]],
        arguments: Mapping[str, object],
        world: World,
    ) -> None:
        self._schedule, self._stages = schedule, stages
        self._grid, self._control, self._groups = world.grid, world.control, world.groups
        self._device = world.device
        self._ties = ties
        self._settled: dict[int, tuple[list[nn.Parameter], list[bool]]] = {}
        for _, held in ties:
            for stage in held:
                self._settle(stage)
        # Of the copies of a tied parameter the first one's gradient counts.
        self._skipped = {
            copy for tie, held in self._ties for stage, copy in held.items() if stage != tie[0][0]
        }
        copies: dict[str, tuple[int, ...]] = {}
        for stage, module in stages.items():
            if len(self._processes(stage)) > 1:
                parameters = list(module.parameters())
                copies[f"stage {stage}"] = tuple(map(digest, parameters))
                copies[f"what is frozen of stage {stage}"] = tuple(
                    not p.requires_grad for p in parameters
                )
        for tie, held in self._ties:
            for stage, copy in held.items():
                is_ = (digest(copy), *copy.shape)
                if copies.setdefault(_label(tie), is_) != is_:
                    raise ExecutionError(
                        f"{_label(tie)} differs in stage {stage}, in shape or values; load the same"
                    )
        sizes = {stage: len(self._counted(stage)) for stage in stages}
        doubles = any(p.dtype is torch.float64 for m in stages.values() for p in m.parameters())
        mine = Claim(schedule.content_hash, world.device.type, arguments, copies, sizes, doubles)
        claims = world.control.gather(mine)
        if any(claim.schedule != mine.schedule for claim in claims):
            compare_schedules([loads(text) for text in world.control.gather(dumps(schedule))])
        compare(claims)
        self._sizes = {stage: size for claim in claims for stage, size in claim.sizes.items()}
        self._norms = torch.float64 if any(claim.doubles for claim in claims) else torch.float32

    def _processes(self, stage: int) -> tuple[int, ...]:
        return self._grid.holders(self._schedule.placement[stage])

    def _counted(self, stage: int) -> list[nn.Parameter]:
        return [
            p
            for p in self._stages[stage].parameters()
            if p.requires_grad and p not in self._skipped
        ]

    def reductions(self, keeps_earlier: bool) -> dict[int, Reduction]:
        """The sums that REDUCE_GRADs are, of the stages that several processes run."""
        found = ((stage, self._reduction(stage, keeps_earlier)) for stage in self._stages)
        return {stage: reduction for stage, reduction in found if reduction is not None}

    def _reduction(self, stage: int, keeps_earlier: bool) -> Reduction | None:
        processes = self._processes(stage)
        parameters = [p for p in self._stages[stage].parameters() if p.requires_grad]
        if len(processes) == 1 or not parameters:
            return None
        # A group for each stage: two stages' replicas may reach their sums in another order.
        self._settle(stage)
        group = self._groups.make(f"stage/{stage}", processes, self._device)
        return Reduction(parameters, group, f"stage {stage}'s", keeps_earlier)

    def drift(self) -> Drift:
        """The copies here that exist elsewhere, or here, as well: to be compared now and then."""
        copies: dict[str, list[list[nn.Parameter]]] = {}
        holders: dict[str, Sequence[int]] = {}
        for stage, module in self._stages.items():
            processes = self._processes(stage)
            if len(processes) > 1:
                copies[f"stage {stage}"] = [list(module.parameters())]
                holders[f"stage {stage}"] = [*map(self._grid.everyone.index, processes)]
        for tie, held in self._ties:
            if held:
                ranks = {rank for stage, _ in tie for rank in self._schedule.placement[stage]}
                copies[_label(tie)] = [[copy] for copy in held.values()]
                holders[_label(tie)] = [*map(self._grid.number, ranks)]
        return Drift(copies, holders, self._grid.number(self._grid.rank), self._control)

    def _settle(self, stage: int) -> None:
        """Which parameters of the stage train is settled from here on."""
        parameters = list(self._stages[stage].parameters())
        self._settled[stage] = parameters, [p.requires_grad for p in parameters]

    def check_frozen(self) -> None:
        """Raise ExecutionError where a parameter was frozen or thawed since the executor was made,
        though who takes part in sums, ties or clipping was settled there."""
        for stage, (parameters, flags) in self._settled.items():
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

    def clipping(self, max_norm: float) -> Clipping:
        """Clipping by the norm over all stages."""
        for stage in self._stages:
            self._settle(stage)
        trained = {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in self._stages.items()
        }
        speaks = self._grid.number(self._grid.rank) == self._grid.number(
            self._schedule.placement[0][0], pipeline=0
        )
        return Clipping(max_norm, trained, self._skipped, self._norms, self._gather, speaks)

    def _gather(self, own: Norms) -> Norms:
        speaks: dict[int, list[int]] = {}  # by number, the stages that a process speaks for
        for stage, held in enumerate(self._schedule.placement):
            speaks.setdefault(self._grid.number(held[0]), []).append(stage)
        sizes = {n: sum(self._sizes[s] for s in stages) for n, stages in speaks.items()}
        # Who has no gradients says nothing: an empty message is none.
        exchange = self._control.expect({n: size for n, size in sizes.items() if size}, NORM_TAG)
        this = self._grid.number(self._grid.rank)
        said = [norm for stage in speaks.get(this, ()) for norm in own[stage]]
        if said:
            # A rank without stages has no step to hear them at.
            holders = sorted({rank for held in self._schedule.placement for rank in held})
            exchange.give(torch.tensor(said, dtype=torch.float64), map(self._grid.number, holders))
        heard = iter(exchange.result())
        found: Norms = {}
        for number, stages in speaks.items():
            norms = iter(next(heard).tolist() if sizes[number] else ())
            found.update({s: list(islice(norms, self._sizes[s])) for s in stages})
        return found

    def meetings(self, here: Sequence[int], clipping: Clipping | None) -> Meetings:
        """The meetings of the ranks here."""
        placement, actions = self._schedule.placement, self._schedule.actions
        tied = []
        for number, (tie, held) in enumerate(self._ties):
            ranks = {placement[stage][0] for stage, _ in tie}
            row = self._grid.processes[self._grid.pipeline]
            group = None
            processes = sorted({row[rank] for rank in ranks})
            if len(processes) > 1 and held:
                purpose = f"tie/{number}/{processes}"
                group = self._groups.make(purpose, processes, self._device)
            if held:
                act = Tie(list(held.values()), group).sum
                meeting = Meeting(len(ranks.intersection(here)), act)
                tied.append(({stage for stage, _ in tie}, meeting))
        clips = []
        if clipping is not None:
            steps = [any(a.kind is Kind.OPTIM_STEP for a in actions[rank]) for rank in here]
            clips.append(Meeting(sum(steps), clipping.clip))
        return Meetings(tied, clips)


def _label(tie: TieOf) -> str:
    return "the parameter tied as " + " and ".join(f"{stage}:{name}" for stage, name in tie)
