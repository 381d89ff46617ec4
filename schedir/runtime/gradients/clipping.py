"""Clips gradients by their norm over all stages, in the same way on all ranks.

Every process with a stage gets the norms of all stages. On the CPU the hosts exchange the numbers.
On a GPU they stay there, and are exchanged by a sum: each process puts in the norms of its stages,
and zeros for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedir.runtime.accelerator import Late
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import refuse_sparse
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import NORM_TAG, Control
from schedir.runtime.processes.failure import waiting
from schedir.runtime.processes.groups import Group, Groups, wait_for_sum
from schedir.runtime.sharded import groups_of_shards, local


@attrs.define(eq=False)
class Clipping:
    """Scales all gradients so that their norm is at most the executor's `clip_grad_norm`.

    `parameters` are those of the stages here; the gradients of those in `skipped` count on other
    processes. `norms` gets the norms of all stages, and `nonfinite` accepts them if they are
    finite. `norm` is a function that gets the latest call's norm.
    """

    _plan: Plan
    _parameters: Mapping[int, Sequence[nn.Parameter]]
    _skipped: set[nn.Parameter]
    _norms: Norms
    _nonfinite: NonFinite
    norm: Callable[[], float] | None = None

    def clip(self) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model, whose order of sums it keeps."""
        max_norm = self._plan.arguments.clip_grad_norm
        assert max_norm is not None  # or nothing is clipped
        for parameters in self._parameters.values():
            for parameter in parameters:
                refuse_sparse(parameter, "clipped")
        self._nonfinite.look_before_norms()
        norms, stages = self._norms.of_all(
            {
                stage: [p.grad for p in parameters if p not in self._skipped]
                for stage, parameters in self._parameters.items()
            }
        )
        total = torch.linalg.vector_norm(norms)
        self.norm = Late(self._plan.accelerator, total, lambda copied: float(copied.item()))
        if self._nonfinite.accepts(norms, stages, total):
            for parameters in self._parameters.values():
                held = [_Held(local(p.grad)) for p in parameters if p.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(held, max_norm, total)  # type: ignore[arg-type]


@attrs.frozen
class _Held:
    """A gradient, as torch's function looks for it."""

    grad: Tensor


class Norms:
    """Gives every process the norms of all stages; each stage's come from its first holder.

    `sizes` are the numbers of norms of each stage; `dtype` is that of the total.
    """

    def __init__(
        self,
        plan: Plan,
        control: Control,
        groups: Groups,
        sizes: Mapping[int, int],
        dtype: torch.dtype,
    ) -> None:
        placement, grid = plan.schedule.placement, plan.grid
        self._control, self._dtype, self._device = control, dtype, plan.device
        own = grid.number(grid.rank)
        given: dict[int, list[int]] = {}  # by number, the stages whose norms a process gives
        for stage, held in enumerate(placement):
            given.setdefault(grid.number(held[0]), []).append(stage)
        self._own = given.get(own, [])
        # Who has no gradients sends nothing: an empty message is none.
        counts = {number: sum(map(sizes.__getitem__, stages)) for number, stages in given.items()}
        self._sizes = {number: count for number, count in counts.items() if count}
        listed = [s for stages in given.values() for s in stages for _ in range(sizes[s])]
        self._order = sorted(range(len(listed)), key=listed.__getitem__)  # of what all have sent
        self._stages = sorted(listed)
        # A rank without stages has no step to receive them at.
        ranks = sorted({rank for held in placement for rank in held})
        self._receivers = [*map(grid.number, ranks)]
        row = grid.processes[grid.pipeline]
        processes = sorted({row[rank] for rank in ranks})
        self._alone = len(processes) == 1
        self._group: Group | None = None
        if plan.accelerator.queues and row[grid.rank] in processes:
            self._group = groups.for_numbers(processes, self._device)

    def of_all(self, own: Mapping[int, Sequence[Tensor | None]]) -> tuple[Tensor, Sequence[int]]:
        """The norms of all stages in their order, and of each the stage; `own` are the gradients
        that count of the stages here.

        In a sum one that is not there is a zero, so the total's sum may round differently.
        """
        norms = {stage: _each(own[stage]) for stage in sorted(own)}
        if self._alone:
            there = [(n, stage) for stage in norms for n in norms[stage] if n is not None]
            found = [n.to(self._dtype) for n, _ in there]
            return torch.stack(found) if found else self._full([0], 0.0), [s for _, s in there]
        absent = self._full((), _ABSENT if self._group is None else 0.0)
        told = {s: [absent if n is None else n for n in norms[s]] for s in self._own}
        if self._group is not None:
            values = self._full([len(self._stages)], 0.0)
            for stage, given in told.items():
                if given:
                    start = self._stages.index(stage)
                    values[start : start + len(given)] = torch.stack(given)
            if self._stages:
                wait_for_sum([self._group.allreduce([values])], "all norms")
            return values, self._stages
        exchange = self._control.expect(self._sizes, NORM_TAG)
        if sent := [n for given in told.values() for n in given]:
            exchange.give(torch.stack(sent).to(torch.float64), self._receivers)
        if not self._stages:
            return self._full([0], 0.0), []
        values = torch.cat(exchange.result())[self._order].to(self._dtype)
        there_is = values != _ABSENT
        return values[there_is], [*compress(self._stages, there_is.tolist())]

    def _full(self, shape: Sequence[int], value: float) -> Tensor:
        return torch.full(shape, value, dtype=self._dtype, device=self._device)


_ABSENT = -1.0
"""What stands for the norm of a gradient that is not there."""

_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Of 16 bits the squares' sum overflows, or is rounded to a few digits."""


def _each(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The norm of each gradient, as torch.nn.utils.clip_grad_norm_ takes it, but that of 16 bits
    in 32; None for one that is not there."""
    return _of_whole(_of_local([None if g is None else local(g) for g in grads]), grads)


def _of_whole(norms: list[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The norms of whole gradients, from those of their parts in this process. What is replicated
    counts once; the squares of shards are added, in one sum for each group of processes."""
    parts: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, grad in enumerate(grads):
        if isinstance(grad, DTensor) and (groups := groups_of_shards(grad)):
            parts.setdefault(groups, []).append(number)
    for groups, numbers in parts.items():
        squares = torch.stack([n for at in numbers if (n := norms[at]) is not None]).square()
        for group in groups:
            with waiting("the norms of all shards"):
                dist.all_reduce(squares, group=group)
        for at, root in zip(numbers, squares.sqrt().unbind(), strict=True):
            norms[at] = root
    return norms


def _of_local(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            by_type.setdefault(grad.dtype, []).append(grad)
    found = {
        kind: iter(torch._foreach_norm(held, dtype=_SUMMED_IN.get(kind)))
        for kind, held in by_type.items()
    }
    return [None if grad is None else next(found[grad.dtype]) for grad in grads]
