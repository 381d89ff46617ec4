"""What one (stage, microbatch) holds between its actions."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from schedir.runtime.shapes import Boundary
from schedir.runtime.transport import Work


@attrs.frozen
class Wiring:
    """What is agreed of one (stage, microbatch): its boundaries, and where gradients flow.

    `before` is empty for the first stage, `after` for the last. `grads_in` says for each tensor
    of `after` whether a gradient comes back, `grads_out` for each of `before` whether one is sent.
    `mutates` says which inputs the module changes in place.
    """

    before: Boundary = ()
    after: Boundary = ()
    grads_in: tuple[bool, ...] = ()
    grads_out: tuple[bool, ...] = ()
    mutates: tuple[bool, ...] = ()


@attrs.define(eq=False)
class Cell:
    """The tensors of one (stage, microbatch), from its first action to its last.

    Receives fill `inputs` and `output_grads` with buffers and leave their works beside them; the
    compute action that consumes them waits.
    """

    stage: int
    microbatch: int
    wiring: Wiring = Wiring()
    batch: Any = None  # the first stage's microbatch
    target: Any = None  # the last stage's
    weight: float = 1.0
    inputs: tuple[Tensor, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    output_grads: tuple[Tensor | None, ...] = ()
    input_grads: tuple[Tensor | None, ...] = ()
    arriving: list[Work] = attrs.field(factory=list)
    sending: list[Work] = attrs.field(factory=list)
    # The local cells of the neighbouring stages, None where they are on another rank.
    previous: Cell | None = None
    following: Cell | None = None

    def arrived(self) -> None:
        """Wait for the receives that were posted for this cell."""
        for work in self.arriving:
            work.wait()
        self.arriving.clear()

    def sent(self) -> None:
        """Wait for the sends of this cell's tensors."""
        for work in self.sending:
            work.wait()
        self.sending.clear()

    def clear(self) -> None:
        """Forget all tensors."""
        self.batch = self.target = self.loss = None
        self.inputs = self.leaves = self.outputs = ()
        self.output_grads = self.input_grads = ()
