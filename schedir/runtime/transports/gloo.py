"""Transfers over gloo, between the processes of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Groups
from schedir.runtime.transports.transport import Transport, Work


class GlooTransport(Transport):
    """Transfers between the processes of a pipeline; `processes[rank]` runs a rank.

    Traffic to higher ranks and traffic to lower ranks each have a group, and so a connection. With
    one connection, a payload often comes in while its receiver is posting a send: gloo's thread
    finds the connection locked, tries again at once, and keeps the core from the thread that holds
    the lock, for up to a timer tick of 4 ms. Collectives have other groups.

    A send meets only a receive with the same tag.
    """

    channel: ClassVar[str] = "async"
    early: ClassVar[bool] = True
    queues: ClassVar[bool] = False

    def __init__(self, processes: Sequence[int], rank: int, groups: Groups) -> None:
        ordered = tuple(sorted(processes))
        self._tag = 0
        self._numbers = [ordered.index(process) for process in processes]
        up, down = (groups.make(f"transfers {way}", ordered) for way in ("up", "down"))
        self._to = [up if peer > rank else down for peer in range(len(processes))]
        self._from = [down if peer > rank else up for peer in range(len(processes))]

    def tagged(self, tag: int) -> GlooTransport:
        """The same connections, for traffic that meets no other."""
        beside = copy.copy(self)
        beside._tag = tag
        return beside

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send."""
        try:
            work: Work = self._to[peer].backend.send([tensor], self._numbers[peer], self._tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        try:
            work: Work = self._from[peer].backend.recv([buffer], self._numbers[peer], self._tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work
