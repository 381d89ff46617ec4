"""SEND and RECV as bound calls: at known boundaries, and at described ones.

Of a known input signature both sides know what is posted. If some microbatches lack gradients that
others have, a mask goes first, from host to host, and zeros are sent in place of missing gradients.

Boundaries are described in the first call of an input signature, which learns what later calls rely
on, and in every call where the user has marked them. Their payloads travel with their description:

    sender      SEND      posts the description and the bytes behind it
    receiver    RECV      posts a receive, for the next message of that rank
                compute   takes its input when its turn comes, and keeps messages that came before
                          from the same rank for later

So an action waits only for the rank that makes its input, in any list. How long a message is, only
the sender knows. So its first part is as long as the longest message over the same boundary in the
call before, at first 4 KiB, and the rest follows, if there is one:

    call 7    first part, 4,096 bytes     rest
    call 8    first part, 9,812 bytes: all of it

Messages go from host to host, under tags of their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.ir import Kind
from schedir.runtime.arguments import DESCRIBED
from schedir.runtime.boundary import Grads, TensorMeta, empty, payload
from schedir.runtime.call import Now
from schedir.runtime.processes.control import packed, unpacked
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.program.instruction import Bound
from schedir.runtime.stage.stage import Cell
from schedir.runtime.transports import Poster, Work


def waiting(receives: list[Work], arrived: Sequence[list[Work]]) -> Bound:
    """Wait for receives, and then for the sends that have `arrived` by then, which frees their
    tensors. With gloo, a work can be waited for only once."""
    every = (receives, *arrived)

    def wait() -> None:
        try:
            for works in every:
                for work in works:
                    work.wait()
                works.clear()
        except RuntimeError as error:
            raise WaitError(error) from error

    return wait


@attrs.frozen
class Link:
    """What a rank posts payloads by, and what goes from host to host `beside` them. `make` makes a
    buffer to receive a tensor into, from a shape, a stride and a `dtype`."""

    poster: Poster
    beside: Poster
    make: Callable[..., Tensor]


def _send(tensor: Tensor, meta: TensorMeta, link: Link, peer: int) -> Work:
    """Post a send of a tensor in the agreed layout."""
    if not meta.is_plain or not tensor.is_contiguous() or tensor.is_neg():
        tensor = payload(tensor, meta)
    return link.poster.send(tensor, peer)


def _receive(meta: TensorMeta, link: Link, peer: int, works: list[Work]) -> Tensor:
    """Post a receive into a new buffer."""
    buffer: Tensor = link.make(meta.shape, meta.stride, dtype=meta.dtype)
    works.append(link.poster.receive(buffer if meta.is_plain else payload(buffer, meta), peer))
    return buffer


def send_activations(cell: Cell, link: Link, peer: int) -> Bound:
    """SEND_ACT: post the cell's outputs."""
    post, metas = cell.output_sends.append, cell.learned.after.metas

    def call() -> None:
        for tensor, meta in zip(cell.outputs_to_send, metas, strict=True):
            post(_send(tensor, meta, link, peer))
        cell.outputs_to_send = ()

    return call


def send_gradients(cell: Cell, link: Link, peer: int) -> Bound:
    """SEND_GRAD: post the gradients of the cell's inputs, and their mask beside them."""
    post, masked = cell.grad_sends.append, cell.learned.grads_out.masked
    expected = cell.learned.grads_out.metas
    absent = [meta is None for meta in expected]

    def call() -> None:
        grads, cell.input_grads = cell.input_grads, ()
        if masked:
            present = [grad is not None for grad in grads]
            post(link.beside.send(torch.tensor(present, device="cpu"), peer))
        elif [grad is None for grad in grads] != absent:
            raise _differs(grads, expected, cell.stage)
        for grad, meta in zip(grads, expected, strict=True):
            if meta is not None:
                if grad is None:
                    grad = link.make(meta.shape, meta.stride, dtype=meta.dtype).zero_()
                post(_send(grad, meta, link, peer))

    return call


def receive_activations(cell: Cell, link: Link, peer: int) -> Bound:
    """RECV_ACT: post buffers for the cell's inputs, which a backward can stop at."""
    works, metas = cell.input_receives, cell.learned.before.metas

    def call() -> None:
        cell.leaves = tuple(
            [_receive(m, link, peer, works).requires_grad_(m.requires_grad) for m in metas]
        )

    return call


def receive_gradients(cell: Cell, link: Link, peer: int) -> Bound:
    """RECV_GRAD: post buffers for the gradients of the cell's outputs, and for their mask."""
    works, masked = cell.grad_receives, cell.learned.grads_in.masked
    expected = cell.learned.grads_in.metas

    def call() -> None:
        if masked:
            cell.mask = torch.empty(len(expected), dtype=torch.bool, device="cpu")
            works.append(link.beside.receive(cell.mask, peer))
        cell.output_grads = tuple(
            [None if meta is None else _receive(meta, link, peer, works) for meta in expected]
        )

    return call


def _differs(grads: Sequence[Tensor | None], expected: Grads, stage: int) -> ExecutionError:
    """The error for gradients that differ from those of the first call."""
    return ExecutionError(
        f"gradients of the stage's inputs: {_yes_no(expected)} in the first call of this input "
        f"shape, but {_yes_no(grads)} now; if that depends on data, pass "
        f"boundaries={{{stage - 1}: {DESCRIBED!r}}}; if you have frozen or thawed parameters, make "
        "a new Executor"
    )


def _yes_no(of: Sequence[object]) -> str:
    return f"({', '.join('no' if each is None else 'yes' for each in of)})"


def describe_activations(cell: Cell, messenger: Messenger, peer: int) -> Bound:
    """SEND_ACT: sends the cell's outputs with their description."""
    key = "inputs", cell.stage + 1, cell.microbatch

    def call() -> None:
        learned = cell.learned
        beside = learned.after, learned.aliases_after
        message = Message(beside, learned.after.metas, cell.outputs_to_send)
        cell.outputs_to_send = ()
        cell.output_sends.extend(messenger.send(key, message, peer))

    return call


def describe_gradients(cell: Cell, messenger: Messenger, peer: int) -> Bound:
    """SEND_GRAD: sends the gradients of the cell's inputs that there are, and says which."""
    key = "gradients", cell.stage - 1, cell.microbatch

    def call() -> None:
        learned, grads, cell.input_grads = cell.learned, cell.input_grads, ()
        goes = learned.grads_out
        # Across a declared boundary, and before it, which there are may always differ.
        goes.masked = learned.before.declared or learned.after.declared
        message = Message(
            (goes.metas, goes.masked),
            [meta for meta in goes.metas if meta is not None],
            tuple([grad for grad in grads if grad is not None]),
        )
        cell.grad_sends.extend(messenger.send(key, message, peer))

    return call


def take_activations(cell: Cell, messenger: Messenger, peer: int) -> Bound:
    """RECV_ACT: expects a message; the forward takes the cell's inputs when it is their turn."""

    def put(message: Message) -> None:
        cell.learned.before, cell.learned.aliases = message.beside
        described = zip(message.tensors, message.metas, strict=True)
        cell.leaves = tuple([x.requires_grad_(meta.requires_grad) for x, meta in described])

    key = "inputs", cell.stage, cell.microbatch
    return lambda: cell.input_receives.append(messenger.expect(key, peer, put))


def take_gradients(cell: Cell, messenger: Messenger, peer: int) -> Bound:
    """RECV_GRAD: expects a message; the backward takes the gradients of the cell's outputs."""

    def put(message: Message) -> None:
        comes, coming = cell.learned.grads_in, iter(message.tensors)
        comes.metas, comes.masked = message.beside
        cell.output_grads = tuple([None if meta is None else next(coming) for meta in comes.metas])

    key = "gradients", cell.stage, cell.microbatch
    return lambda: cell.grad_receives.append(messenger.expect(key, peer, put))


TRANSFERS: Mapping[
    Kind,
    tuple[Callable[[Cell, Messenger, int], Bound], Callable[[Cell, Link, int], Bound]],
] = {
    Kind.SEND_ACT: (describe_activations, send_activations),
    Kind.RECV_ACT: (take_activations, receive_activations),
    Kind.SEND_GRAD: (describe_gradients, send_gradients),
    Kind.RECV_GRAD: (take_gradients, receive_gradients),
}
"""What sends or receives at a described boundary, and at a known one."""


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
_FIRST = 1 << 12  # bytes


@attrs.define(eq=False)
class _Room:
    """One end of the messages of a kind and stage.

    In the current call the first part of each has `room` for the `longest` one of the call before.
    The last one was `described` so. Both ends know the same.
    """

    call: int = -1
    room: int = _FIRST
    longest: int = _FIRST
    described: tuple[Any, Sequence[TensorMeta]] | None = None


@attrs.frozen(eq=False)
class _Coming:
    """A message that is taken, and put where it is used, when somebody waits for it."""

    messenger: Messenger
    place: _Place
    put: Callable[[Message], None]

    def wait(self) -> bool:
        """Wait until it has come."""
        self.put(self.messenger.take(self.place))
        return True


@attrs.frozen(eq=False)
class Messenger:
    """Sends and takes the messages of one rank: lengths, the description and the bytes.

    Each message is taken once, by its place. A description that is as the one before is left out.
    What does not fit into the room of the receive that is posted for it follows by `rests`. Raises
    RuntimeError if a message can't come any more.
    """

    _poster: Poster
    _rests: Poster
    _device: torch.device
    _now: Now
    _rooms: dict[Hashable, _Room] = attrs.field(factory=lambda: defaultdict(_Room))
    _posted: dict[int, deque[tuple[_Place, Work, Tensor, _Room]]] = attrs.field(
        factory=lambda: defaultdict(deque)
    )
    _early: dict[_Place, Message] = attrs.field(factory=dict)

    def _room(self, *place: Hashable) -> _Room:
        """The room of a message of the current call, which comes next there."""
        room, call = self._rooms[place], self._now.call.number
        if call != room.call:
            room.call, room.room, room.longest = call, room.longest, _LENGTHS
        return room

    def send(self, key: Key, message: Message, peer: int) -> list[Work]:
        """Post a message of the current call; its tensors may be changed afterwards."""
        room, described = self._room("to", peer, key[:2]), (message.beside, message.metas)
        parts = [
            _bytes_of(payload(tensor, meta)).cpu().numpy()
            for tensor, meta in zip(message.tensors, message.metas, strict=True)
        ]
        head = 0
        if described != room.described:
            parts.insert(0, packed(described).numpy())
            head, room.described = len(parts[0]), described
        size = _LENGTHS + sum(map(len, parts))
        room.longest = max(room.longest, size)
        content = bytearray(max(size, room.room))
        _FORMAT.pack_into(content, 0, head, size)
        end = _LENGTHS
        for part in parts:
            begin, end = end, end + len(part)
            content[begin:end] = part.data
        whole = torch.frombuffer(content, dtype=torch.uint8)
        if size <= room.room:
            return [self._poster.send(whole, peer)]
        first, rest = whole[: room.room], whole[room.room :]
        return [self._poster.send(first, peer), self._rests.send(rest, peer)]

    def expect(self, key: Key, peer: int, put: Callable[[Message], None]) -> Work:
        """Post a receive for the first part of the next message from a peer, of this key; waiting
        for the result takes that message, and puts it where it is used."""
        room = self._room("from", peer, key[:2])
        first = torch.empty(room.room, dtype=torch.uint8, device="cpu")
        place = peer, room.call, key
        self._posted[peer].append((place, self._poster.receive(first, peer), first, room))
        return _Coming(self, place, put)

    def take(self, place: _Place) -> Message:
        """Take the message of a place, once it has come."""
        peer, *_ = place
        while place not in self._early:
            came, work, whole, room = self._posted[peer].popleft()
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
            self._early[came] = Message(beside, metas, tuple(tensors))
        return self._early.pop(place)

    def drop(self) -> None:
        """Forget the messages of a call that failed."""
        self._early.clear()
        self._posted.clear()
        self._rooms.clear()


def _bytes_of(content: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return content.detach().reshape(-1).view(torch.uint8)
