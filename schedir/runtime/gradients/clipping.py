"""Clipping by the norm of the gradients of all stages, on all ranks alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor, nn

from schedir.runtime.gradients.reduction import refuse_sparse
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import NORM_TAG, Control

logger = logging.getLogger("schedir")

Norms: TypeAlias = dict[int, list[float]]
"""By stage, the norm of each parameter's gradient, -1 where there is none."""


class NormExchange:
    """Gives every process the norms of all stages, each once; `sizes` are how many a stage has.

    The first of the processes that hold a stage sends its norms.
    """

    def __init__(self, plan: Plan, control: Control, sizes: Mapping[int, int]) -> None:
        placement, grid = plan.schedule.placement, plan.grid
        self._control, self._sizes = control, sizes
        self._own = grid.number(grid.rank)
        self.is_first = self._own == grid.number(placement[0][0], pipeline=0)
        self._senders: dict[int, list[int]] = {}  # by number, the stages whose norms it sends
        for stage, held in enumerate(placement):
            self._senders.setdefault(grid.number(held[0]), []).append(stage)
        # A rank without stages has no step to receive them at.
        self._receivers = [*map(grid.number, sorted({rank for held in placement for rank in held}))]

    def gather(self, own: Norms) -> Norms:
        """The norms of all stages, of those of the stages here."""
        sizes = {n: sum(self._sizes[s] for s in stages) for n, stages in self._senders.items()}
        # Who has no gradients sends nothing: an empty message is none.
        exchange = self._control.expect({n: size for n, size in sizes.items() if size}, NORM_TAG)
        sent = [norm for stage in self._senders.get(self._own, ()) for norm in own[stage]]
        if sent:
            exchange.give(torch.tensor(sent, dtype=torch.float64), self._receivers)
        received = iter(exchange.result())
        found: Norms = {}
        for number, stages in self._senders.items():
            norms = iter(next(received).tolist() if sizes[number] else ())
            found.update({s: list(islice(norms, self._sizes[s])) for s in stages})
        return found


class Clipping:
    """Scales all gradients so that their norm is at most `max_norm`.

    `parameters` are those of the stages here; `skipped` those of them whose gradient counts
    elsewhere. The total is taken in `dtype`, of the norms that the `exchange` gives.
    """

    def __init__(
        self,
        max_norm: float,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        skipped: set[nn.Parameter],
        exchange: NormExchange,
        dtype: torch.dtype,
    ) -> None:
        self._max_norm = max_norm
        self._parameters = parameters
        self._skipped = skipped
        self._exchange = exchange
        self._dtype = dtype
        self._warns = exchange.is_first  # one process is enough
        self.norm: float | None = None

    def clip(self) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model, whose order of sums it keeps."""
        for parameters in self._parameters.values():
            for parameter in parameters:
                refuse_sparse(parameter, "clipped")
        own = {
            stage: _norms([p.grad for p in parameters if p not in self._skipped])
            for stage, parameters in self._parameters.items()
        }
        everyone = self._exchange.gather(own)
        norms = [norm for stage in sorted(everyone) for norm in everyone[stage] if norm != -1]
        total = torch.linalg.vector_norm(torch.tensor(norms or [0.0], dtype=self._dtype))
        for parameters in self._parameters.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)
        self.norm = float(total)
        if not math.isfinite(self.norm) and self._warns:
            self._warns = False  # once
            infinite = [s for s in sorted(everyone) if not all(map(math.isfinite, everyone[s]))]
            logger.warning(
                "clip_grad_norm: the norm of the gradients is %s%s; they are applied all the same, "
                "and no later step is said to be so",
                self.norm,
                f", by those of stage {', '.join(map(str, infinite))}" if infinite else "",
            )


def _norms(grads: Sequence[Tensor | None]) -> list[float]:
    there = [torch.linalg.vector_norm(grad) for grad in grads if grad is not None]
    found = iter(torch.stack(there).tolist() if there else ())  # one wait for a GPU
    return [-1.0 if grad is None else next(found) for grad in grads]
