"""One loader read by the rank of the first stage, and what it yields handed out to the others.

rank of the first stage      between             rank of the last stage
───────────────────────      ───────             ──────────────────────
reads inputs and target ──▶  None and None  ──▶  None and target         batch after batch
comes to the end        ──▶  is told        ──▶  is told
fails                   ──▶  fails as well  ──▶  fails as well
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.processes.failure import describe
from schedir.training.data.reading import Pair, Reader, Split


@attrs.frozen(eq=False)
class _Facts:
    """What others know of the loader: its length where it has one, its generators' state."""

    length: int | None
    drawn: list[Tensor]


@attrs.frozen(eq=False)
class _Failed:
    reason: str


class HandedOut:
    """Does what a Reader does, on every rank of a pipeline together; the loader counts where the
    first stage is.

    Raises ExecutionError on every rank where that one fails.
    """

    def __init__(
        self, executor: Executor, loader: Iterable[Any] | None, split: Split | None
    ) -> None:
        self._executor = executor
        placement = executor.schedule.placement
        self._ranks = executor.schedule.ranks
        self._reads_inputs, self._reads_target = placement[0], placement[-1]
        self._speaker = placement[0][0]
        self._reader: Reader | None = None

        def make() -> _Facts:
            self._reader = Reader(loader, split)
            return self._known()

        self._facts: _Facts = self._told(make)

    def __len__(self) -> int:
        if self._facts.length is None:
            raise TypeError("the loader of the first stage's rank has no length")
        return self._facts.length

    def drawn(self) -> list[Tensor]:
        """The state of the loader's own generators."""
        return self._facts.drawn if self._reader is None else self._reader.drawn()

    def begin(self) -> list[Tensor]:
        """What an epoch begins with."""
        self._facts = self._told(self._known)
        return self._facts.drawn

    def restore(self, drawn: Sequence[Tensor]) -> None:
        """Put the loader's own generators to where they were."""
        self._facts = attrs.evolve(self._facts, drawn=list(drawn))
        if self._reader is not None:
            self._reader.restore(drawn)

    def epoch(self, seed: int, epoch: int, after: int) -> Iterator[Pair]:
        """The pairs of an epoch but for the first ones, of which `after` are only read."""
        pairs = iter(()) if self._reader is None else self._reader.epoch(seed, epoch, after)
        while (found := self._told(lambda: next(pairs, None), self._share)) is not None:
            yield found
        self._facts = self._told(self._known)

    def _known(self) -> _Facts:
        assert self._reader is not None  # called where it reads
        try:
            length = len(self._reader)
        except TypeError:
            length = None
        return _Facts(length, self._reader.drawn())

    def _share(self, pair: Pair | None, rank: int) -> Pair | None:
        """What a rank gets of a pair; None is the end."""
        if pair is None:
            return None
        inputs, target = pair
        return (
            _compact(inputs) if rank in self._reads_inputs else None,
            _compact(target) if rank in self._reads_target else None,
        )

    def _told(
        self, make: Callable[[], Any], share: Callable[[Any, int], Any] = lambda found, _: found
    ) -> Any:
        """What the rank that reads makes: there itself, elsewhere what it shares of it."""
        if self._executor.rank != self._speaker:
            found = self._executor.hand_out()
            if isinstance(found, _Failed):
                raise ExecutionError(
                    f"rank {self._speaker}, which reads the batches, has failed: {found.reason}"
                )
            return found
        try:
            found = make()
            shares = [share(found, rank) for rank in range(self._ranks)]
        except Exception as error:
            self._executor.hand_out([_Failed(describe(error))] * self._ranks)
            raise
        self._executor.hand_out(shares)
        return found


def _compact(batch: Any) -> Any:
    """As it is sent: on the CPU, and without what else its storage holds."""

    def compact(tensor: Tensor) -> Tensor:
        held = tensor.detach().cpu()
        whole = held.untyped_storage().nbytes() == held.numel() * held.itemsize
        return held if whole else held.clone(memory_format=torch.contiguous_format)

    return pytree.tree_map_only(Tensor, compact, batch)
