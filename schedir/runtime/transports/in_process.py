"""Transfers within one process, whose ranks take turns."""

from __future__ import annotations

from collections import deque
from typing import ClassVar, TypeAlias

import attrs
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.transports.transport import Transport, Work

Channel: TypeAlias = tuple[int, int, int]
"""The sender, the receiver and the tag."""


@attrs.define(eq=False)
class End:
    """One end of a transfer within a process: its tensor.

    On a GPU `ready` is a mark on its rank's stream, and `copied` a mark after the copy.
    """

    tensor: Tensor
    ready: Mark | None = None
    copied: Mark | None = None

    def wait(self) -> bool:
        """Have the current stream wait; both ends have met."""
        if self.copied is not None:
            self.copied.wait()
        return True


class InProcessTransport:
    """Transfers between the ranks of one process: sends wait in a queue for their receives."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._sent: dict[Channel, deque[End]] = {}
        self._posted: dict[Channel, deque[End]] = {}

    def of(self, rank: int) -> Endpoint:
        """The transfers of one rank."""
        return Endpoint(self, rank, tag=0)

    def clear(self) -> None:
        """After a step that failed, drop the ends that have met no other end."""
        self._sent.clear()
        self._posted.clear()

    def post(self, channel: Channel, tensor: Tensor, sends: bool) -> Work:
        """Post one end; the j-th send of a channel meets its j-th receive."""
        end = End(tensor, self._now())
        own, other = (self._sent, self._posted) if sends else (self._posted, self._sent)
        waiting = other.get(channel)
        if not waiting:
            own.setdefault(channel, deque()).append(end)
            return end
        met = waiting.popleft()
        source, target = (end, met) if sends else (met, end)
        if (source.tensor.shape, source.tensor.dtype) != (target.tensor.shape, target.tensor.dtype):
            raise ExecutionError(
                f"rank {channel[0]} sends {source.tensor.dtype}{list(source.tensor.shape)}, but "
                f"rank {channel[1]} expects {target.tensor.dtype}{list(target.tensor.shape)}"
            )
        if met.ready is not None:
            met.ready.wait()
            if self._accelerator.makes(met.tensor):  # rather than the host, as a mask
                # The other rank's stream may free it before this one has come to the copy.
                self._accelerator.used(met.tensor)
        target.tensor.detach().copy_(source.tensor.detach())
        end.copied = met.copied = self._now()
        return end

    def _now(self) -> Mark | None:
        """A mark on the current stream, where there are streams."""
        return self._accelerator.mark() if self._accelerator.queues else None


@attrs.frozen
class Endpoint(Transport):
    """One rank's side of the transfers within a process."""

    channel: ClassVar[str] = "async"
    early: ClassVar[bool] = False
    queues: ClassVar[bool] = False  # the ranks take turns, and none waits for what has not come
    hub: InProcessTransport
    rank: int
    tag: int

    def tagged(self, tag: int) -> Endpoint:
        """The same for traffic under a tag."""
        return attrs.evolve(self, tag=tag)

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send."""
        return self.hub.post((self.rank, peer, self.tag), tensor, sends=True)

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        return self.hub.post((peer, self.rank, self.tag), buffer, sends=False)
