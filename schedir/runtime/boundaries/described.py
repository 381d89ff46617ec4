"""Payloads with a description: those of the first call of an input signature, and of the boundaries
that the user has marked.

    sender      SEND      posts the description and the bytes behind it
    receiver    RECV      posts a receive, for the next message of that rank
                compute   takes its input when its turn comes, and keeps messages that came before
                          from the same rank for later

So an action waits only for the rank that makes its input, in any list. How long a message is, only
the sender knows. So its first part is as long as the longest message over the same boundary in the
call before, and the rest follows, if there is one:

    call 7    first part, 16 bytes: the lengths    rest
    call 8    first part, 812 bytes: all of it

Messages go from host to host, under tags of their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from struct import Struct
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.runtime.boundaries.boundary import TensorMeta, empty, payload
from schedir.runtime.call import Now
from schedir.runtime.processes.control import packed, unpacked
from schedir.runtime.transports.transport import Poster, Work


@attrs.frozen(eq=False)
class Message:
    """A payload with its description: the tensors, their `metas`, and in `beside` whatever else the
    receiver has to know."""

    beside: Any
    metas: Sequence[TensorMeta]
    tensors: tuple[Tensor, ...]


DESCRIBED_TAGS = 4
"""So many of a transport's tags, the first ones, are for messages: two in training, two in
evaluation."""

Key: TypeAlias = tuple[str, int, int]
"""What a message is, and its stage and microbatch."""

_Place: TypeAlias = tuple[int, int, Key]  # whose message it is, and of which call
_FORMAT = Struct("=qq")  # the bytes of the description, and of the whole message
_LENGTHS = _FORMAT.size


@attrs.define(eq=False)
class _Room:
    """One end of the messages of a kind and stage.

    In the current call the first part of each has `room` for the `longest` one of the call before.
    The last one was `described` so. Both ends know the same.
    """

    call: int = -1
    room: int = _LENGTHS
    longest: int = _LENGTHS
    described: tuple[Any, Sequence[TensorMeta]] | None = None

    def begin(self, call: int) -> None:
        """A message of this call comes next."""
        if call != self.call:
            self.call, self.room, self.longest = call, self.longest, _LENGTHS


class Messenger:
    """Sends and takes the messages of one rank: lengths, the description and the bytes.

    Each message is taken once, by its key. A description that is as the one before is left out.
    What does not fit into the room of the receive that is posted for it follows by `rests`. Raises
    RuntimeError if a message can't come any more.
    """

    def __init__(self, poster: Poster, rests: Poster, device: torch.device, now: Now) -> None:
        self._poster, self._rests, self._device, self._now = poster, rests, device, now
        self._rooms: defaultdict[Hashable, _Room] = defaultdict(_Room)
        self._posted: defaultdict[int, deque[tuple[_Place, Work, Tensor, _Room]]]
        self._posted = defaultdict(deque)
        self._early: dict[_Place, Message] = {}

    def send(self, key: Key, message: Message, peer: int) -> list[Work]:
        """Post a message of the current call; its tensors may be changed afterwards."""
        room, described = self._rooms["to", peer, key[:2]], (message.beside, message.metas)
        room.begin(self._now.call.number)
        parts = [
            _bytes_of(payload(tensor, meta)).cpu().numpy()
            for tensor, meta in zip(message.tensors, message.metas, strict=True)
        ]
        if described != room.described:
            parts.insert(0, packed(described).numpy())
            room.described = described
        size = _LENGTHS + sum(map(len, parts))
        room.longest = max(room.longest, size)
        head = size - _LENGTHS - sum(meta.nbytes for meta in message.metas)
        content = bytearray(max(size, room.room))
        _FORMAT.pack_into(content, 0, head, size)
        begin = _LENGTHS
        for part in parts:
            content[begin : begin + len(part)] = part.data
            begin += len(part)
        whole = torch.frombuffer(content, dtype=torch.uint8)
        works = [self._poster.send(whole[: room.room], peer)]
        if size > room.room:
            works.append(self._rests.send(whole[room.room :], peer))
        return works

    def expect(self, key: Key, peer: int) -> None:
        """Post a receive for the first part of the next message from a peer, of this key."""
        call, room = self._now.call.number, self._rooms["from", peer, key[:2]]
        room.begin(call)
        first = torch.empty(room.room, dtype=torch.uint8, device="cpu")
        work = self._poster.receive(first, peer)
        self._posted[peer].append(((peer, call, key), work, first, room))

    def take(self, key: Key, peer: int) -> Message:
        """Take a message of a peer, once it has come."""
        wanted = peer, self._now.call.number, key
        while wanted not in self._early:
            place, work, whole, room = self._posted[peer].popleft()
            work.wait()
            head, size = _FORMAT.unpack_from(whole.numpy().data)
            room.longest = max(room.longest, size)
            if size > len(whole):
                rest = torch.empty(size - len(whole), dtype=torch.uint8, device="cpu")
                self._rests.receive(rest, peer).wait()
                whole = torch.cat([whole, rest])
            begin = _LENGTHS + head
            if head:
                room.described = unpacked(whole[_LENGTHS:begin])
            assert room.described is not None  # the first message has its description
            beside, metas = room.described
            tensors = []
            for meta in metas:
                tensors.append(empty(meta, self._device))
                content = _bytes_of(payload(tensors[-1], meta))
                content.copy_(whole[begin : begin + meta.nbytes])
                begin += meta.nbytes
            self._early[place] = Message(beside, metas, tuple(tensors))
        return self._early.pop(wanted)

    def drop(self) -> None:
        """Forget the messages of a call that failed."""
        self._early.clear()
        self._posted.clear()
        self._rooms.clear()


def _bytes_of(content: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return content.detach().reshape(-1).view(torch.uint8)
