"""Checks that copies of parameters stay equal: in replicas, in parallel pipelines, in ties.

All copies start equal and get equal gradients. Only an action from outside makes them differ: a
checkpoint that is loaded into one of them, or another learning rate. So after some of its steps
each process sends the others a fingerprint of its copies. It reads theirs after the next step, when
they have long arrived; on a GPU, before it sends its next one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.ir import Kind
from schedir.runtime.accelerator import Accelerator, Late
from schedir.runtime.arguments import TieOf
from schedir.runtime.gradients.clipping import Clipping, Norms
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import (
    Accumulated,
    Barrier,
    Barriers,
    GradientMask,
    Reduction,
    Tie,
    reduction_groups,
)
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import DRIFT_TAG, Control
from schedir.runtime.processes.groups import Group
from schedir.runtime.processes.nccl import in_turn
from schedir.runtime.session import Claim, Session, agree, digest
from schedir.runtime.sharded import local

_INTERVAL = 16  # steps, from the first on


class Shared:
    """The parameters of this process's stages that other processes or stages share.

    Raises ExecutionError on all processes if copies, schedules or arguments differ.
    """

    def __init__(self, plan: Plan, session: Session) -> None:
        self._plan, self._grid, self._stages = plan, plan.grid, plan.trained
        self._control, self._groups = session.control, session.groups
        self._masks: list[GradientMask] = []
        row = self._grid.processes[self._grid.pipeline]
        self._own = row[self._grid.rank]
        # The stages whose sums share a group, and the group's processes.
        self._summed = [
            (stages, processes)
            for stages in reduction_groups(plan.schedule, plan.sharded)
            if len(processes := self._processes(stages[0])) > 1
        ]
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
        every = [p for module in self._stages.values() for p in module.parameters()]
        own = Claim(
            plan.schedule.content_hash,
            plan.device.type,
            "" if "NCCL_HOSTID" in os.environ else plan.accelerator.name,
            plan.accelerator.processors,
            plan.compared,
            self._digests(),
            self._dtypes(),
            {
                stage: sum(p not in self._skipped for p in self._trained(stage))
                for stage in self._stages
            },
            any(p.dtype is torch.float64 for p in every),
            getattr(plan.arguments.stages, "cut", None),  # of schedir.training's Stages
            plan.described,
        )
        with session.gathering():
            self._claims = agree(session.control, own, plan.schedule)
        self.processors = min(claim.processors for claim in self._claims)
        self.described = frozenset[int]().union(*(claim.described for claim in self._claims))

    def _digests(self) -> dict[str, tuple[int, ...]]:
        """The digests of the copies here, by their names."""
        found: dict[str, tuple[int, ...]] = {}
        for stage, module in self._stages.items():
            if self._is_copied(stage):
                parameters, label = list(module.parameters()), self._label(f"stage {stage}")
                found[label] = tuple(map(digest, parameters))
                found[f"what is frozen of {label}"] = tuple(not p.requires_grad for p in parameters)
        for tie, held in self._plan.tied:
            for stage, copy in held.items():
                own = (digest(copy), *copy.shape)
                if found.setdefault(self._label_of(tie), own) != own:
                    raise ExecutionError(
                        f"{_label(tie)} differs in stage {stage}, in shape or values; load the same"
                    )
        return found

    def _dtypes(self) -> dict[str, str]:
        """The dtypes of the copies here, by their names."""
        found = {self._label_of(tie): [*held.values()] for tie, held in self._plan.tied if held}
        for stage, module in self._stages.items():
            if self._is_copied(stage):
                found[self._label(f"stage {stage}")] = [*module.parameters()]
        return {
            label: " and ".join(sorted({str(copy.dtype) for copy in copies}))
            for label, copies in found.items()
        }

    def _label(self, copies: str) -> str:
        """What is equal within a slice of the mesh; other slices may have other parts of it."""
        return f"{copies} ({self._grid.where})" if self._grid.where else copies

    def _label_of(self, tie: TieOf) -> str:
        """A tied parameter; of a sharded one each pipeline has another part."""
        line = f" in pipeline {self._grid.pipeline}" * (tie[0][0] in self._plan.sharded)
        return self._label(_label(tie) + line)

    def _holders(self, tie: TieOf) -> set[int]:
        """The ranks that hold a copy of a tied parameter."""
        return {rank for stage, _ in tie for rank in self._plan.schedule.placement[stage]}

    def _processes(self, stage: int) -> tuple[int, ...]:
        return self._grid.holders(self._plan.schedule.placement[stage])

    def _is_copied(self, stage: int) -> bool:
        """Whether several processes have all weights of a stage."""
        return len(self._processes(stage)) > 1 and stage not in self._plan.sharded

    def _trained(self, stage: int) -> list[nn.Parameter]:
        return [p for p in self._stages[stage].parameters() if p.requires_grad]

    def _connect(self, purpose: str, processes: Sequence[int]) -> tuple[Group, Group]:
        """A group for sums, and the one in which hosts tell each other what gradients there are:
        on the CPU the same."""
        group = self._groups.make(purpose, processes, self._plan.device)
        if not self._plan.accelerator.queues:
            return group, group
        return group, self._groups.make(f"{purpose}/presence", processes)

    def _mask(self, group: Group, whose: str) -> GradientMask:
        self._masks.append(GradientMask(group, whose))
        return self._masks[-1]

    def reductions(self) -> dict[int, Reduction]:
        """The sums that REDUCE_GRADs are, of the stages that several processes run."""
        found: dict[int, Reduction] = {}
        for number in in_turn([processes for _, processes in self._summed], self._own):
            stages, processes = self._summed[number]
            trained = {stage: own for stage in stages if (own := self._trained(stage))}
            if trained:
                purpose = f"stages/{','.join(map(str, stages))}"
                group, beside = self._connect(purpose, processes)
            for stage, parameters in trained.items():
                self._fix_trained(stage)
                whose, each_call = f"stage {stage}'s", not self._plan.updates
                mask = self._mask(beside, whose)
                found[stage] = Reduction(parameters, group, mask, whose, each_call)
        return found

    def ties(self) -> list[Tie]:
        """The ties that have copies here."""
        elsewhere: dict[int, tuple[Group, GradientMask]] = {}
        # Ties of the same stages are summed one after the other, before the same steps.
        groups: dict[frozenset[int], tuple[Group, Group]] = {}
        for number in in_turn(self._tied, self._own):
            if len(processes := self._tied[number]) > 1:
                stages = frozenset(stage for stage, _ in self._plan.tied[number][0])
                if stages not in groups:
                    listed = (",".join(map(str, sorted(each))) for each in (stages, processes))
                    purpose = f"ties/{'/'.join(listed)}"
                    groups[stages] = self._connect(purpose, processes)
                group, beside = groups[stages]
                elsewhere[number] = group, self._mask(beside, "a tied parameter's")
        # What replicas have is the sum over them already, where a REDUCE_GRAD is listed.
        summed = {stage for stages, _ in self._summed for stage in stages}
        first = {stage: ranks[0] for stage, ranks in enumerate(self._plan.schedule.placement)}
        here = self._plan.local_ranks
        return [
            Tie(
                held,
                [copy for s, copy in held.items() if s not in summed or first[s] in here],
                elsewhere.get(number),
            )
            for number, (_, held) in enumerate(self._plan.tied)
            if held
        ]

    def accumulated(self) -> Accumulated:
        """The gradients that are summed in every call, because the caller steps."""
        if self._plan.updates:  # sums are over all that an update applies
            return Accumulated([])
        summed = [stage for stages, _ in self._summed for stage in stages if stage in self._stages]
        copies = [copy for _, held in self._plan.tied for copy in held.values()]
        return Accumulated([*copies, *(p for s in summed for p in self._stages[s].parameters())])

    def clipping(self, nonfinite: NonFinite) -> Clipping | None:
        """Clipping by the norm over all stages, if the user asked for it."""
        if self._plan.arguments.clip_grad_norm is None:
            return None
        for stage in self._stages:
            self._fix_trained(stage)
        row = self._grid.processes[self._grid.pipeline]
        claims = (self._claims[self._grid.everyone.index(process)] for process in row)
        sizes = {stage: size for claim in claims for stage, size in claim.sizes.items()}
        dtype = torch.float64 if any(claim.doubles for claim in self._claims) else torch.float32
        norms = Norms(self._plan, self._control, self._groups, sizes, dtype)
        trained = {stage: self._trained(stage) for stage in self._stages}
        return Clipping(self._plan, trained, self._skipped, norms, nonfinite)

    def barriers(self, ties: Sequence[Tie], together: Callable[[], None] | None) -> Barriers:
        """The barriers before the steps of the ranks here: ties, and the work `together`."""
        plan, accelerator = self._plan, self._plan.accelerator
        found: list[tuple[Collection[int], Barrier]] = []
        for tie in ties:
            holders = {rank for stage in tie.copies for rank in plan.local_holders(stage)}
            copies = [*tie.copies.values()]
            found.append((tie.copies, Barrier(len(holders), tie.sum, accelerator, copies)))
        if together is not None:
            steps = sum(
                any(a.kind is Kind.OPTIM_STEP for a in plan.schedule.flat[rank])
                for rank in plan.local_ranks
            )
            every = range(plan.schedule.stages)
            found.append((every, Barrier(steps, together, accelerator)))
        return Barriers(found)

    def replica_check(self) -> ReplicaCheck:
        """The copies here that exist elsewhere, or here, as well: to be compared now and then."""
        copies: dict[str, list[list[nn.Parameter]]] = {}
        holders: dict[str, Sequence[int]] = {}
        for stage, module in self._stages.items():
            processes = self._processes(stage)
            if self._is_copied(stage):
                copies[f"stage {stage}"] = [list(module.parameters())]
                holders[f"stage {stage}"] = [*map(self._grid.everyone.index, processes)]
        for tie, held in self._plan.tied:
            if held:
                copies[_label(tie)] = [[copy] for copy in held.values()]
                holders[_label(tie)] = [*map(self._grid.number, self._holders(tie))]
        own = self._grid.number(self._grid.rank)
        return ReplicaCheck(copies, holders, own, self._control, self._plan.accelerator)

    def settle(self) -> None:
        """Wait for what processes have told each other, before they leave."""
        for mask in self._masks:
            mask.settle()

    def reset(self) -> None:
        """A call has failed: nobody answers any more."""
        for mask in self._masks:
            mask.forget()

    def _fix_trained(self, stage: int) -> None:
        """From here on the same parameters of the stage must be trained."""
        parameters = list(self._stages[stage].parameters())
        self._fixed[stage] = parameters, [p.requires_grad for p in parameters]

    @property
    def active(self) -> bool:
        """Whether there is anything for `check_frozen` to look at."""
        return bool(self._fixed)

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


_Found: TypeAlias = Mapping[str, Sequence[int]]
"""By what copies are called, the fingerprint of each that is here."""


class ReplicaCheck:
    """Compares copies that must stay equal, after some of the steps.

    `copies` are those of this process, each a list of parameters; `holders` are the numbers of the
    processes that have them. The keys of both are the copies' names in messages.
    """

    def __init__(
        self,
        copies: Mapping[str, Sequence[Sequence[nn.Parameter]]],
        holders: Mapping[str, Sequence[int]],
        own: int,
        control: Control,
        accelerator: Accelerator,
    ) -> None:
        self._copies = {label: copies[label] for label in sorted(copies)}
        self._own, self._control, self._accelerator = own, control, accelerator
        peers = sorted({n for held in holders.values() for n in held} - {own})
        # The copies that each peer shares.
        self._peers = {n: [label for label in self._copies if n in holders[label]] for n in peers}
        self._steps = 0
        self._pending: tuple[int, Callable[[], tuple[_Found, Sequence[Tensor]]]] | None = None

    @property
    def active(self) -> bool:
        """Whether there are copies to compare."""
        return bool(self._copies)

    def step(self) -> None:
        """A step is over. Raises ExecutionError where copies have come to differ."""
        sends = self._steps % _INTERVAL == 0
        if sends or not self._accelerator.queues:
            self.compare()
        if self._copies and sends:
            self._send()
        self._steps += 1

    def _send(self) -> None:
        queues, peers = self._accelerator.queues, self._peers
        sizes = {peer: len(labels) for peer, labels in peers.items()}
        exchange = self._control.expect(sizes, DRIFT_TAG, late=queues)
        found = self._fingerprints()

        def told() -> _Found:
            own = found()
            for peer, labels in peers.items():
                shared = [own[label][0] for label in labels]
                content = torch.tensor(shared, dtype=torch.float64, device="cpu")
                self._control.tell(content, [peer], DRIFT_TAG)
            return own

        def exchanged() -> tuple[_Found, Sequence[Tensor]]:
            return told(), exchange.result()

        if queues:
            fetch = self._control.courier.send(exchanged).result if peers else exchanged
            self._pending = self._steps, lambda: fetch()
        else:
            own = told()
            self._pending = self._steps, lambda: (own, exchange.result())

    def _fingerprints(self) -> Callable[[], _Found]:
        """How to get those of the copies as they are now, by one copy to the host."""
        samples = {
            label: [_sample_of_weights(held) for held in copies]
            for label, copies in self._copies.items()
        }
        every = [sample for own in samples.values() for sample in own]
        empty = torch.empty(0, dtype=torch.uint8, device=self._accelerator.device)

        def read(copied: Tensor) -> _Found:
            pieces = iter(copied.split([*map(len, every)]))
            return {
                label: [_of_sample(next(pieces)) for _ in own] for label, own in samples.items()
            }

        return Late(self._accelerator, torch.cat([empty, *filter(len, every)]), read)

    def compare(self) -> None:
        """Compare with what others have sent last, if that has not been done."""
        if self._pending is None:
            return
        step, exchanged = self._pending
        self._pending = None
        own, others = exchanged()
        for label, fingerprints in own.items():
            if len(set(fingerprints)) > 1:
                raise _differ(label, f"on process {self._own}", step)
        for (peer, labels), received in zip(self._peers.items(), others, strict=True):
            for label, theirs in zip(labels, received.tolist(), strict=True):
                if own[label][0] != theirs:
                    raise _differ(label, f"between processes {self._own} and {peer}", step)


def _differ(label: str, where: str, step: int) -> ExecutionError:
    return ExecutionError(
        f"{label} differs {where}, at the end of this executor's step {step}: one copy was loaded, "
        "frozen or stepped apart from the others (with another learning rate, say); treat all "
        "alike, and go on from a checkpoint"
    )


def _label(tie: TieOf) -> str:
    return "the parameter tied as " + " and ".join(f"{stage}:{name}" for stage, name in tie)


_OF_A_PARAMETER = 64


def _sample_of_weights(parameters: Sequence[Tensor]) -> Tensor:
    """Some bytes of some parameters, where these are; their fingerprint is `of_sample`."""
    samples = [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for parameter in parameters:
        flat = local(parameter.detach()).reshape(-1)
        samples.append(flat[:: max(1, len(flat) // _OF_A_PARAMETER)].contiguous().view(torch.uint8))
    return torch.cat(samples[1:] or samples)


def _of_sample(sample: Tensor) -> int:
    """The fingerprint of what was sampled, once it is on the host."""
    return zlib.crc32(sample.numpy().tobytes()) if len(sample) else 0
