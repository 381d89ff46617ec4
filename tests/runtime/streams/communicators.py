"""NCCL's transfers between the ranks of one process, on streams, as torch posts them.

Each rank has a communicator, and with it a stream, for each channel:

    rank 0      F0 ──┐                        a post: the channel's stream waits for the current one
      channel        └── send ┐
      channel           recv ◄┘ ──┐           a transfer: the receive comes after the send
    rank 1                        └── F0      a wait: the current stream waits for the channel's

The host waits for none of it. What it has posted is kept until it waits, and then freed by whoever
holds it last. A rank's turn ends where its data is not there yet; that orders nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import attrs
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from schedir.runtime.processes.groups import Post
from schedir.runtime.transports import Transport, Work
from tests.runtime.streams.clocks import FakeDevice, Mark, Stream, advance


@attrs.define(eq=False)
class Posted:
    """One end of a transfer; `done` once both have met."""

    device: FakeDevice
    stream: Stream
    tensor: Tensor | None
    posted: Mark
    done: Mark | None = None

    def wait(self) -> bool:
        """Have the current stream wait; what was posted need not be kept any more."""
        assert self.done is not None, "a stream would wait for what is not there yet"
        self.done.wait()
        self.tensor = None
        return True


@attrs.frozen(eq=False)
class Batch:
    """Ends of transfers that were posted as one: done once all of them are."""

    posted: Sequence[Work]

    def wait(self) -> bool:
        return all(posted.wait() for posted in self.posted)


class Communicators:
    """Those of all ranks, in place of the transport within a process."""

    def __init__(self, accelerator: FakeDevice) -> None:
        self._device = accelerator
        self._streams: dict[tuple[int, int, bool], Stream] = {}
        self._waiting: dict[tuple[int, int, bool], deque[Posted]] = {}
        self._kept: list[Posted] = []

    def of(self, rank: int) -> Communicator:
        return Communicator(self, rank)

    def clear(self) -> None:
        """Forget what has met no other end."""
        self._waiting.clear()

    def post(self, source: int, target: int, tensor: Tensor, sends: bool) -> Posted:
        """Post one end; the j-th send of a channel meets its j-th receive."""
        end = (source, target, sends)
        if end not in self._streams:
            self._streams[end] = self._device.stream()
        posted = Posted(self._device, self._streams[end], tensor, self._device.mark())
        self._kept.append(posted)  # with its tensor, if nobody waits for it
        other = self._waiting.get((source, target, not sends))
        if not other:
            self._waiting.setdefault(end, deque()).append(posted)
            return posted
        met = other.popleft()
        self._transfer(*((posted, met) if sends else (met, posted)))
        return posted

    def _transfer(self, send: Posted, receive: Posted) -> None:
        assert send.tensor is not None  # nobody has waited for it
        assert receive.tensor is not None
        device = self._device
        with device.on(send.stream):
            send.posted.wait()
            device.access([send.tensor], "send", writes=False)
            send.done = device.mark()
        with device.on(receive.stream):
            receive.posted.wait()
            advance(receive.stream.clock, send.stream.clock)
            device.access([receive.tensor], "recv", writes=True)
            receive.done = device.mark()
        with _disable_current_modes():  # it has been accounted for
            receive.tensor.detach().copy_(send.tensor)


@attrs.frozen
class Communicator(Transport):
    """One rank's side."""

    channel: ClassVar[str] = "rank"
    early: ClassVar[bool] = False
    queues: ClassVar[bool] = True
    hub: Communicators
    rank: int

    def send(self, tensor: Tensor, peer: int) -> Posted:
        return self.hub.post(self.rank, peer, tensor, sends=True)

    def receive(self, buffer: Tensor, peer: int) -> Posted:
        return self.hub.post(peer, self.rank, buffer, sends=False)

    def together(self, posts: Sequence[Post]) -> list[Work]:
        batch: Work = Batch(super().together(posts))
        return [batch] * len(posts)
