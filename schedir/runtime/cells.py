"""What one (stage, microbatch) holds between its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from schedir.runtime.boundary import NOTHING, Boundary
from schedir.runtime.calls import Call
from schedir.runtime.split import WeightPart
from schedir.runtime.transport import Work


@attrs.frozen
class Wiring:
    """What is agreed of one (stage, microbatch): its boundaries, and where gradients flow.

    `before` is empty for the first stage, `after` for the last. `grads_in` says for each tensor
    of `after` whether a gradient comes back, `grads_out` for each of `before` whether one is sent;
    None where only the run can tell, so that a mask travels beside the gradients. `mutates` says
    which inputs the module changes in place (for the first stage: its tensors in turn), `call` how
    it takes them.
    """

    before: Boundary = NOTHING
    after: Boundary = NOTHING
    grads_in: tuple[bool, ...] | None = ()
    grads_out: tuple[bool, ...] | None = ()
    mutates: tuple[bool, ...] = ()
    call: Call = attrs.field(factory=Call)

    def largest(self) -> int:
        """The bytes of the larger boundary: what one receive takes at most."""
        return max(self.before.nbytes, self.after.nbytes)


@attrs.define(eq=False)
class Cell:
    """The tensors of one (stage, microbatch), from its first action to its last.

    Receives fill `inputs` and `output_grads` with buffers and leave their works beside them, and
    the compute action that consumes them waits, for those only: a receive may be posted long
    before, and waiting for more than the list says could deadlock what was proved clean.
    """

    stage: int
    microbatch: int
    draw: int  # the microbatch's number over all pipelines, which seeds its random numbers
    wiring: Wiring = Wiring()
    batch: Any = None  # the first stage's microbatch
    extra: Any = None  # what the stage is given beside its input
    target: Any = None  # the last stage's, with what its loss takes beside it
    loss_keywords: Mapping[str, Any] = attrs.field(factory=dict)
    weight: float = 1.0
    inputs: tuple[Tensor, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    result: Any = None  # the last stage's output, where it is asked for
    loss: Tensor | None = None
    weight_part: WeightPart | None = None  # what I has left to W
    statistics: Sequence[Tensor | None] = ()  # the buffers before a forward that is run again
    output_grads: tuple[Tensor | None, ...] = ()
    header: Tensor | None = None  # beside the inputs: the agreement that they were sent under
    mask: Tensor | None = None  # which of `output_grads` are there, once they have come
    input_grads: tuple[Tensor | None, ...] = ()
    inputs_coming: list[Work] = attrs.field(factory=list)
    grads_coming: list[Work] = attrs.field(factory=list)
    outputs_going: list[Work] = attrs.field(factory=list)
    grads_going: list[Work] = attrs.field(factory=list)
    # The local cells of the neighbouring stages, None where they are on another rank.
    previous: Cell | None = None
    following: Cell | None = None

    def withdraw(self) -> None:
        """Forget what was received too early."""
        self.inputs = self.output_grads = ()
        self.header = self.mask = None

    def clear(self) -> None:
        """Forget all tensors."""
        self.batch = self.extra = self.target = self.result = self.loss = None
        self.header = self.mask = None
        self.loss_keywords = {}
        self.weight_part = None
        self.inputs = self.leaves = self.outputs = self.statistics = ()
        self.output_grads = self.input_grads = ()

    def drop(self) -> None:
        """Forget all works, done or not."""
        for works in (self.inputs_coming, self.grads_coming, self.outputs_going, self.grads_going):
            works.clear()


def wait(works: list[Work]) -> None:
    """Wait for each of the works, and forget them: gloo lets a work be waited for once only."""
    for work in works:
        work.wait()
    works.clear()
