"""What is agreed of one (stage, microbatch)."""

from __future__ import annotations

import sys
from collections.abc import Collection

import attrs

from schedir.runtime.boundaries.boundary import NOTHING, Boundary, Grads
from schedir.runtime.boundaries.calling import CallingConvention
from schedir.runtime.boundaries.memory import Aliases
from schedir.runtime.boundaries.standin import State

EVERY: Collection[int] = range(sys.maxsize)
"""The numbers of all tensors, however many there are."""


@attrs.frozen
class Wiring:
    """What is agreed of one (stage, microbatch): its boundaries, and where gradients flow.

    `before` is empty for the first stage, `after` for the last. `grads_in` says for each tensor
    of `after` which gradient comes back, `grads_out` for each of `before` which one is sent;
    None where only the run can tell, so that a mask travels beside the gradients. `flows` is the
    latter in short: whether there is one.

    `other_layout` are the numbers of the inputs whose gradients may lie otherwise in memory than
    they do: autograd would lay these out anew, and kernels round differently then.

    `convention` says how the module takes its input. `mutates` says which inputs it changes in
    place (for the first stage: its tensors in turn), `mutates_extra` and `mutates_target` whether
    it, or the loss, does that to the other arguments. `copied` are the numbers of the outputs that
    somebody may change later; `watched` says which inputs must not be changed, where only the run
    can tell. `state` is what a forward leaves to the next one; None where that may be anything.
    """

    before: Boundary = NOTHING
    after: Boundary = NOTHING
    grads_in: Grads | None = ()
    grads_out: Grads | None = ()
    flows: list[bool] | None = attrs.field(init=False)
    other_layout: frozenset[int] = attrs.field(init=False)
    convention: CallingConvention = attrs.field(factory=CallingConvention)
    mutates: tuple[bool, ...] = ()
    mutates_extra: bool = False
    mutates_target: bool = False
    copied: Collection[int] = frozenset()
    watched: Aliases | None = None
    state: tuple[State, ...] | None = ()

    @flows.default
    def _flows(self) -> list[bool] | None:
        return None if self.grads_out is None else [grad is not None for grad in self.grads_out]

    @other_layout.default
    def _other_layout(self) -> frozenset[int]:
        pairs = zip(self.before.metas, self.grads_out or (), strict=False)
        return frozenset(
            number
            for number, (meta, grad) in enumerate(pairs)
            if grad is not None and not (meta.contiguous and grad.contiguous)
        )

    def largest(self) -> int:
        """The bytes of the larger boundary: what one receive takes at most."""
        return max(self.before.nbytes, self.after.nbytes)


NOT_AGREED = Wiring()
"""Before the first agreement."""
