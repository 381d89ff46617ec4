"""Entries of several actions: what is run for them beside the actions themselves.

(0F4;7B3)                   7B3's wait, 0F4, 7B3           neither starts before both can; on a
                                                           device they run `abreast`
(0SEND_ACT1;0RECV_GRAD0)    0SEND_ACT1, 0RECV_GRAD0, post  each says what it posts; then all of
                                                           it is posted as one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
from torch import Tensor

from schedir.ir import COMMUNICATION, Action
from schedir.runtime.call import Call
from schedir.runtime.processes.groups import Post
from schedir.runtime.program.instruction import Instruction, Operation
from schedir.runtime.transports.transport import BatchPoster, Work


def communicates(actions: Sequence[Action]) -> bool:
    """Whether the actions of one entry are a batch, to be posted as one."""
    return len(actions) > 1 and actions[0].kind in COMMUNICATION


class _Wait(Operation):
    """Nothing but the wait before it."""

    listed: ClassVar[bool] = False

    def run(self, call: Call) -> None:
        """Run it."""


def wait_of(instruction: Instruction) -> Instruction:
    """What an instruction waits for, by itself: listed first, it has nothing left to wait for."""
    operation = _Wait()
    return attrs.evolve(instruction, operation=operation, run=operation.run)


@attrs.define(eq=False)
class _Part:
    """What one action has posted, as soon as the batch is; it may be waited for by several."""

    work: Work | None = None
    done: bool = False

    def wait(self) -> bool:
        """Wait until it is done."""
        if self.work is not None:
            work, self.work, self.done = self.work, None, True
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether waiting for it would block nobody."""
        return self.done or (self.work is not None and self.work.is_completed())


@attrs.frozen(eq=False)
class _Whole:
    """All that a batch has posted: what consumes one receive of it waits for all."""

    parts: Sequence[_Part]

    def wait(self) -> bool:
        """Wait until all of it is done."""
        for part in self.parts:
            part.wait()
        return True

    def is_completed(self) -> bool:
        """Whether waiting for it would block nobody."""
        return all(part.is_completed() for part in self.parts)


class Batch:
    """Takes what the actions of an entry post, in place of their transport, and posts it as one."""

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


class PostBatch(Operation):
    """The end of a batch: posts what its actions have taken down."""

    listed: ClassVar[bool] = False

    def __init__(self, batch: Batch, parts: Sequence[Instruction]) -> None:
        self.batch, self.parts = batch, parts

    def run(self, call: Call) -> None:
        """Run it."""
        self.batch.post()


def post_of(batch: Batch, parts: Sequence[Instruction]) -> Instruction:
    """What posts a batch, once its parts have said what."""
    operation = PostBatch(batch, list(parts))
    return attrs.evolve(parts[0], operation=operation, run=operation.run)
