"""Parameters that exist more than once: in replicas of a stage, in pipelines that train alike, in
tied stages. All copies start equal, get equal gradients, and so stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Kind, Schedule
from schedir.runtime.control import NORM_TAG, Control
from schedir.runtime.fitting import Claim, TieOf, compare, digest
from schedir.runtime.grid import Grid, Groups
from schedir.runtime.reduction import Reduction
from schedir.runtime.stepping import Clipping, Meeting, Meetings, Norms, Tie


class Shared:
    """What this process shares with others of the parameters of its `stages`.

    `ties` come with the copies that are here, by stage.

    Raises ExecutionError, on all processes, where copies are not equal or schedules differ.
    """

    def __init__(
        self,
        schedule: Schedule,
        grid: Grid,
        stages: Mapping[int, nn.Module],
        ties: Sequence[tuple[TieOf, Mapping[int, nn.Parameter]]],
        device: torch.device,
        control: Control | None,
        groups: Groups,
    ) -> None:
        self._schedule, self._grid, self._stages = schedule, grid, stages
        self._device = device
        self._groups = groups
        self._ties = ties
        # Of the copies of a tied parameter the first one's gradient counts.
        self._skipped = {
            copy for tie, held in self._ties for stage, copy in held.items() if stage != tie[0][0]
        }
        copies = {
            f"stage {stage}": tuple(map(digest, module.parameters()))
            for stage, module in stages.items()
            if len(self._processes(stage)) > 1
        }
        for tie, held in self._ties:
            for stage, copy in held.items():
                label = "the parameter tied as " + " and ".join(f"{s}:{name}" for s, name in tie)
                is_ = (digest(copy), *copy.shape)
                if copies.setdefault(label, is_) != is_:
                    raise ExecutionError(
                        f"{label} differs in stage {stage}, in shape or values; load the same"
                    )
        sizes = {stage: len(self._counted(stage)) for stage in stages}
        doubles = any(p.dtype is torch.float64 for m in stages.values() for p in m.parameters())
        mine = Claim(schedule.content_hash, schedule.name, device.type, copies, sizes, doubles)
        claims = [mine] if control is None else control.gather(mine)
        compare(claims)
        self._sizes = {stage: size for claim in claims for stage, size in claim.sizes.items()}
        self._norms = torch.float64 if any(claim.doubles for claim in claims) else torch.float32
        self._control = control

    def _processes(self, stage: int) -> tuple[int, ...]:
        return self._grid.holders(self._schedule.placement[stage])

    def _counted(self, stage: int) -> list[nn.Parameter]:
        return [
            p
            for p in self._stages[stage].parameters()
            if p.requires_grad and p not in self._skipped
        ]

    def reduction(self, stage: int, keeps_earlier: bool) -> Reduction | None:
        """The sums that the stage's REDUCE_GRADs are, if several processes run it."""
        processes = self._processes(stage)
        parameters = [p for p in self._stages[stage].parameters() if p.requires_grad]
        if self._control is None or len(processes) == 1 or not parameters:
            return None
        # A group for each stage: two stages' replicas may reach their sums in another order.
        group = self._groups.make(f"stage/{stage}", processes, self._device)
        return Reduction(parameters, group, keeps_earlier)

    def clipping(self, max_norm: float) -> Clipping:
        """Clipping by the norm over all stages."""
        trained = {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in self._stages.items()
        }
        return Clipping(max_norm, trained, self._skipped, self._norms, self._gather)

    def _gather(self, own: Norms) -> Norms:
        if self._control is None:
            return own
        speaks: dict[int, list[int]] = {}  # by number, the stages that a process speaks for
        for stage, held in enumerate(self._schedule.placement):
            speaks.setdefault(self._grid.number(held[0]), []).append(stage)
        sizes = {n: sum(self._sizes[s] for s in stages) for n, stages in speaks.items()}
        # Who has no gradients says nothing: an empty message is none.
        exchange = self._control.expect({n: size for n, size in sizes.items() if size}, NORM_TAG)
        this = self._grid.number(self._grid.rank)
        said = [norm for stage in speaks.get(this, ()) for norm in own[stage]]
        if said:
            everyone = map(self._grid.number, range(self._schedule.ranks))
            exchange.give(torch.tensor(said, dtype=torch.float64), everyone)
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
            if self._control is not None and len(ranks) > 1 and held:
                processes = sorted(row[rank] for rank in ranks)
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
