"""One process tells all others, once a call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Group
from schedir.runtime.processes.message import Message


class Relay:
    """A vector of integers from the first of some processes to all of them, once a call.

    It goes over a binomial tree: member i receives from i without its lowest bit. Its receive is
    always posted one call ahead, so what is sent arrives whether the receiver calls or not.
    """

    def __init__(self, group: Group, members: Sequence[int], own: int, size: int, tag: int) -> None:
        place = members.index(own)
        self._group, self._size, self._tag = group, size, tag
        self._parent = members[place & (place - 1)] if place else None
        below = (place | 1 << bit for bit in reversed(range(len(members).bit_length())))
        # Those whose lowest bit is the one that was added.
        self._children = [
            members[child]
            for child in below
            if child != place and child & (child - 1) == place and child < len(members)
        ]
        self._sent: list[Message] = []
        self._next = self._post_receive()

    def _post_receive(self) -> Message | None:
        if self._parent is None:
            return None
        buffer = torch.empty(self._size, dtype=torch.int64, device="cpu")
        return Message(self._group.recv, buffer, self._parent, self._tag, "the call of")

    def pass_on(self, own: Tensor | None) -> Tensor:
        """The first member's vector, on every member; only it has to give its own."""
        for message in self._sent:
            message.wait()
        if self._next is None:
            assert own is not None  # it is the first member's
            vector = own
        else:
            vector = self._next.wait()
            self._next = self._post_receive()
        self._sent = [
            Message(self._group.send, vector, child, self._tag, "its call to reach")
            for child in self._children
        ]
        return vector

    def leave(self, own: Tensor) -> None:
        """Send a last vector, if this member is the first, to whoever is still there."""
        if self._next is None:
            with suppress(WaitError):
                self.pass_on(own)
                for message in self._sent:
                    message.wait()

    def drop(self) -> None:
        """Forget what is under way."""
        self._next = None
        self._sent.clear()
