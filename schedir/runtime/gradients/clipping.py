"""Clipping by the norm of the gradients of all stages, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from schedir.runtime.accelerator import Accelerator
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.norms import Grads, NormSource
from schedir.runtime.gradients.reduction import refuse_sparse
from schedir.runtime.late import Late


class Clipping:
    """Scales all gradients so that their norm is at most `max_norm`.

    `parameters` are those of the stages here; `skipped` those of them whose gradient counts
    elsewhere. `source` gives the norms of all stages, of which `nonfinite` accepts those that are
    finite.
    """

    def __init__(
        self,
        max_norm: float,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        skipped: set[nn.Parameter],
        source: NormSource,
        nonfinite: NonFinite,
        accelerator: Accelerator,
    ) -> None:
        self._max_norm = max_norm
        self._parameters = parameters
        self._skipped = skipped
        self._source = source
        self._nonfinite = nonfinite
        self._accelerator = accelerator
        self.norm: Callable[[], float] | None = None

    def clip(self) -> None:
        """As torch.nn.utils.clip_grad_norm_ over the whole model, whose order of sums it keeps."""
        for parameters in self._parameters.values():
            for parameter in parameters:
                refuse_sparse(parameter, "clipped")
        self._nonfinite.look_before_norms()
        own: Grads = {
            stage: [p.grad for p in parameters if p not in self._skipped]
            for stage, parameters in self._parameters.items()
        }
        norms = self._source.gather(own)
        total = torch.linalg.vector_norm(norms.values)
        self._leave(total)
        if self._nonfinite.accepts(norms, total):
            for parameters in self._parameters.values():
                torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)

    def _leave(self, total: Tensor) -> None:
        """The norm is there, or on its way."""
        if self._accelerator.queues:
            self.norm = Late(self._accelerator, total, lambda copied: float(copied.item()))
        else:
            norm = float(total.item())
            self.norm = lambda: norm
