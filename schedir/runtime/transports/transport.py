"""Moves tensors, whose layout both sides know, between ranks: first in, first out on each channel,
and posting never blocks.

The first call of an input signature goes beside it, over `Control.described`: what a transport
carries is seen from the second call on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Post


class Work(Protocol):
    """A send or receive under way, which is waited for once.

    A send is done once its tensor may change, and it will arrive even if this process ends.
    """

    def wait(self) -> bool:
        """Wait until it is done, or has the device wait where the transport `queues`.

        Raises RuntimeError where it can't be done any more, or where the other side does not come
        within the timeout of `Groups`: with "timed out" or "timeout" in its words.
        """

    def is_completed(self) -> bool:
        """Whether waiting for it would block nobody: asked where ranks take turns in one process,
        and where the transport `queues`."""


class Poster(Protocol):
    """What takes sends and receives. Both raise WaitError where the other side is gone."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send; `tensor`, contiguous, must stay untouched until the work is done."""

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive into `buffer`, contiguous, of exactly the sent tensor's size. What has
        the same tag meets in order, whichever side posts first."""


class BatchPoster(Poster, Protocol):
    """What takes several of them as one, too."""

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several sends and receives as one, which no order among them can block; the work of
        each."""


class Transport(BatchPoster, Protocol):
    """The point-to-point transfers of one rank.

    `channel` is the channel model that lists are proved under for it: how much of their order it
    keeps; `laxest` the one that keeps least of it which it may be trusted with at the user's risk.
    `early` where receives may be posted before it is known what the call is, as what has another
    tag meets none of them. `queues` where waiting for a work has the device wait, and
    not the host.
    """

    channel: ClassVar[str]
    laxest: ClassVar[str]
    early: ClassVar[bool]
    queues: ClassVar[bool]

    def tagged(self, tag: int) -> Transport:
        """The same for traffic under a tag, a small integer that both sides choose alike; a
        transport that knows no tags gives itself, and is not `early`."""


def one_by_one(transport: Transport, posts: Sequence[Post]) -> list[Work]:
    """Post several sends and receives where none can block another."""
    return [
        (transport.send if post.sends else transport.receive)(post.tensor, post.peer)
        for post in posts
    ]


def wait_for(works: list[Work]) -> None:
    """Wait for each of the works, and forget them: gloo lets a work be waited for once only.

    Raises WaitError where one of them can't be done any more.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise WaitError(error) from error
    works.clear()
