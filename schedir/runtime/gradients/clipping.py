"""Clipping by the norm of the gradients of all stages, on all ranks alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from schedir.runtime.accelerator import Accelerator
from schedir.runtime.gradients.norms import Grads, Norms, NormSource
from schedir.runtime.gradients.reduction import refuse_sparse
from schedir.runtime.late import Late, Unread

logger = logging.getLogger("schedir")


class Clipping:
    """Scales all gradients so that their norm is at most `max_norm`.

    `parameters` are those of the stages here; `skipped` those of them whose gradient counts
    elsewhere. `source` gives the norms of all stages.
    """

    def __init__(
        self,
        max_norm: float,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        skipped: set[nn.Parameter],
        source: NormSource,
        accelerator: Accelerator,
    ) -> None:
        self._max_norm = max_norm
        self._parameters = parameters
        self._skipped = skipped
        self._source = source
        self._accelerator = accelerator
        self._warns = source.is_first  # one process is enough
        self._unread = Unread()
        self.norm: Callable[[], float] | None = None

    def clip(self) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model, whose order of sums it keeps."""
        for parameters in self._parameters.values():
            for parameter in parameters:
                refuse_sparse(parameter, "clipped")
        own: Grads = {
            stage: [p.grad for p in parameters if p not in self._skipped]
            for stage, parameters in self._parameters.items()
        }
        norms = self._source.gather(own)
        total = torch.linalg.vector_norm(norms.values)
        for parameters in self._parameters.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)
        self._leave(norms, total)

    def _leave(self, norms: Norms, total: Tensor) -> None:
        """The norm is there, or on its way."""

        def read(copied: Tensor) -> float:
            each: list[float]
            whole: float
            *each, whole = copied.tolist()
            if not math.isfinite(whole) and self._warns:
                self._warn(whole, norms.infinite(each))
            return whole

        found = torch.cat([norms.values, total.reshape(1)])
        if self._accelerator.queues:
            late = Late(self._accelerator, found, read)
            self._unread.add(late)
            self.norm = late
        else:
            norm = read(found)
            self.norm = lambda: norm

    def _warn(self, norm: float, infinite: Sequence[int]) -> None:
        self._warns = False  # once
        logger.warning(
            "clip_grad_norm: the norm of the gradients is %s%s; they are applied all the same, "
            "and no later step is said to be so",
            norm,
            f", by those of stage {', '.join(map(str, infinite))}" if infinite else "",
        )

    def look(self, wait: bool = False) -> None:
        """Look at the norms that nobody has asked for, as far as they are there, or at all."""
        self._unread.look(wait)
