"""SEND and RECV of a known input signature as bound calls: both sides know what is posted.

If some microbatches lack gradients that others have, a mask goes first, from host to host, and
zeros are sent in place of missing gradients. What one entry sends and receives is posted as one:

    (0SEND_ACT1;0RECV_GRAD0)    0SEND_ACT1, 0RECV_GRAD0, post    each says what it posts

On a GPU a transport has its own streams. Memory that it has used is given out again only when the
host has seen that stream pass, but the host may be a whole step ahead of the GPU, with all that is
sent and received in a step. A buffer of the pool is free as soon as its last use is *queued*: what
is posted next waits on the GPU for everything on the rank's stream by then.

    host          RECV0 → a   F0   B0   RECV1 → a   F1        a is free once B0 has been queued
    rank's stream             F0   B0 ──┐
    transport's   RECV0 → a             └── RECV1 → a         and is filled after it

A buffer is free when nothing refers to its memory: no cell, no graph, no send under way, and not
the module, which may keep its input, or a view of it. So a tensor that the module keeps is never
overwritten. If the module uses it on its own streams, the module has to wait for these.

A tensor to send is copied into a buffer first. So the output itself can be freed at once; otherwise
its memory would be held until the host has seen the send.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.runtime.arguments import DESCRIBED
from schedir.runtime.boundary import Grads, empty, payload
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Post
from schedir.runtime.program.instruction import Bound, Instruction
from schedir.runtime.stage.stage import Cell
from schedir.runtime.transports import BatchPoster, Poster, Work

Make = Callable[..., Tensor]
"""Makes a buffer to receive a tensor into, from a shape, a stride and a `dtype`."""


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


def send_activations(cell: Cell, poster: Poster, peer: int) -> Bound:
    """SEND_ACT: post the cell's outputs."""
    send, post, metas = poster.send, cell.output_sends.append, cell.learned.after.metas

    def call() -> None:
        for tensor, meta in zip(cell.outputs_to_send, metas, strict=True):
            if not meta.is_plain or not tensor.is_contiguous() or tensor.is_neg():
                tensor = payload(tensor, meta)
            post(send(tensor, peer))
        cell.outputs_to_send = ()

    return call


def send_gradients(
    cell: Cell, poster: Poster, beside: Poster, peer: int, device: torch.device
) -> Bound:
    """SEND_GRAD: post the gradients of the cell's inputs; the mask goes by `beside`."""
    send, post = poster.send, cell.grad_sends.append
    expected, masked = cell.learned.grads_out, cell.learned.masked_out

    def call() -> None:
        grads, cell.input_grads = cell.input_grads, ()
        if masked:
            present = [grad is not None for grad in grads]
            post(beside.send(torch.tensor(present, device="cpu"), peer))
        else:
            for grad, meta in zip(grads, expected, strict=True):
                if (grad is None) is not (meta is None):
                    raise _differs(grads, expected, cell.stage)
        for grad, meta in zip(grads, expected, strict=True):
            if meta is None:
                continue
            if grad is None:
                grad = empty(meta, device).zero_()
            if not meta.is_plain or not grad.is_contiguous() or grad.is_neg():
                grad = payload(grad, meta)
            post(send(grad, peer))

    return call


def receive_activations(cell: Cell, poster: Poster, peer: int, make: Make) -> Bound:
    """RECV_ACT: post buffers for the cell's inputs, which a backward can stop at."""
    receive, post, metas = poster.receive, cell.input_receives.append, cell.learned.before.metas

    def call() -> None:
        leaves = []
        for meta in metas:
            buffer = make(meta.shape, meta.stride, dtype=meta.dtype)
            post(receive(buffer if meta.is_plain else payload(buffer, meta), peer))
            leaves.append(buffer.requires_grad_(meta.requires_grad))
        cell.leaves = tuple(leaves)

    return call


def receive_gradients(cell: Cell, poster: Poster, beside: Poster, peer: int, make: Make) -> Bound:
    """RECV_GRAD: post buffers for the gradients of the cell's outputs, and for their mask."""
    receive, post = poster.receive, cell.grad_receives.append
    expected, masked = cell.learned.grads_in, cell.learned.masked_in

    def call() -> None:
        if masked:
            cell.mask = torch.empty(len(expected), dtype=torch.bool, device="cpu")
            post(beside.receive(cell.mask, peer))
        grads: list[Tensor | None] = []
        for meta in expected:
            buffer = None
            if meta is not None:
                buffer = make(meta.shape, meta.stride, dtype=meta.dtype)
                post(receive(buffer if meta.is_plain else payload(buffer, meta), peer))
            grads.append(buffer)
        cell.output_grads = tuple(grads)

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


@attrs.define(eq=False)
class _Part:
    """The work of one action, once its batch is posted; several may wait for it."""

    work: Work | None = None

    def wait(self) -> bool:
        """Wait until it is done."""
        if self.work is not None:
            work, self.work = self.work, None
            work.wait()
        return True


@attrs.frozen(eq=False)
class _Whole:
    """The works of a batch: a consumer of one of its receives waits for all."""

    parts: Sequence[_Part]

    def wait(self) -> bool:
        """Wait until all of it is done."""
        return all(part.wait() for part in self.parts)


class Batch:
    """Stands in for the transport, collects what the actions of an entry post, and posts it as
    one."""

    def __init__(self, poster: BatchPoster) -> None:
        self._poster = poster
        self._posts: list[Post] = []
        self._parts: list[_Part] = []

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Take a send. Waiting for it waits for nothing else: it may be known to have arrived when
        the rest has not."""
        return self._take(Post(tensor, peer, sends=True))

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Take a receive."""
        self._take(Post(buffer, peer, sends=False))
        return _Whole(self._parts)

    def _take(self, post: Post) -> _Part:
        self._posts.append(post)
        self._parts.append(_Part())
        return self._parts[-1]

    def post(self) -> None:
        """Post what has been taken."""
        posts, parts = self._posts, self._parts
        self._posts, self._parts = [], []
        if posts:
            for part, work in zip(parts, self._poster.together(posts), strict=True):
                part.work = work


def post_of(batch: Batch, parts: Sequence[Instruction]) -> Instruction:
    """What posts a batch, once its parts have said what."""
    return attrs.evolve(parts[0], run=batch.post, computes=False, listed=False, parts=parts)


_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _users(buffer: Tensor) -> tuple[int, int]:
    """The number of references to a tensor's memory: from tensors, and from Python."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_NOBODY = _users(torch.empty(1))


class Pool:
    """The buffers of one rank, whose stream is the one that uses them.

    It keeps as many of each layout as are in use at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[_Layout, list[Tensor]] = {}
        self._taken: set[_Layout] = set()

    def empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], *, dtype: torch.dtype
    ) -> Tensor:
        """A buffer to receive a tensor into. Drop all references to give it back."""
        return self._take((shape, stride, dtype))

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, in a buffer."""
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return self._take(layout).copy_(tensor.detach())

    def _take(self, layout: _Layout) -> Tensor:
        self._taken.add(layout)
        buffers = self._buffers.setdefault(layout, [])
        for buffer in buffers:
            if _users(buffer) == _NOBODY:
                return _alias(buffer)
        shape, stride, dtype = layout
        buffers.append(torch.empty_strided(shape, stride, dtype=dtype, device=self.device))
        return _alias(buffers[-1])

    def trim(self) -> None:
        """After a call whose sends have arrived, drop buffers that somebody has kept, and layouts
        that were not used."""
        taken, self._taken = self._taken, set()
        self._buffers = {
            layout: _unused(buffers) for layout, buffers in self._buffers.items() if layout in taken
        }


def _alias(buffer: Tensor) -> Tensor:
    """A fresh tensor on the same memory."""
    return buffer.data


def _unused(buffers: Sequence[Tensor]) -> list[Tensor]:
    return [buffer for buffer in buffers if _users(buffer) == _NOBODY]


@attrs.frozen(eq=False)
class _UnderWay:
    """A transfer that keeps its buffer until it is waited for; a plain work might not."""

    work: Work
    buffer: Tensor

    def wait(self) -> bool:
        """Wait until it is done."""
        return self.work.wait()


@attrs.frozen(eq=False)
class FromBuffers:
    """Posts sends from buffers of a pool; tensors on the host are sent as they are."""

    poster: BatchPoster
    pool: Pool

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send of a copy."""
        buffer = self._copy(tensor)
        return _UnderWay(self.poster.send(buffer, peer), buffer)

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several, of sends copies."""
        own = [attrs.evolve(p, tensor=self._copy(p.tensor)) if p.sends else p for p in posts]
        works = self.poster.together(own)
        return [_UnderWay(work, post.tensor) for work, post in zip(works, own, strict=True)]

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        return self.poster.receive(buffer, peer)

    def _copy(self, tensor: Tensor) -> Tensor:
        there = tensor.device.type == self.pool.device.type
        return self.pool.copy(tensor) if there else tensor
