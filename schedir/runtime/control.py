"""The small talk between ranks: schedules compared, shapes passed along, the loss handed round.

It has a gloo group of its own, on CUDA too, so that it never meets the pipeline's traffic.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.grid import Grid, Groups

_OBJECT_TAG = 0
_STEP_TAG = 1
LOSS_TAG = 2
COUNT_TAG = 3
NORM_TAG = 4
_ROOM_TAG = 5


class _Posted:
    """A message under way and its buffer. gloo lets a work be waited for once only."""

    def __init__(self, work: dist.Work, value: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._value = value

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._value


class Exchange:
    """Vectors that processes give each other; the receives are posted."""

    def __init__(self, control: Control, tag: int, coming: Sequence[_Posted | None]) -> None:
        self._control = control
        self._tag = tag
        self._coming = coming
        self._own: Tensor | None = None

    def give(self, own: Tensor, listeners: Iterable[int]) -> Exchange:
        """Send `own` on its way to these numbers."""
        self._own = own
        self._control.tell(own, listeners, self._tag)
        return self

    def result(self) -> list[Tensor]:
        """Wait for all that is expected, and give it in that order, one's own among it."""
        found = (self._own if posted is None else posted.wait() for posted in self._coming)
        return [vector for vector in found if vector is not None]


class Control:
    """The control group of the processes of one executor.

    Ranks are those of the schedule, in this process's own pipeline; *numbers* are the group's, over
    all pipelines.
    """

    def __init__(self, grid: Grid, groups: Groups) -> None:
        self._grid = grid
        self._numbers = [grid.number(rank) for rank in range(grid.ranks)]
        self._own = grid.number(grid.rank)
        self._all = len(grid.everyone)
        self._group = groups.make("control", grid.everyone)
        self._earlier: list[_Posted] = []  # by the steps before
        self._posted: list[_Posted] = []

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by number, on each of them."""
        # By hand, not as a collective: gloo's threads drop a collective's tensors some time after
        # it is done, and abort the process if Python is shutting down by then.
        if self._own:
            self._send(value, 0)
            found: list[Any] = self._receive(0)
            return found
        found = [value, *(self._receive(number) for number in range(1, self._all))]
        for number in range(1, self._all):
            self._send(found, number)
        return found

    def send(self, value: object, rank: int) -> None:
        """Send any object; `receive` on the other side takes it."""
        self._send(value, self._numbers[rank])

    def receive(self, rank: int) -> Any:
        """Receive what `send` sends."""
        return self._receive(self._numbers[rank])

    def _send(self, value: object, number: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        for part in (size, content):
            self._group.send([part], number, _OBJECT_TAG).wait()

    def _receive(self, number: int) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        self._group.recv([size], number, _OBJECT_TAG).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([content], number, _OBJECT_TAG).wait()
        return pickle.loads(content.numpy().tobytes())  # from a process of the same job

    def announce(self, source: int, number: int | None) -> int:
        """Give `number` from rank `source` to all ranks of the pipeline."""
        if source == self._grid.rank and number is not None:
            self.tell(torch.tensor([number]), self._numbers, _STEP_TAG)
            return number
        heard = torch.empty(1, dtype=torch.int64)
        self._group.recv([heard], self._numbers[source], _STEP_TAG).wait()
        return int(heard)

    def share(self, value: int) -> list[int]:
        """A number of each rank of this pipeline, by rank, on each of them."""
        exchange = self.expect(dict.fromkeys(self._numbers, 1), _ROOM_TAG)
        own = torch.tensor([value], dtype=torch.float64)
        return [int(heard) for heard in exchange.give(own, self._numbers).result()]

    def expect(self, sizes: Mapping[int, int], tag: int) -> Exchange:
        """Post receives of vectors of float64, from these numbers and of these sizes."""
        coming = {n: self._hear(size, n, tag) for n, size in sizes.items() if n != self._own}
        self._posted += coming.values()
        return Exchange(self, tag, [coming.get(number) for number in sizes])

    def tell(self, value: Tensor, numbers: Iterable[int], tag: int) -> None:
        """Send a vector on its way to these numbers."""
        for number in numbers:
            if number != self._own:
                self._posted.append(_Posted(self._group.send([value], number, tag), value))

    def _hear(self, size: int, number: int, tag: int) -> _Posted:
        heard = torch.empty(size, dtype=torch.float64)
        return _Posted(self._group.recv([heard], number, tag), heard)

    def settle(self) -> None:
        """Wait for what the steps before this one have posted, so that nothing piles up."""
        for posted in self._earlier:
            posted.wait()
        self._earlier, self._posted = self._posted, []
