"""Parameters that stages share, as an embedding and the last layer often do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from schedir.runtime.gradients.reduction import laid_out, refuse_sparse, wait_for_sum
from schedir.runtime.processes.groups import Group


class Tie:
    """A parameter that stages share: each holds a copy, and all have the same gradient and step."""

    def __init__(self, copies: Sequence[nn.Parameter], group: Group | None) -> None:
        self._copies = copies
        self._group = group

    def sum(self) -> None:
        """Give every copy the sum of all gradients; none where nobody has one."""
        for copy in self._copies:
            refuse_sparse(copy, "summed with those of its tied copies")
        grads = [copy.grad for copy in self._copies if copy.grad is not None]
        total = sum(grads[1:], grads[0]) if grads else torch.zeros_like(self._copies[0])
        present = len(grads)
        if self._group is not None:
            # One message: what is there, and whether it is.
            flat = torch.cat([total.reshape(-1), total.new_full((1,), float(present > 0))])
            wait_for_sum([self._group.allreduce([flat])], "a tied parameter's")
            present = int(flat[-1])
            total = flat[:-1]
        for copy in self._copies:
            copy.grad = laid_out(total.clone().reshape(-1), copy) if present else None
