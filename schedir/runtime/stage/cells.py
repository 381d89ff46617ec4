"""What each (stage, microbatch) holds between its actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Count
from schedir.runtime.boundaries.buffers import Pool
from schedir.runtime.boundaries.learned import Learned, Lessons
from schedir.runtime.stage.split_backward import WeightPart
from schedir.runtime.stage.statistics import Kept
from schedir.runtime.transports.transport import Work


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
    learned: Learned = attrs.field(factory=Learned)
    batch: Any = None  # the first stage's microbatch
    extra: Any = None  # what the stage is given beside its input
    target: Any = None  # the last stage's, with what its loss takes beside it
    loss_keywords: Mapping[str, Any] = attrs.field(factory=dict)
    loss_share: Count = 1.0
    inputs: tuple[Tensor, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    computed_grads: dict[int, Tensor] = attrs.field(factory=dict)  # of leaves, in their own layout
    # What the backward starts from; of those that are sent the edges, since they go once they have
    # arrived.
    outputs: tuple[Tensor | GradientEdge | None, ...] = ()
    outputs_to_send: tuple[Tensor, ...] = ()
    result: Any = None  # the last stage's output, where it is asked for
    loss: float | Tensor | None = None  # a tensor on a device
    weight_part: WeightPart | None = None  # what I has left to W
    statistics: Kept | None = None  # what the module held before a forward that is run again
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

    @property
    def works(self) -> tuple[list[Work], ...]:
        """All that is under way."""
        return self.input_receives, self.grad_receives, self.output_sends, self.grad_sends

    def drop_received(self) -> None:
        """Forget what was received for another call than this one."""
        self.inputs = self.output_grads = ()
        self.mask = None

    def clear(self) -> None:
        """Forget all tensors."""
        self.batch = self.extra = self.target = self.result = self.loss = None
        self.mask = None
        self.loss_keywords = {}
        self.weight_part = None
        self.inputs = self.leaves = self.outputs = self.outputs_to_send = ()
        self.computed_grads.clear()
        self.statistics = None
        self.output_grads = self.input_grads = ()


class Cells:
    """The cells of the stages here, by stage and microbatch; what a call gives goes into them.

    The pipeline's first microbatch draws random numbers as `first_draw`.
    """

    def __init__(
        self, schedule: Schedule, stages: Iterable[int], first_draw: int, accelerator: Accelerator
    ) -> None:
        self._accelerator = accelerator
        self._pools: dict[int, Pool] = {}
        self._last, self._microbatches = schedule.stages - 1, schedule.microbatches
        self._cells = {
            (s, m): Cell(s, m, first_draw + m) for s in sorted(stages) for m in self._all
        }
        rank = graph_of(schedule).runs
        for (stage, m), cell in self._cells.items():
            following = self._cells.get((stage + 1, m))
            if following is not None and rank[stage, m] == rank[stage + 1, m]:
                cell.following, following.previous = following, cell

    @property
    def _all(self) -> range:
        return range(self._microbatches)

    def __getitem__(self, place: tuple[int, int]) -> Cell:
        return self._cells[place]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return len(self._cells)

    def fill(self, feed: Feed) -> None:
        """Put a call's microbatches where they are used."""
        for (stage, m), cell in self._cells.items():
            if stage == 0:
                cell.batch = feed.inputs[m]
            cell.extra = feed.extra(stage, m)
            if stage == self._last:
                cell.target = feed.targets[m] if feed.targets else None
                cell.loss_keywords = feed.loss_keywords[m] if feed.loss_keywords else {}

    def share_loss(self, shares: Sequence[Count]) -> None:
        """Give the last stage's microbatches their shares of the loss."""
        for m, share in enumerate(shares):
            self._cells[self._last, m].loss_share = share

    def pool(self, rank: int) -> Pool | None:
        """What a rank sends from and receives into; None where new memory does as well."""
        if not self._accelerator.queues:
            return None
        return self._pools.setdefault(rank, Pool(self._accelerator.device))

    def trim_pools(self) -> None:
        """Another call begins, and what the one before has sent has arrived."""
        for pool in self._pools.values():
            pool.trim()

    def know(self, lessons: Lessons) -> None:
        """Put in what the first call of an input signature has learned."""
        for place, cell in self._cells.items():
            cell.learned = lessons[place]

    def learn(self) -> Lessons:
        """Put in what is to be learned by a call that begins now."""
        lessons = {place: Learned() for place in self._cells}
        self.know(lessons)
        return lessons

    def losses(self) -> list[float | Tensor | None]:
        """Those of the microbatches whose last stage ran here, by microbatch."""
        # By microbatch, not by order of arrival.
        return [self._cells[self._last, m].loss for m in self._all]

    def results(self, number: int | None) -> list[Any] | None:
        """What the last stage has returned for the first `number` microbatches, None for all; None
        where it is not here."""
        if (self._last, 0) not in self._cells:
            return None
        return [self._cells[self._last, m].result for m in self._all[:number]]

    def take_sends(self) -> Iterator[Work]:
        """The sends that nobody has waited for, which are forgotten here."""
        for cell in self._cells.values():
            yield from cell.output_sends
            yield from cell.grad_sends
            cell.output_sends.clear()
            cell.grad_sends.clear()

    def clear(self) -> None:
        """Forget all tensors: a call is over."""
        for cell in self._cells.values():
            cell.clear()

    def drop_works(self) -> None:
        """Forget all works, done or not, and what they have used: a call has failed."""
        self._pools.clear()
        for cell in self._cells.values():
            for works in cell.works:
                works.clear()
