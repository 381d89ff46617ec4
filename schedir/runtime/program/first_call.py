"""The actions at described boundaries: at all boundaries in the first call of an input signature,
which learns what later calls rely on, and in every call at those that the user has marked.

They run on real values, as often as the list says. Payloads travel with their description, and
tensors that may be changed in place are copied first.

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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.runtime.arguments import Declared
from schedir.runtime.boundary import (
    TensorMeta,
    Watched,
    boundary_of,
    declared,
    empty,
    held_by,
    payload,
    run_on,
    spreads,
    tensors_of,
)
from schedir.runtime.call import Now
from schedir.runtime.memory import refuse_changes, sharing
from schedir.runtime.processes.control import packed, unpacked
from schedir.runtime.program.compute import forward_with, hand_back
from schedir.runtime.program.instruction import Bound
from schedir.runtime.stage.stage import Cell, Stage, arguments, copy_of
from schedir.runtime.transports import Poster, Work


@attrs.frozen(eq=False)
class FirstCall:
    """What the actions at described boundaries need: the messengers of the ranks here, and the
    boundaries that are `described` in every call, or that the user has `declared` instead, by the
    stage before."""

    messengers: Mapping[int, Messenger]
    described: Collection[int]
    declared: Mapping[int, Declared]


def first_forward(
    stage: Stage,
    cell: Cell,
    now: Now,
    trains: bool,
    replayed: bool,
    first: FirstCall,
    described: bool,
) -> Bound:
    """F: runs the module, and learns what it changes; what it returns, if the boundary after it is
    `described`."""

    def output(stage: Stage, cell: Cell, with_graph: bool) -> Any:
        learned = cell.learned
        learned.forget()
        given, extra = arguments(stage, cell, with_graph)
        inputs, beside = Watched(tensors_of(given)), Watched(tensors_of(extra))
        keeps = replayed or stage.weights.stashes
        own = Watched(stage.module.parameters() if keeps else ())
        learned.spread = spreads(stage.module, given, extra)
        made = run_on(stage.module, given, extra, learned.spread)
        changes = inputs.changed()
        learned.changes_inputs = tuple(changes) if stage.index else (any(changes),)
        learned.changes_extra = any(beside.changed())
        if any(own.changed()):
            raise ExecutionError(
                f"stage {stage.index} changes one of its parameters in place in its forward, but "
                "that runs again (recompute=), or on copies of older weight versions; make the "
                "parameter a buffer"
            )
        if stage.index:
            refuse_changes((n for n, there in enumerate(changes) if there), learned.aliases)
        passed, lent = inputs.tensors, beside.tensors
        if stage.index == 0:
            passed, lent = [], [*passed, *lent]
        learned.copied, aliases_after = sharing(
            tensors_of(made), passed, held_by([stage.module]), lent, learned.aliases
        )
        if stage.loss_fn is None and described:
            learned.aliases_after = aliases_after
            _describe(stage, cell, made, [*passed, *lent], first)
        return made

    def loss(stage: Stage, cell: Cell, output: Any) -> Tensor:
        target, keywords = copy_of(cell.target), copy_of(cell.loss_keywords)
        given = Watched(tensors_of((target, keywords)))
        found = stage.loss(cell, output, target, keywords)
        cell.learned.changes_target = any(given.changed())
        return found

    return forward_with(stage, cell, now, trains, replayed, output, loss, learns=True)


def _describe(
    stage: Stage, cell: Cell, output: Any, given: Sequence[Tensor], first: FirstCall
) -> None:
    """The stage's output, computed from its input."""
    learned = cell.learned
    if not learned.after.is_of(output):
        learned.after = boundary_of(output)
    example = first.declared.get(stage.index)
    if example is not None:
        tensors = (*stage.module.parameters(), *given)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        learned.after = declared(example, trained)
    if cell.following is not None:
        following = cell.following.learned
        following.before, following.aliases = learned.after, learned.aliases_after


def learn_gradients(cell: Cell, grads: tuple[Tensor | None, ...]) -> None:
    """Learn which gradients of the inputs there are, and how they lie in memory, and hand them
    back."""
    cell.learned.sends_back(grads)
    hand_back(cell, grads)


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


def describe_gradients(cell: Cell, messenger: Messenger, peer: int, first: FirstCall) -> Bound:
    """SEND_GRAD: sends the gradients of the cell's inputs that there are, and says which."""
    key = "gradients", cell.stage - 1, cell.microbatch

    def call() -> None:
        learned = cell.learned
        grads, cell.input_grads = cell.input_grads, ()
        # Across a declared boundary, and before it, which there are may always differ.
        learned.masked_out = learned.before.declared or cell.stage in first.declared
        message = Message(
            (learned.grads_out, learned.masked_out),
            [meta for meta in learned.grads_out if meta is not None],
            tuple([grad for grad in grads if grad is not None]),
        )
        cell.grad_sends.extend(messenger.send(key, message, peer))

    return call


@attrs.frozen(eq=False)
class _Coming:
    """A message that is taken when somebody waits for it."""

    messenger: Messenger
    key: tuple[str, int, int]
    peer: int
    put: Callable[[Message], None]

    def wait(self) -> bool:
        """Wait until it has come, and put it where it is used."""
        self.put(self.messenger.take(self.key, self.peer))
        return True


def take_activations(cell: Cell, messenger: Messenger, peer: int) -> Bound:
    """RECV_ACT: expects a message; the forward takes the cell's inputs when it is their turn."""

    def put(message: Message) -> None:
        cell.learned.before, cell.learned.aliases = message.beside
        described = zip(message.tensors, message.metas, strict=True)
        cell.leaves = tuple([x.requires_grad_(meta.requires_grad) for x, meta in described])

    key = "inputs", cell.stage, cell.microbatch
    return _expect(_Coming(messenger, key, peer, put), cell.input_receives)


def take_gradients(cell: Cell, messenger: Messenger, peer: int) -> Bound:
    """RECV_GRAD: expects a message; the backward takes the gradients of the cell's outputs."""

    def put(message: Message) -> None:
        learned = cell.learned
        learned.grads_in, learned.masked_in = message.beside
        coming = iter(message.tensors)
        cell.output_grads = tuple(
            [None if meta is None else next(coming) for meta in learned.grads_in]
        )

    key = "gradients", cell.stage, cell.microbatch
    return _expect(_Coming(messenger, key, peer, put), cell.grad_receives)


def _expect(coming: _Coming, receives: list[Work]) -> Bound:
    def call() -> None:
        coming.messenger.expect(coming.key, coming.peer)
        receives.append(coming)

    return call


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
        if size <= room.room:
            return [self._poster.send(whole, peer)]
        first, rest = whole[: room.room], whole[room.room :]
        return [self._poster.send(first, peer), self._rests.send(rest, peer)]

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
