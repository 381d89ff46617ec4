"""Moves tensors between ranks: first in, first out on each channel, and posting never blocks."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor


class Work(Protocol):
    """A send or receive under way."""

    def wait(self) -> bool:
        """Wait until it is done."""


class Transport(Protocol):
    """The point-to-point transfers of one rank.

    `early` where receives may be posted before it is known what the call is.
    """

    early: ClassVar[bool]

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send; `tensor`, contiguous, must stay untouched until the work is done."""

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive into `buffer`, which must have exactly the sent tensor's size."""
