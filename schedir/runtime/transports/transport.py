"""Moves tensors between ranks: first in, first out on each channel, and posting never blocks."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from schedir.runtime.processes.failure import WaitError


class Work(Protocol):
    """A send or receive under way."""

    def wait(self) -> bool:
        """Wait until it is done."""

    def is_completed(self) -> bool:
        """Whether waiting for it would block nobody."""


class Transport(Protocol):
    """The point-to-point transfers of one rank.

    `channel` is the channel model that lists are proved under for it: how much of their order it
    keeps. `early` where receives may be posted before it is known what the call is; see
    `schedir.runtime.program.opening`.
    """

    channel: ClassVar[str]
    early: ClassVar[bool]

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send; `tensor`, contiguous, must stay untouched until the work is done."""

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive into `buffer`, which must have exactly the sent tensor's size."""


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
