"""Which gradients there are, in any of several processes: what their hosts tell each other.

A gradient that nobody has is none, never zeros: AdamW would decay its parameter. Each host knows
which ones it has when it has queued its backwards, so this goes from host to host, beside the sums
of the gradients; and who has them all need not wait to hear of others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes.groups import Group, wait_for_sum


class Presence:
    """Of some gradients whether any process of a `group`, of CPU tensors, has them.

    `whose` names them in messages.
    """

    def __init__(self, group: Group, whose: str) -> None:
        self._group, self._whose = group, whose
        self._own: Sequence[bool] = ()
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def tell(self, own: Sequence[bool]) -> None:
        """Say which ones this process has, as every other one does; nobody waits here."""
        self.settle()  # what was said last has long arrived
        self._own = own
        flags = torch.tensor(own, dtype=torch.int32, device="cpu")
        self._under_way = self._group.allreduce([flags]), flags

    def anywhere(self) -> Sequence[bool]:
        """Of each, whether anyone has it. Waits for other hosts where this one can't tell."""
        if all(self._own):
            return self._own
        assert self._under_way is not None  # told before
        _, flags = self._under_way
        self.settle()
        return [bool(number) for number in flags.tolist()]

    def settle(self) -> None:
        """Wait until all that was said has arrived."""
        if self._under_way is not None:
            work, _ = self._under_way
            self._under_way = None
            wait_for_sum([work], f"{self._whose} gradients")

    def forget(self) -> None:
        """A call has failed: nobody answers any more."""
        self._under_way = None
