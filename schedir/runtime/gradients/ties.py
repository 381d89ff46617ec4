"""Parameters that stages share, as an embedding and the last layer often do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from schedir.runtime.gradients.presence import Presence
from schedir.runtime.gradients.reduction import laid_out, refuse_sparse
from schedir.runtime.processes.groups import Group, wait_for_sum


class Tie:
    """A parameter that stages share: each holds a copy, and all have the same gradient and step.

    `copies` are those here, by stage. The gradients of those that are `counted` are summed: of a
    stage's replicas, the first one's. Where other processes have copies, `group` is for sums over
    all, and `presence` says whether any has a gradient.
    """

    def __init__(
        self,
        copies: Mapping[int, nn.Parameter],
        counted: Sequence[nn.Parameter],
        group: Group | None,
        presence: Presence | None,
    ) -> None:
        self.copies, self._counted = copies, counted
        self._group, self._presence = group, presence

    def sum(self) -> None:
        """Give every copy the sum of all gradients; none where nobody has one."""
        copies = [*self.copies.values()]
        for copy in copies:
            refuse_sparse(copy, "summed with those of its tied copies")
        grads = [copy.grad for copy in self._counted if copy.grad is not None]
        total = sum(grads[1:], grads[0]) if grads else torch.zeros_like(copies[0])
        present = bool(grads)
        if self._group is not None and self._presence is not None:
            self._presence.tell([present])
            total = total.reshape(-1).clone()  # it may be a gradient itself
            wait_for_sum([self._group.allreduce([total])], "a tied parameter's gradients")
            (present,) = self._presence.anywhere()
        for copy in copies:
            copy.grad = laid_out(total.clone().reshape(-1), copy) if present else None
