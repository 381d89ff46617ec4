"""Payloads with a description, by which the first call of an input signature sends.

    sender      SEND      posts the description and the bytes behind it; nobody waits for the send
                          before the call has ended
    receiver    RECV      does nothing
                compute   takes its input when its turn comes, and keeps messages that came before
                          from the same rank for later

So in the first call an action waits only for the rank that makes its input, in any list. Messages
go beside the pipeline's traffic, from host to host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.boundaries.boundary import TensorMeta, empty, payload
from schedir.runtime.processes.control import packed, unpacked
from schedir.runtime.transports.transport import Poster, Work


@attrs.frozen(eq=False)
class Message:
    """A payload with its description: the tensors, their `metas`, and in `beside` whatever else the
    receiver has to know."""

    beside: Any
    metas: Sequence[TensorMeta]
    tensors: tuple[Tensor, ...]


class Messenger(Protocol):
    """Sends and takes the messages of one rank. Each message is taken once, by its key."""

    def send(self, key: Hashable, message: Message, peer: int) -> list[Work]:
        """Post a message; its tensors may be changed afterwards."""

    def has(self, key: Hashable, peer: int) -> bool:
        """Whether taking it would wait for nobody."""

    def take(self, key: Hashable, peer: int) -> Message:
        """Take a message of a peer, once it has come."""

    def drop(self) -> None:
        """Forget the messages of a call that failed."""


class Posted:
    """The messenger between processes: it sends a length, then the description and the bytes.

    Raises RuntimeError if a message can't come any more.
    """

    def __init__(self, poster: Poster, device: torch.device) -> None:
        self._poster, self._device = poster, device
        self._early: dict[tuple[int, Hashable], Message] = {}

    def send(self, key: Hashable, message: Message, peer: int) -> list[Work]:
        """Post a message."""
        head = packed((key, message.beside, message.metas))
        described = zip(message.tensors, message.metas, strict=True)
        parts = [_bytes_of(payload(tensor, meta)).cpu() for tensor, meta in described]
        body = torch.cat([head, *parts])
        lengths = torch.tensor([len(head), len(body)], device="cpu")
        return [self._poster.send(part, peer) for part in (lengths, body)]

    def has(self, key: Hashable, peer: int) -> bool:
        """Whether it has come already; another process is always waited for."""
        return True

    def take(self, key: Hashable, peer: int) -> Message:
        """Take a message of a peer, once it has come."""
        while (peer, key) not in self._early:
            lengths = torch.empty(2, dtype=torch.int64, device="cpu")
            self._poster.receive(lengths, peer).wait()
            head, whole = lengths.tolist()
            body = torch.empty(whole, dtype=torch.uint8, device="cpu")
            self._poster.receive(body, peer).wait()
            came, beside, metas = unpacked(body[:head])
            tensors, begin = [], head
            for meta in metas:
                tensors.append(empty(meta, self._device))
                content = _bytes_of(payload(tensors[-1], meta))
                content.copy_(body[begin : begin + meta.nbytes])
                begin += meta.nbytes
            self._early[peer, came] = Message(beside, metas, tuple(tensors))
        return self._early.pop((peer, key))

    def drop(self) -> None:
        """Forget the messages of a call that failed."""
        self._early.clear()


@attrs.frozen(eq=False)
class Sent:
    """A message of a rank of this process, with a mark on the stream that made it."""

    message: Message
    ready: Mark


class Within:
    """The messenger between the ranks of this process: a copy waits until it is taken."""

    def __init__(
        self, rank: int, sent: dict[tuple[int, int, Hashable], Sent], accelerator: Accelerator
    ) -> None:
        self._rank, self._sent, self._accelerator = rank, sent, accelerator

    def send(self, key: Hashable, message: Message, peer: int) -> list[Work]:
        """Keep a copy of a message for its receiver."""
        kept = attrs.evolve(message, tensors=_copies(message))
        self._sent[self._rank, peer, key] = Sent(kept, self._accelerator.mark())
        return []

    def has(self, key: Hashable, peer: int) -> bool:
        """Whether it has been sent."""
        return (peer, self._rank, key) in self._sent

    def take(self, key: Hashable, peer: int) -> Message:
        """Take a message of a peer, which has been sent."""
        sent = self._sent.pop((peer, self._rank, key))
        sent.ready.wait()
        for tensor in sent.message.tensors:
            self._accelerator.used(tensor)
        # In memory that this rank's own stream has made, as a received buffer is.
        return attrs.evolve(sent.message, tensors=_copies(sent.message))

    def drop(self) -> None:
        """Forget the messages of a call that failed."""
        self._sent.clear()


def _copies(message: Message) -> tuple[Tensor, ...]:
    described = zip(message.tensors, message.metas, strict=True)
    return tuple([empty(meta, tensor.device).copy_(tensor.detach()) for tensor, meta in described])


def _bytes_of(content: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return content.detach().reshape(-1).view(torch.uint8)
