"""The small talk between ranks: schedules compared, shapes passed along, the loss handed round.

It has a gloo group of its own, on CUDA too, so that it never meets the pipeline's traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from schedir.errors import ExecutionError
from schedir.ir import Schedule

_STEP_TAG = 1
_LOSS_TAG = 2


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
    """The control group of the ranks of one executor."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._group = dist.new_group(backend="gloo")
        self._posted: list[_Posted] = []

    def compare(self, schedule: Schedule) -> None:
        """Raise ExecutionError, on every rank, unless all ranks hold the same schedule."""
        mine = (schedule.content_hash, schedule.name)
        # By hand, not as a collective: gloo's threads drop a collective's tensors some time after
        # it is done, and abort the process if Python is shutting down by then.
        if self._rank == 0:
            found = [mine, *(self.receive(rank) for rank in range(1, self._ranks))]
            for rank in range(1, self._ranks):
                self.send(found, rank)
        else:
            self.send(mine, 0)
            found = self.receive(0)
        differing = [rank for rank, (digest, _) in enumerate(found) if digest != found[0][0]]
        if differing:
            listed = ", ".join(
                f"rank {rank}: {name} {digest[:12]}" for rank, (digest, name) in enumerate(found)
            )
            raise ExecutionError(
                f"the ranks hold different schedules ({listed}); build it from the same target "
                "with the same parameters on every rank"
            )

    def send(self, value: object, rank: int) -> None:
        """Send any object; `receive` on the other side takes it."""
        dist.send_object_list([value], dst=rank, group=self._group)

    def receive(self, rank: int) -> Any:
        """Receive what `send` sends."""
        value: list[Any] = [None]
        dist.recv_object_list(value, src=rank, group=self._group)
        return value[0]

    def announce(self, source: int, number: int | None) -> int:
        """Give `number` from rank `source` to all ranks, once per step."""
        if number is not None:
            self._tell(torch.tensor([number]), _STEP_TAG)
            return number
        heard = torch.empty(1, dtype=torch.int64)
        self._group.recv([heard], source, _STEP_TAG).wait()
        return int(heard)

    def share_loss(self, source: int, loss: float | None) -> Callable[[], float]:
        """Send the loss from `source` on its way; the result waits for it when called."""
        if loss is not None:
            self._tell(torch.tensor([loss], dtype=torch.float64), _LOSS_TAG)
            return lambda: loss
        heard = torch.empty(1, dtype=torch.float64)
        posted = _Posted(self._group.recv([heard], source, _LOSS_TAG), heard)
        self._posted.append(posted)
        return lambda: float(posted.wait())

    def _tell(self, value: torch.Tensor, tag: int) -> None:
        for rank in range(self._ranks):
            if rank != self._rank:
                self._posted.append(_Posted(self._group.send([value], rank, tag), value))

    def settle(self) -> None:
        """Wait for what earlier steps have posted, so that nothing piles up."""
        for posted in self._posted:
            posted.wait()
        self._posted.clear()

    def close(self) -> None:
        """Give the process group back."""
        dist.destroy_process_group(self._group)
