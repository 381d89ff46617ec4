"""The small talk between ranks: schedules compared, shapes passed along, the loss handed round.

It has a gloo group of its own, on CUDA too, so that it never meets the pipeline's traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.grid import Grid, new_group

_STEP_TAG = 1
LOSS_TAG = 2
COUNT_TAG = 3
NORM_TAG = 4


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


class Control:
    """The control group of the processes of one executor.

    Ranks are those of the schedule, in this process's own pipeline; *numbers* are the group's, over
    all pipelines.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._numbers = [grid.number(rank) for rank in range(grid.ranks)]
        self._own = grid.number(grid.rank)
        self._all = len(grid.everyone)
        self._group = new_group(grid.everyone)
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
        dist.send_object_list([value], group=self._group, group_dst=number)

    def _receive(self, number: int) -> Any:
        value: list[Any] = [None]
        dist.recv_object_list(value, group=self._group, group_src=number)
        return value[0]

    def announce(self, source: int, number: int | None) -> int:
        """Give `number` from rank `source` to all ranks of the pipeline, once per step."""
        if number is not None:
            self._tell(torch.tensor([number]), self._numbers, _STEP_TAG)
            return number
        heard = torch.empty(1, dtype=torch.int64)
        self._group.recv([heard], self._numbers[source], _STEP_TAG).wait()
        return int(heard)

    def exchange(
        self, own: Tensor | None, sizes: Mapping[int, int], listeners: Iterable[int], tag: int
    ) -> Callable[[], list[Tensor]]:
        """Send `own`, a vector of float64, on its way to the numbers `listeners`.

        The result waits for the vectors of the numbers in `sizes`, which says how long they are,
        and gives them in that order.
        """
        if own is not None:
            self._tell(own, listeners, tag)
        coming = {
            number: self._hear(size, number, tag)
            for number, size in sizes.items()
            if number != self._own
        }
        self._posted += coming.values()
        return lambda: [
            own if number == self._own and own is not None else coming[number].wait()
            for number in sizes
        ]

    def _tell(self, value: torch.Tensor, numbers: Iterable[int], tag: int) -> None:
        for number in numbers:
            if number != self._own:
                self._posted.append(_Posted(self._group.send([value], number, tag), value))

    def _hear(self, size: int, number: int, tag: int) -> _Posted:
        heard = torch.empty(size, dtype=torch.float64)
        return _Posted(self._group.recv([heard], number, tag), heard)

    def settle(self) -> None:
        """Wait for what earlier steps have posted, so that nothing piles up."""
        for posted in self._posted:
            posted.wait()
        self._posted.clear()

    def close(self) -> None:
        """Give the process group back."""
        dist.destroy_process_group(self._group)
