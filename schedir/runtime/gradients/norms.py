"""The norms of the gradients of all stages, on every process that has one.

On the CPU their numbers go from host to host. On a device that queues its work they stay there, and
go through a sum: each process puts in those of its own stages, and zeros for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import NORM_TAG, Control
from schedir.runtime.processes.groups import Groups, wait_for_sum

Grads: TypeAlias = Mapping[int, Sequence[Tensor | None]]
"""By stage, the gradients that count."""


@attrs.frozen(eq=False)
class Norms:
    """The norms of all stages in their order, and of each the stage."""

    values: Tensor
    stages: Sequence[int]

    def infinite(self, read: Sequence[float]) -> list[int]:
        """The stages whose norms, as they were read, are not finite."""
        found = (s for s, norm in zip(self.stages, read, strict=True) if not math.isfinite(norm))
        return list(dict.fromkeys(found))


class NormSource(Protocol):
    """Gives every process the norms of all stages, each once."""

    def gather(self, own: Grads) -> Norms:
        """The norms of all stages, of the gradients of those here."""


class _Senders:
    """Which process gives the norms of which stages: the first of those that hold each.

    `sizes` are how many norms a stage has, of all stages that have parameters.
    """

    def __init__(self, plan: Plan, sizes: Mapping[int, int]) -> None:
        placement, grid = plan.schedule.placement, plan.grid
        self.own = grid.number(grid.rank)
        self.sizes = sizes
        self.stages: dict[int, list[int]] = {}  # by number
        for stage, held in enumerate(placement):
            self.stages.setdefault(grid.number(held[0]), []).append(stage)
        # A rank without stages has no step to receive them at.
        self.ranks = sorted({rank for held in placement for rank in held})


class NormsBetweenHosts:
    """By messages beside the payloads; `dtype` is what the total is taken in."""

    def __init__(
        self, plan: Plan, control: Control, sizes: Mapping[int, int], dtype: torch.dtype
    ) -> None:
        self._control, self._dtype = control, dtype
        self._senders = _Senders(plan, sizes)
        self._receivers = [*map(plan.grid.number, self._senders.ranks)]

    def gather(self, own: Grads) -> Norms:
        """The norms of all stages, of the gradients of those here."""
        senders, by_stage = self._senders, {s: _numbers(grads) for s, grads in own.items()}
        sizes = {n: sum(senders.sizes[s] for s in held) for n, held in senders.stages.items()}
        # Who has no gradients sends nothing: an empty message is none.
        exchange = self._control.expect({n: size for n, size in sizes.items() if size}, NORM_TAG)
        sent = [norm for s in senders.stages.get(senders.own, ()) for norm in by_stage[s]]
        if sent:
            exchange.give(torch.tensor(sent, dtype=torch.float64, device="cpu"), self._receivers)
        received = iter(exchange.result())
        found: dict[int, list[float]] = {}
        for number, stages in senders.stages.items():
            norms = iter(next(received).tolist() if sizes[number] else ())
            found.update({s: list(islice(norms, senders.sizes[s])) for s in stages})
        there = [(s, norm) for s in sorted(found) for norm in found[s] if norm != _ABSENT]
        values = [norm for _, norm in there] or [0.0]
        return Norms(
            torch.tensor(values, dtype=self._dtype, device="cpu"), [s for s, _ in there] or [0]
        )


class NormsOnDevice:
    """By a sum on the device, in a group of a pipeline's processes that have stages."""

    def __init__(
        self, plan: Plan, groups: Groups, sizes: Mapping[int, int], dtype: torch.dtype
    ) -> None:
        self._device, self._dtype = plan.device, dtype
        self._senders = _Senders(plan, sizes)
        row = plan.grid.processes[plan.grid.pipeline]
        processes = sorted({row[rank] for rank in self._senders.ranks})
        self._alone = len(processes) == 1
        if row[plan.grid.rank] in processes:
            self._group = groups.make(f"norms/{processes}", processes, self._device)
        self._stages = [s for s in sorted(sizes) for _ in range(sizes[s])]

    def gather(self, own: Grads) -> Norms:
        """The norms of all stages, of the gradients of those here.

        In a sum one that is not there is a zero, so the total's sum may round differently.
        """
        if self._alone:
            there = {s: [grad for grad in grads if grad is not None] for s, grads in own.items()}
            found = [norm for s in sorted(there) for norm in self._of(there[s])]
            stages = [s for s in sorted(there) for _ in there[s]]
            return Norms(torch.stack(found) if found else self._zeros(1), stages or [0])
        values = self._zeros(max(1, len(self._stages)))
        for stage in self._senders.stages.get(self._senders.own, ()):
            if grads := own[stage]:
                norms = iter(self._of([grad for grad in grads if grad is not None]))
                absent = self._zeros(())
                stacked = torch.stack([absent if g is None else next(norms) for g in grads])
                start = self._stages.index(stage)
                values[start : start + len(grads)] = stacked
        wait_for_sum([self._group.allreduce([values])], "all norms")
        return Norms(values, self._stages or [0])

    def _of(self, grads: list[Tensor]) -> list[Tensor]:
        return [norm.to(self._dtype) for norm in _each(grads)]

    def _zeros(self, shape: int | tuple[()]) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


_ABSENT = -1.0


def _numbers(grads: Sequence[Tensor | None]) -> list[float]:
    """The norm of each gradient, and what stands for one that is not there."""
    there = _each([grad for grad in grads if grad is not None])
    found = iter(torch.stack(there).tolist() if there else ())
    return [_ABSENT if grad is None else next(found) for grad in grads]


_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Of 16 bits the squares' sum overflows, or is rounded to a few digits."""


def _each(grads: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient, as torch.nn.utils.clip_grad_norm_ takes it, but that of 16 bits
    in 32."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_type.setdefault(grad.dtype, []).append(grad)
    found = {
        kind: iter(torch._foreach_norm(held, dtype=_SUMMED_IN.get(kind)))
        for kind, held in by_type.items()
    }
    return [next(found[grad.dtype]) for grad in grads]
