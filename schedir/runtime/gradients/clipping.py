"""Clips gradients by their norm over all stages, in the same way on all ranks.

Every process with a stage gets the norms of all stages: a sum of vectors, in which each process
puts the norms of its stages, and zeros for the others. On a GPU they stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedir.runtime.accelerator import Late
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import refuse_sparse
from schedir.runtime.plan import Plan
from schedir.runtime.processes.failure import waiting
from schedir.runtime.processes.groups import Group, Groups
from schedir.runtime.sharded import local


class Clipping:
    """Scales all gradients so that their norm is at most the executor's `clip_grad_norm`.

    `sizes` are the numbers of norms of each stage: all trained parameters count but those in
    `skipped`, which count on other processes. The total is of the type `dtype`. `nonfinite` accepts
    the norms if they are finite. `norm` is a function that gets the latest call's norm.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        sizes: Mapping[int, int],
        dtype: torch.dtype,
        skipped: set[nn.Parameter],
        nonfinite: NonFinite,
    ) -> None:
        self._plan, self._dtype, self._nonfinite = plan, dtype, nonfinite
        self.norm: Callable[[], float] | None = None
        trained = {
            stage: [p for p in module.parameters() if p.requires_grad]
            for stage, module in plan.trained.items()
        }
        self._parameters = [*chain.from_iterable(trained.values())]
        # Of each stage its first holder's norms are taken.
        placement, row = plan.schedule.placement, plan.grid.processes[plan.grid.pipeline]
        self._counted = {
            stage: counted
            for stage, own in sorted(trained.items())
            if placement[stage][0] in plan.local_ranks
            and (counted := [p for p in own if p not in skipped])
        }
        self._stages = [s for s in sorted(sizes) for _ in range(sizes[s])]
        # A rank without stages has no step to receive them at.
        processes = {row[rank] for held in placement for rank in held}
        self._group = Group(None)
        if plan.local_stages:
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
            found = dict(zip(there, _each([*there.values()]), strict=True))
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


def _each(grads: Sequence[Tensor]) -> list[Tensor]:
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
