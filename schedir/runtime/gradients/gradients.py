"""All that happens to the gradients of this process's stages between backward and update.

    begin          set aside what earlier calls have summed, for a caller who steps
    before steps   sums over processes, ties, scaling, clipping, checks (`program.compiler`)
    end            finish sums; sum ties, for a caller who steps; compare copies
    restore        add what was set aside, even after a failure

Who takes part in sums, ties and clipping is settled when the executor is made: processes compare
what they hold, and make groups for it.

To clip, every process with a stage gets the norms of all stages: a sum of vectors, in which each
process puts the norms of its stages, and zeros for the others. On a GPU they stay there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.runtime.accelerator import Late, Reach
from schedir.runtime.gradients.copies import DriftCheck, copies_of_stages, copies_of_ties
from schedir.runtime.gradients.nonfinite import NonFinite, Step
from schedir.runtime.gradients.reduction import (
    Barrier,
    Reduction,
    Tie,
    reduction_groups,
    refuse_sparse,
)
from schedir.runtime.plan import Plan
from schedir.runtime.processes.failure import waiting
from schedir.runtime.processes.groups import Group, Groups, in_turn
from schedir.runtime.samples import share_sums
from schedir.runtime.session import Claim, Session, agree
from schedir.runtime.sharded import local


def compared(plan: Plan, session: Session) -> Sequence[Claim]:
    """Compare what processes hold; returns their claims by number.

    Raises ExecutionError on all of them if copies, schedules or arguments differ.
    """
    stages, ties = [*copies_of_stages(plan)], [*copies_of_ties(plan)]
    copies: dict[str, object] = {each.label: each.digest() for each in (*stages, *ties)}
    copies |= {
        f"what is frozen of {each.label}": tuple(not p.requires_grad for p in own)
        for each in stages
        for own in each.here.values()
    }
    cut = getattr(plan.arguments.stages, "cut", None)  # of schedir.training's Stages
    own = Claim(
        {
            "torch": {
                # Without the local part.
                "torch.__version__": str(torch.__version__).partition("+")[0],
                "torch.get_default_dtype()": torch.get_default_dtype(),
            },
            "argument": plan.compared,
            "schedule": {"": plan.schedule.content_hash},
            "device": {"": plan.device.type},
            "cut": {} if cut is None else {"": cut},
            "dtype": {each.label: each.dtypes for each in (*stages, *ties)},
            "copies": copies,
        },
        "" if "NCCL_HOSTID" in os.environ else plan.accelerator.name,
        plan.accelerator.processors,
        {stage: len(own) for stage, own in _counted(plan).items()},
        any(p.dtype is torch.float64 for m in plan.trained.values() for p in m.parameters()),
        plan.described,
    )
    with session.gathering():
        return agree(session.control, own, plan.schedule)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


class Gradients:
    """The gradients of the stages here; `claims` are those of all processes.

    A call that trains has `check`, `begin`, `end` and `restore`, in that order. It `updates` if
    OPTIM_STEPs run here; else the caller steps. What earlier calls have left is summed then, over
    processes and over tied copies: it is set aside while a call runs, which sums only its new
    gradients. `share_sums` are those of the OPTIM_STEPs that scale what they apply.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        claims: Sequence[Claim],
        optimizers: Mapping[int, torch.optim.Optimizer],
        reach: Reach,
    ) -> None:
        self._plan, self.updates = plan, plan.updates
        summed = reduction_groups(plan.schedule, plan.sharded)
        made = _made_groups(plan, groups, summed)
        self.reductions = {
            stage: Reduction(own, *made[purpose], f"stage {stage}'s", not plan.updates)
            for stages in summed
            if (purpose := _purpose("stages", stages)) in made
            for stage in stages
            if (own := _trained(plan.trained[stage]))
        }
        # What replicas have is the sum over them already, where a REDUCE_GRAD is listed.
        self._ties = _ties(plan, made, {stage for stages in summed for stage in stages})
        elsewhere = (tie.elsewhere for tie in self._ties)
        self._sums = [*self.reductions.values(), *filter(None, elsewhere)]
        weighs = plan.arguments.weigh is not None  # else every share is 1, in every group
        self.share_sums = share_sums(plan.schedule) if plan.updates and weighs else {}
        self.nonfinite = NonFinite(plan, groups, optimizers, reach)
        self.clipping = None
        if plan.arguments.clip_grad_norm is not None:
            self.clipping = Clipping(plan, groups, claims, self.nonfinite)
        self._barriers = self._made_barriers()
        self._drift = DriftCheck(plan, groups, [*copies_of_stages(plan), *copies_of_ties(plan)])
        copies = {copy: stage for _, held in plan.tied for stage, copy in held.items()}
        settled = {*self.reductions, *copies.values()}
        self._fixed = [
            (stage, name, parameter, parameter.requires_grad)
            for stage, module in plan.trained.items()
            if stage in settled or self.clipping is not None
            for name, parameter in module.named_parameters()
        ]
        self._earlier: list[tuple[nn.Parameter, Tensor | None]] = []
        self.accumulated: list[nn.Parameter] = []
        if not plan.updates:
            summing = (plan.trained[stage].parameters() for stage in self.reductions)
            self.accumulated = [*dict.fromkeys(chain(copies, *summing))]

    def _made_barriers(self) -> list[tuple[Collection[int], Barrier]]:
        """The barriers before the steps of the ranks here: ties, and what all ranks do together;
        each with the stages whose OPTIM_STEPs come after it."""
        plan, accelerator = self._plan, self._plan.accelerator
        found: list[tuple[Collection[int], Barrier]] = []
        for tie in self._ties:
            holders = {rank for stage in tie.copies for rank in plan.local_holders(stage)}
            copies = [*tie.copies.values()]
            found.append((tie.copies, Barrier(len(holders), tie.sum, accelerator, copies)))
        together = self.nonfinite.agreement if self.clipping is None else self.clipping.clip
        if together is not None:
            flow = graph_of(plan.schedule)
            stepping = {*flow.columns.rank[flow.steps].tolist()}.intersection(plan.local_ranks)
            every = range(plan.schedule.stages)
            found.append((every, Barrier(len(stepping), together, accelerator)))
        return found

    def barriers(self, stages: Collection[int]) -> list[Barrier]:
        """The barriers before consecutive OPTIM_STEPs of these stages, on one rank."""
        return [barrier for own, barrier in self._barriers if not set(own).isdisjoint(stages)]

    def scale(self, parameters: Sequence[nn.Parameter], step: Step) -> None:
        """Scale what has been accumulated for an OPTIM_STEP, after all sums over replicas."""
        for parameter in parameters:
            if parameter.grad is not None:  # out of place: another's may share its memory
                parameter.grad = parameter.grad * (1.0 / self.share_sums[step])

    def check(self) -> None:
        """Raise ExecutionError where a parameter was frozen or thawed since the executor was made,
        though who takes part in sums, ties or clipping was settled there."""
        for stage, name, parameter, was in self._fixed:
            if parameter.requires_grad is not was:
                raise ExecutionError(
                    f"{name} of stage {stage} was {'frozen' if was else 'thawed'} since the "
                    "executor was made, which settles what is summed over processes, tied or "
                    "clipped; make a new Executor"
                )

    def begin(self, updates: bool) -> None:
        """A call that trains begins, and `updates` or not.

        Raises ExecutionError for gradients from before it that would be scaled once more.
        """
        for stage, step in self.share_sums if updates else ():
            module = self._plan.trained.get(stage)
            if (
                module is not None
                and not step
                and any(p.grad is not None for p in module.parameters())
            ):
                raise ExecutionError(
                    f"stage {stage} has gradients from before this call, but its first OPTIM_STEP "
                    "scales them too, because it steps after other microbatches than the loss "
                    "stage; clear them (zero_grad), and leave update=False out"
                )
        self.nonfinite.begin(updates)
        self._earlier = [(parameter, parameter.grad) for parameter in self.accumulated]
        for parameter in self.accumulated:
            parameter.grad = None

    def end(self) -> None:
        """The list is over: finish the sums, and those of ties for a caller who steps."""
        for reduction in self.reductions.values():
            reduction.finish()
        if not self.updates:
            for tie in self._ties:
                tie.sum()
        self._drift.step()
        self.nonfinite.end()

    def restore(self) -> None:
        """Add what was set aside to what the call has left; nothing, if that has been done."""
        for parameter, earlier in self._earlier:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
        self._earlier = []

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


def _counted(plan: Plan) -> dict[int, list[nn.Parameter]]:
    """The parameters of the stages here whose norms count: all that are trained, but of tied copies
    the first one only."""
    others = {copy for tie, held in plan.tied for s, copy in held.items() if s != tie[0][0]}
    return {
        stage: [p for p in _trained(module) if p not in others]
        for stage, module in plan.trained.items()
    }


def _purpose(what: str, numbers: Iterable[int]) -> str:
    return f"{what}/{','.join(map(str, sorted({*numbers})))}"


def _made_groups(
    plan: Plan, groups: Groups, summed: Sequence[tuple[int, ...]]
) -> dict[str, tuple[Group, Group]]:
    """The groups here for the sums of stages and of ties, by purpose; with each the one in which
    hosts tell each other what gradients there are: on the CPU the same."""
    row, placement = plan.grid.processes[plan.grid.pipeline], plan.schedule.placement
    wanted = {
        _purpose("stages", stages): plan.grid.holders(placement[stages[0]]) for stages in summed
    }
    # Ties of the same stages are summed one after the other, before the same steps.
    for tie, _ in plan.tied:
        holders = {row[rank] for stage, _ in tie for rank in placement[stage]}
        wanted[_purpose("ties", dict(tie))] = tuple(sorted(holders))
    found: dict[str, tuple[Group, Group]] = {}
    for number in in_turn([*wanted.values()], row[plan.grid.rank]):
        purpose, processes = [*wanted.items()][number]
        if len(processes) > 1:
            name = _purpose(purpose, processes)
            group = hosts = groups.make(name, processes, plan.device)
            if plan.accelerator.queues:
                hosts = groups.make(f"{name}/presence", processes)
            found[purpose] = group, hosts
    return found


def _ties(
    plan: Plan, made: Mapping[str, tuple[Group, Group]], summed: Collection[int]
) -> list[Tie]:
    """The ties that have copies here; the gradients of stages that are `summed` are sums over all
    that hold them already."""
    found = []
    for tie, held in plan.tied:
        if held:
            counted = [
                copy
                for stage, copy in held.items()
                if stage not in summed or plan.schedule.placement[stage][0] in plan.local_ranks
            ]
            elsewhere = None
            if (groups := made.get(_purpose("ties", dict(tie)))) is not None:
                elsewhere = Reduction([next(iter(held.values()))], *groups, "a tied parameter's")
            found.append(Tie(held, counted, elsewhere))
    return found


class Clipping:
    """Scales all gradients so that their norm is at most the executor's `clip_grad_norm`.

    `claims` are those of all processes. `nonfinite` accepts the norms if they are finite. `norm` is
    a function that gets the latest call's norm.
    """

    def __init__(
        self, plan: Plan, groups: Groups, claims: Sequence[Claim], nonfinite: NonFinite
    ) -> None:
        self._plan, self._nonfinite = plan, nonfinite
        self.norm: Callable[[], float] | None = None
        self._parameters = [p for module in plan.trained.values() for p in _trained(module)]
        placement, row = plan.schedule.placement, plan.grid.processes[plan.grid.pipeline]
        # Of each stage its first holder's norms are taken.
        self._counted = {
            stage: own
            for stage, own in _counted(plan).items()
            if own and placement[stage][0] in plan.local_ranks
        }
        own_claims = [claims[plan.grid.everyone.index(process)] for process in row]
        sizes = {stage: size for claim in own_claims for stage, size in claim.sizes.items()}
        self._stages = [stage for stage in sorted(sizes) for _ in range(sizes[stage])]
        self._dtype = torch.float64 if any(c.doubles for c in claims) else torch.float32
        self._group = Group(None)
        if plan.local_stages:  # a rank without stages has no step to receive them at
            processes = {row[rank] for held in placement for rank in held}
            self._group = groups.for_numbers(processes, plan.device)

    def clip(self) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model, whose order of sums it keeps."""
        max_norm = self._plan.arguments.clip_grad_norm
        assert max_norm is not None  # or nothing is clipped
        for parameter in self._parameters:
            refuse_sparse(parameter, "clipped")
        self._nonfinite.look_before_norms()
        norms = self._norms()
        # A device takes a zero for a gradient that is not there: its sum may round differently.
        there = norms if self._plan.accelerator.queues else norms[norms != _ABSENT]
        total = torch.linalg.vector_norm(there)
        self.norm = Late(self._plan.accelerator, total, lambda copied: float(copied.item()))
        if self._nonfinite.accepts(norms, self._stages, total):
            held = [_Held(local(p.grad)) for p in self._parameters if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(held, max_norm, total)  # type: ignore[arg-type]

    def _norms(self) -> Tensor:
        """The norms of all stages in their order."""
        values = torch.zeros(len(self._stages), dtype=self._dtype, device=self._plan.device)
        absent = values.new_full((), 0.0 if self._plan.accelerator.queues else _ABSENT)
        for stage, own in self._counted.items():
            there = {p: p.grad for p in own if p.grad is not None}
            found = dict(zip(there, _norms_of([*there.values()]), strict=True))
            start = self._stages.index(stage)
            values[start : start + len(own)] = torch.stack([found.get(p, absent) for p in own])
        return self._group.sum(values, "all norms")() if self._stages else values


@attrs.frozen
class _Held:
    """A gradient, as torch's function looks for it."""

    grad: Tensor


_ABSENT = -1.0
"""What stands for the norm of a gradient that is not there."""

_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Of 16 bits the squares' sum overflows, or is rounded to a few digits."""


def _norms_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient, as torch.nn.utils.clip_grad_norm_ takes it, but that of 16 bits
    in 32. Processes with shards add up their squares, in one sum for all that are split alike."""
    alike: dict[object, list[int]] = {}
    for at, grad in enumerate(grads):
        split: object = None
        if isinstance(grad, DTensor):
            split = grad.device_mesh, (*(placed.is_replicate() for placed in grad.placements),)
        alike.setdefault((grad.dtype, split), []).append(at)
    norms: dict[int, Tensor] = {}
    for places in alike.values():
        own = [grads[at] for at in places]
        found = torch.stack(torch._foreach_norm(own, dtype=_SUMMED_IN.get(own[0].dtype)))
        if isinstance(found, DTensor):
            with waiting("the norms of all shards"):
                found = found.full_tensor()
        norms |= zip(places, found.unbind(), strict=True)
    return [norms[at] for at in range(len(grads))]
