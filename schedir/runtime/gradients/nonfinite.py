"""Finds NaN and infinity in losses and gradients, and never applies them.

    F of the last stage   a loss that is not finite: "raise" raises; with "skip" the backward starts
                          from NaN, so that the gradients show it on every process
    before OPTIM_STEP     a gradient that is not finite, after all sums: "raise" raises before the
                          rank's first step; with "skip" all steps of the call are left out

Processes that sum gradients get equal sums, so they find the same. With "skip" the OPTIM_STEPs are
last, and all ranks learn of it from the clipping norm, or from a message. The host waits for the
device once before consecutive OPTIM_STEPs.

A GradScaler's decision is shared by all stages:

    backward of the last stage   starts from scale x share of the microbatch
    before OPTIM_STEP            every gradient is divided by the scale, after all sums, and checked
    end of the call              the scale grows, or shrinks if a gradient was not finite

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2. All processes begin with
the same scale and share each decision, so their scales stay equal without a message.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.runtime.accelerator import Accelerator, Reach
from schedir.runtime.plan import Plan, steps_last
from schedir.runtime.processes.groups import Group, Groups
from schedir.runtime.samples import Count
from schedir.runtime.sharded import local

Step: TypeAlias = tuple[int, int]
"""A stage, and the number of one of its OPTIM_STEPs in a call."""

_MEND = (
    ", so it is not applied; look at the batch, the learning rate and the loss, or make the "
    'Executor with nonfinite="skip", which leaves such updates out'
)
_SMALL = 1 << 10  # elements; more of them are summed sooner than checked one by one


class NonFinite:
    """Checks the losses and gradients of the stages here, by the executor's rule `nonfinite`.

    `optimizers` are those of the stages here. `leaves_out` says whether the current call leaves its
    OPTIM_STEPs out. `agreement` is what ranks that don't clip do together before they step, if
    anything. `scale` is that of the current call's loss. With `reach` the host waits for a device.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        optimizers: Mapping[int, torch.optim.Optimizer],
        reach: Reach,
    ) -> None:
        self._plan, self._accelerator = plan, plan.accelerator
        self._reach = reach
        rule, clips = plan.arguments.nonfinite, plan.arguments.clip_grad_norm is not None
        self._active, self._raises = rule != "ignore", rule == "raise"
        self.agreement = self._agree if rule == "skip" and not clips else None
        self.looks_alone = self._raises and not clips
        self._scaler, self.scale = plan.arguments.scaler, 1.0
        self._gradients = {
            stage: _Gradients(_names(plan, stage), optimizer, plan.accelerator)
            for stage, optimizer in optimizers.items()
        }
        self._group = Group(None)
        if self.agreement is not None and plan.local_stages:
            # Shards differ between pipelines and slices, whole gradients only between slices.
            grid = plan.grid
            lines = range(grid.pipelines) if plan.sharded else [grid.pipeline]
            holders = {rank for held in plan.schedule.placement for rank in held}
            self._group = groups.for_numbers(
                {layout[line][rank] for layout in grid.slices for line in lines for rank in holders}
            )
        self.leaves_out = False
        self._looked_at: set[Step] = set()
        self._losses: dict[int, Tensor] = {}  # on a device, by microbatch: not looked at yet
        self._accumulates = self._adds_up = False  # whether this call leaves gradients, or has some

    def begin(self, updates: bool) -> None:
        """A call begins that trains, and carries out its OPTIM_STEPs if it `updates`."""
        self._adds_up, self._accumulates = self._accumulates, not updates
        self.leaves_out = False
        self._looked_at.clear()
        self._taken()  # a call that failed may have left some
        if self._scaler is not None:
            self.scale = self._scaler.get_scale()

    def end(self) -> None:
        """A call is over: losses that no OPTIM_STEP has waited for are looked at later."""
        if self._scaler is not None and not self._accumulates:
            self._rescale(self._scaler)
        if losses := self._taken():
            values = torch.stack([*losses.values()])
            self._accelerator.check_later(
                values, lambda copied: _check_losses(losses, copied.tolist())
            )

    def loss(
        self, loss: Tensor, microbatch: int, share: Count, trains: bool
    ) -> tuple[float | Tensor, Count]:
        """A microbatch's loss to be read later, and the share of it that its backward starts from.

        One without samples, thus without a share, has no mean: it is not looked at. Raises
        ExecutionError for one that is not finite.
        """
        looks = trains and self._active
        if not self._accelerator.queues:
            number = float(loss.item())
            if looks and not math.isfinite(number):
                share = self.share_of_unfinite(number, microbatch, share)
            return number, share
        kept = loss.detach().clone()  # it is read later, and may be a buffer
        if looks and (isinstance(share, Tensor) or share):
            value = kept.reshape(())
            if isinstance(share, Tensor):
                value = torch.where(share == 0, 0.0, value)
            if self._raises:
                self._losses[microbatch] = value
            else:
                share = share + value * 0  # NaN, unless the loss is finite
        return kept, share

    def share_of_unfinite(self, loss: float, microbatch: int, share: Count) -> Count:
        """The start of the backward of a loss that is not finite. Raises ExecutionError where
        that is refused."""
        if share and self._raises:
            _check_losses([microbatch], [loss])
        return math.nan if share and self._active else share

    def look(self, steps: Sequence[Step]) -> None:
        """Look at the gradients that a rank's consecutive OPTIM_STEPs will apply.

        Raises ExecutionError where one is not finite.
        """
        # A replica in this process may have stepped already.
        due = [step for step in steps if step not in self._looked_at]
        self._looked_at.update(due)
        self._refuse(due)

    def look_before_norms(self) -> None:
        """Look at the gradients here before all ranks take the norm.

        On a device that would be waited for, and the norm tells. Raises ExecutionError where one is
        not finite.
        """
        self._unscale()
        if self._raises and not self._accelerator.queues:
            self._refuse()

    def accepts(self, norms: Tensor, stages: Sequence[int], total: Tensor) -> bool:
        """Whether gradients of that total norm may be applied; else the steps are left out.

        `norms` is made of those of these stages. Raises ExecutionError where none should be.
        """
        if not self._active or math.isfinite(*self._read([total])):
            return True
        if self._raises:
            self._refuse()
            those = {s for s, n in zip(stages, norms.tolist(), strict=True) if not math.isfinite(n)}
            whose = (
                f"stage {', '.join(map(str, sorted(those)))}" if those else "all stages together"
            )
            raise ExecutionError(f"the norm of the gradients of {whose} is not finite{_MEND}")
        self.leaves_out = True
        return False

    @property
    def skipped(self) -> tuple[Step, ...]:
        """The OPTIM_STEPs of the stages here that the current call leaves out."""
        return tuple((stage, 0) for stage in self._plan.local_stages) if self.leaves_out else ()

    def _agree(self) -> None:
        """Leave all steps out where any rank has a gradient that is not finite."""
        self._unscale()
        own = torch.tensor([bool(self._not_finite())], dtype=torch.int32, device="cpu")
        self.leaves_out = bool(self._group.sum(own, "all verdicts on gradients")())

    def _unscale(self) -> None:
        """Divide the gradients here by the scale of the loss, if there is one."""
        if self._scaler is not None:
            for gradients in self._gradients.values():
                for p in gradients.own:
                    if p.grad is not None:
                        local(p.grad).mul_(1 / self.scale)

    def _rescale(self, scaler: GradScaler) -> None:
        """Change the scale as `GradScaler.update` does after steps that were applied or not."""
        state = scaler.state_dict()
        scale = torch.tensor(self.scale, dtype=torch.float32, device="cpu")
        applied = torch.tensor(state["_growth_tracker"], dtype=torch.int32, device="cpu")
        factors = state["growth_factor"], state["backoff_factor"], state["growth_interval"]
        overflowed = torch.full_like(scale, self.leaves_out)
        torch._amp_update_scale_(scale, applied, overflowed, *factors)
        state |= {"scale": scale.item(), "_growth_tracker": applied.item()}
        scaler.load_state_dict(state)

    def _not_finite(self, steps: Sequence[Step] | None = None) -> list[Step]:
        """Of these steps, or each stage's only one, those with a gradient that is not finite."""
        if steps is None:
            steps = [(stage, 0) for stage in self._gradients]
        due = [step for step in steps if step[0] in self._gradients]
        flags = self._read([self._gradients[stage].look() for stage, _ in due])
        return [step for step, flag in zip(due, flags, strict=True) if flag]

    def _read(self, scalars: Sequence[Tensor]) -> list[float]:
        """Read the values; on a GPU with the losses, so that the host waits only once."""
        losses = self._taken()
        values = self._accelerator.read([*scalars, *losses.values()], self._reach)
        _check_losses(losses, values[len(scalars) :])
        return values[: len(scalars)]

    def _taken(self) -> dict[int, Tensor]:
        """The losses that nobody has looked at."""
        losses, self._losses = self._losses, {}
        return losses

    def _refuse(self, steps: Sequence[Step] | None = None) -> None:
        """Raise ExecutionError where a gradient of these steps, or of all, is not finite."""
        if found := self._not_finite(steps):
            # Gradients flow down: the last stage that has one may be why others do.
            stage, step = max(self._not_finite() if steps_last(self._plan.schedule) else found)
            what = self._gradients[stage].worst() + self._microbatch(stage, step)
            raise ExecutionError(f"{what}{_MEND}")

    def _microbatch(self, stage: int, step: int) -> str:
        """The microbatch whose gradient a step applies, in words, if it is a single one."""
        flow = graph_of(self._plan.schedule)
        applied = (flow.turn[flow.weight_gradients][stage] == step).nonzero()[0].tolist()
        if self._plan.grid.pipelines > 1 or len(applied) > 1 or (self._adds_up and not step):
            return ""
        return f" by microbatch {applied[0]}"


def _check_losses(microbatches: Iterable[int], losses: Iterable[Any]) -> None:
    """Raise ExecutionError for a loss that is not finite."""
    for microbatch, value in zip(microbatches, losses, strict=True):
        if not math.isfinite(value):
            raise ExecutionError(f"the loss of microbatch {microbatch} is {value}{_MEND}")


class _Gradients:
    """The gradients of `own`, the parameters that a stage's optimiser steps; `names` are those of
    all its parameters."""

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
    ) -> None:
        self._names, self._queues = names, accelerator.queues
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        self.own = [p for p in names if p in stepped]
        # A sum is not finite where an element isn't; of halves it easily overflows otherwise.
        summed = {
            p
            for p in self.own
            if p.is_complex()
            or not (self._queues or p.numel() <= _SMALL or p.dtype is torch.float16)
        }
        self._summed = [p for p in self.own if p in summed]
        self._checked = [p for p in self.own if p not in summed]
        self._found = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        self._one = torch.ones((), dtype=torch.float32, device=accelerator.device)

    def look(self) -> Tensor:
        """A scalar: above zero where a gradient is not finite."""
        found = self._found.zero_()
        grads = [local(grad) for p in self._checked if (grad := p.grad) is not None]
        if grads:
            try:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, self._one)
            except RuntimeError:  # one is sparse, or its elements share memory
                for grad in grads:
                    found += ~_is_finite(grad)
        for p in self._summed:
            if p.grad is None:
                continue
            grad = local(p.grad)
            if self._queues or not cmath.isfinite(grad.sum().item()):
                found += ~_is_finite(grad)
        return found

    def worst(self) -> str:
        """The gradient that is not finite, in words: of several that of the last parameter, as
        gradients flow towards the first."""
        there = [(p, local(p.grad)) for p in self.own if p.grad is not None]
        parameter, grad = [(p, grad) for p, grad in there if not _is_finite(grad)][-1]
        kind = "NaN" if bool(_values(grad).isnan().any()) else "infinity"
        return f"the gradient of {self._names[parameter]} has {kind}"


def _is_finite(grad: Tensor) -> Tensor:
    """Whether all elements are finite, as a scalar tensor."""
    return _values(grad).isfinite().all()


def _values(grad: Tensor) -> Tensor:
    """All elements, in a tensor that is not sparse."""
    if grad.layout is torch.strided:
        return grad
    return grad.coalesce().values() if grad.layout is torch.sparse_coo else grad.to_dense()


def _names(plan: Plan, stage: int) -> dict[nn.Parameter, str]:
    """The names of a stage's parameters, in order, and then those of the loss."""
    own = plan.arguments.stages[stage].named_parameters()
    found = {parameter: f"{name} of stage {stage}" for name, parameter in own}
    for name, parameter in plan.trained[stage].named_parameters():
        found.setdefault(parameter, f"{name.removeprefix('loss.')} of the loss")
    return found
