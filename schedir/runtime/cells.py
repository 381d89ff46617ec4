"""What one (stage, microbatch) holds between its actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import attrs
from torch import Tensor

from schedir.ir import Schedule
from schedir.runtime.boundary import NOTHING, Boundary, Grads
from schedir.runtime.calls import Call
from schedir.runtime.failure import WaitError
from schedir.runtime.memory import Aliases
from schedir.runtime.split import WeightPart
from schedir.runtime.standin import State
from schedir.runtime.statistics import Kept
from schedir.runtime.transport import Work


@attrs.frozen
class Wiring:
    """What is agreed of one (stage, microbatch): its boundaries, and where gradients flow.

    `before` is empty for the first stage, `after` for the last. `grads_in` says for each tensor
    of `after` which gradient comes back, `grads_out` for each of `before` which one is sent;
    None where only the run can tell, so that a mask travels beside the gradients. `flows` is the
    latter in short: whether there is one.

    `turned` are the numbers of the inputs whose gradients may lie otherwise in memory than they do:
    autograd would turn these round, and kernels round differently then.

    `call` says how the module takes its input. `mutates` says which inputs it changes in place (for
    the first stage: its tensors in turn), `mutates_extra` and `mutates_target` whether it, or the
    loss, does that to the other arguments. `copied` are the numbers of the outputs that somebody
    may change later; `watched` says which inputs must not be changed, where only the run can tell.
    `state` is what a forward leaves to the next one; None where that may be anything.
    """

    before: Boundary = NOTHING
    after: Boundary = NOTHING
    grads_in: Grads | None = ()
    grads_out: Grads | None = ()
    flows: list[bool] | None = attrs.field(init=False)
    turned: frozenset[int] = attrs.field(init=False)
    call: Call = attrs.field(factory=Call)
    mutates: tuple[bool, ...] = ()
    mutates_extra: bool = False
    mutates_target: bool = False
    copied: frozenset[int] = frozenset()
    watched: Aliases | None = None
    state: tuple[State, ...] | None = ()

    @flows.default
    def _flows(self) -> list[bool] | None:
        return None if self.grads_out is None else [grad is not None for grad in self.grads_out]

    @turned.default
    def _turned(self) -> frozenset[int]:
        pairs = zip(self.before.metas, self.grads_out or (), strict=False)
        return frozenset(
            number
            for number, (meta, grad) in enumerate(pairs)
            if grad is not None and not (meta.contiguous and grad.contiguous)
        )

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
    turned: dict[int, Tensor] = attrs.field(factory=dict)  # gradients of leaves as they came
    outputs: tuple[Tensor, ...] = ()
    handed: tuple[Tensor, ...] = ()  # the same for another rank
    result: Any = None  # the last stage's output, where it is asked for
    loss: Tensor | None = None
    weight_part: WeightPart | None = None  # what I has left to W
    statistics: Kept | None = None  # what the module held before a forward that is run again
    output_grads: tuple[Tensor | None, ...] = ()
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
        self.mask = None

    def clear(self) -> None:
        """Forget all tensors."""
        self.batch = self.extra = self.target = self.result = self.loss = None
        self.mask = None
        self.loss_keywords = {}
        self.weight_part = None
        self.inputs = self.leaves = self.outputs = self.handed = ()
        self.turned.clear()
        self.statistics = None
        self.output_grads = self.input_grads = ()

    def drop(self) -> None:
        """Forget all works, done or not."""
        for works in (self.inputs_coming, self.grads_coming, self.outputs_going, self.grads_going):
            works.clear()


Cells: TypeAlias = dict[tuple[int, int], Cell]
"""The cells of the stages here, by stage and microbatch."""


def cells_of(schedule: Schedule, local: Iterable[int], first_draw: int) -> Cells:
    """The cells of the stages here; the pipeline's first microbatch draws as `first_draw`."""
    cells = {
        (s, m): Cell(s, m, first_draw + m)
        for s in sorted(local)
        for m in range(schedule.microbatches)
    }
    rank = schedule.dataflow.runs
    for (stage, m), cell in cells.items():
        following = cells.get((stage + 1, m))
        if following is not None and rank[stage, m] == rank[stage + 1, m]:
            cell.following, following.previous = following, cell
    return cells


def wait(works: list[Work]) -> None:
    """Wait for each of the works, and forget them: gloo lets a work be waited for once only.

    Raises WaitError where one of them can't be done any more.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise WaitError(error) from error
    works.clear()
