"""Moves tensors with a layout that both sides know: each channel is first in, first out, and
posting never blocks.

Payloads that carry their description, as in the first call of an input signature, have tags of
their own, or go by `Control.described` if the transport has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Post


class Work(Protocol):
    """A send or receive under way; wait for it once.

    A send is done when its tensor may change, and when it will arrive even if this process ends.
    """

    def wait(self) -> bool:
        """Wait until it is done; if the transport `queues`, make the device wait.

        Raises RuntimeError if it can't complete any more, or if the other side does not come within
        the timeout of `Groups`, with "timed out" or "timeout" in the message.
        """


class Poster(Protocol):
    """Takes sends and receives. Both raise WaitError if the other side is gone."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send; `tensor`, contiguous, must stay untouched until the work is done."""

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive into `buffer`, contiguous, of exactly the sent tensor's size. Sends and
        receives of one tag meet in order, whichever side posts first."""


class BatchPoster(Poster, Protocol):
    """Also takes several sends and receives as one."""

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several sends and receives as one, so that no order among them can block; returns
        the work of each. Where posts never block each other, that is one after the other."""
        return [
            (self.send if post.sends else self.receive)(post.tensor, post.peer) for post in posts
        ]


class Transport(BatchPoster, Protocol):
    """The point-to-point transfers of one rank.

    `channel` is the channel model under which lists are proved for it: how much of their order it
    keeps. `early`: receives may be posted before the call is known, because transfers with another
    tag never meet them. `queues`: waiting for a work makes the device wait, and not the host.
    """

    channel: ClassVar[str]
    early: ClassVar[bool]
    queues: ClassVar[bool]

    def tagged(self, tag: int) -> Transport:
        """The same transport for traffic under a tag, a small integer that both sides agree on. A
        transport without tags returns itself, and is not `early`."""
        return self


def wait_for(works: list[Work]) -> None:
    """Wait for each of the works, and drop them: with gloo a work can be waited for only once.

    Raises WaitError if one of them can't complete any more.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise WaitError(error) from error
    works.clear()
