"""The tensors that each (stage, microbatch) holds between its actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedir.runtime.boundary import Learned, Lessons
from schedir.runtime.feeding import Feed
from schedir.runtime.memory import Saved
from schedir.runtime.samples import Count
from schedir.runtime.stage.buffers import Kept
from schedir.runtime.stage.split_backward import WeightPart
from schedir.runtime.transports import Work


@attrs.define(eq=False)
class Cell:
    """The tensors of one (stage, microbatch), from its first action to its last.

    Receives fill `leaves` and `output_grads` with buffers and leave their works beside them. The
    compute action that consumes them waits for these works only: a receive may be posted long
    before, and waiting for more than the list says could deadlock a list that was proved clean.
    """

    stage: int
    microbatch: int
    learned: Learned
    batch: Any = None  # the first stage's microbatch
    extra: Any = None  # what the stage is given beside its input
    target: Any = None  # the last stage's, with what its loss takes beside it
    loss_keywords: Mapping[str, Any] = attrs.field(factory=dict)
    loss_share: Count = 1.0
    root_grad: tuple[Count, Tensor] | None = None  # a share, and the gradient that it is of a loss
    leaves: tuple[Tensor, ...] = ()  # the stage's input, where the backward stops
    computed_grads: dict[int, Tensor] = attrs.field(factory=dict)  # of leaves, in their own layout
    # What the backward starts from; of those that are sent the edges, since they go once they have
    # arrived.
    outputs: tuple[Tensor | GradientEdge | None, ...] = ()
    outputs_to_send: tuple[Tensor, ...] = ()
    result: Any = None  # the last stage's output, where it is asked for
    loss: float | Tensor | None = None  # a tensor on a device
    weight_part: WeightPart | None = None  # what I has left to W
    saved: Saved | None = None  # the forward's saved tensors, if they are offloaded
    kept: Kept | None = None  # what the module held before a forward that is run again
    output_grads: tuple[Tensor | None, ...] = ()
    mask: Tensor | None = None  # which of `output_grads` are there, on the host, once it is known
    input_grads: tuple[Tensor | None, ...] = ()
    input_receives: list[Work] = attrs.field(factory=list)
    grad_receives: list[Work] = attrs.field(factory=list)
    output_sends: list[Work] = attrs.field(factory=list)
    grad_sends: list[Work] = attrs.field(factory=list)
    # The local cells of the neighbouring stages, None where they are on another rank.
    previous: Cell | None = None
    following: Cell | None = None


class Cells:
    """The cells of the stages here, by stage and microbatch; a call's data goes into them.

    `lessons` has what is known of each cell; a first call fills it in. `runs` has the rank of each
    (stage, microbatch).
    """

    def __init__(self, lessons: Lessons, last: int, runs: Any) -> None:
        self.lessons = lessons
        self._cells = {place: Cell(*place, learned) for place, learned in lessons.items()}
        for (stage, m), cell in self._cells.items():
            following = self._cells.get((stage + 1, m))
            if following is not None and runs[stage, m] == runs[stage + 1, m]:
                cell.following, following.previous = following, cell
        self._first = [cell for cell in self if cell.stage == 0]
        self._last = [cell for cell in self if cell.stage == last]

    def __getitem__(self, place: tuple[int, int]) -> Cell:
        return self._cells[place]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def fill(self, feed: Feed) -> None:
        """Put a call's microbatches where they are used."""
        for cell in self._first:
            cell.batch = feed.inputs[cell.microbatch]
        if feed.targets:
            for cell in self._last:
                cell.target = feed.targets[cell.microbatch]
        if feed.loss_keywords:
            for cell in self._last:
                cell.loss_keywords = feed.loss_keywords[cell.microbatch]
        if feed.extras:
            for cell in self:
                if cell.stage in feed.extras:
                    cell.extra = feed.extras[cell.stage][cell.microbatch]

    def set_loss_shares(self, shares: Sequence[Count]) -> None:
        """Give the last stage's microbatches their shares of the loss."""
        for cell, share in zip(self._last, shares, strict=False):
            cell.loss_share = share

    def losses(self) -> list[float | Tensor | None]:
        """Those of the microbatches whose last stage ran here, by microbatch."""
        # By microbatch, not by order of arrival.
        return [cell.loss for cell in self._last]

    def results(self, number: int | None) -> list[Any] | None:
        """What the last stage has returned for the first `number` microbatches, None for all; None
        where it is not here."""
        return [cell.result for cell in self._last[:number]] if self._last else None

    def take_sends(self) -> list[Work]:
        """The sends that nobody has waited for, which are forgotten here."""
        found: list[Work] = []
        for cell in self._cells.values():
            for works in (cell.output_sends, cell.grad_sends):
                if works:
                    found += works
                    works.clear()
        return found

    def clear(self, feed: Feed) -> None:
        """Forget what a call has given, and its results."""
        for cell in self._first:
            cell.batch = None
        for cell in self._last:
            cell.target = cell.loss = cell.result = None
            cell.loss_keywords = {}
        if feed.extras:
            for cell in self:
                cell.extra = None

    def drop(self) -> None:
        """Forget all: a call has failed, and nobody uses these cells again."""
        for cell in self:
            for works in (
                *(cell.input_receives, cell.grad_receives),
                *(cell.output_sends, cell.grad_sends),
            ):
                works.clear()
            Cell.__init__(cell, cell.stage, cell.microbatch, cell.learned)
