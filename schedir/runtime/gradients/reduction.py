"""REDUCE_GRAD: a stage's gradients, summed over all processes that run the stage.

The sums are on their way, bucket by bucket, while the rank goes on with its list, and are waited
for where the gradients are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime.gradients.presence import Presence
from schedir.runtime.processes.groups import Group, wait_for_sum

_BUCKET = 25 << 20  # bytes, as DistributedDataParallel has it


class Reduction:
    """The sums of the gradients of one stage's `parameters`, of which there are some.

    `whose` names it in messages, `presence` says which gradients there are in any process. With
    `each_call` a call that makes no update sums as well, since the caller may step after any.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        presence: Presence,
        whose: str,
        each_call: bool,
    ) -> None:
        self._whose = whose
        self._parameters = parameters
        self._group = group
        self._presence = presence
        self.each_call = each_call
        self._under_way: list[tuple[Tensor, list[nn.Parameter]]] = []
        self._works: list[dist.Work] = []

    def begin(self) -> None:
        """A call begins: forget what one that failed has left."""
        self._under_way.clear()
        self._works.clear()

    def post(self) -> None:
        """Post the sums of what is there now."""
        self.finish()
        for parameter in self._parameters:
            refuse_sparse(parameter, "summed over processes")
        self._presence.tell([p.grad is not None for p in self._parameters])
        for bucket in _buckets(self._parameters):
            flat = torch.cat(
                [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket]
            )
            self._works.append(self._group.allreduce([flat]))
            self._under_way.append((flat, bucket))

    def wait(self) -> None:
        """Wait for the sums, where some are under way."""
        wait_for_sum(self._works, f"{self._whose} gradients")
        self._works.clear()

    def finish(self) -> None:
        """Wait for the sums, and make them the gradients; without a sum under way, do nothing."""
        if not self._under_way:
            return
        self.wait()
        anywhere = self._presence.anywhere()
        absent = {p for p, there in zip(self._parameters, anywhere, strict=True) if not there}
        for flat, bucket in self._under_way:
            pieces = flat.split([p.numel() for p in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                if parameter not in absent:
                    parameter.grad = laid_out(piece, parameter)
        self._under_way.clear()


def laid_out(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient in the layout of its parameter, of its elements in order of their indices.

    Fused optimisers take for granted that both lie alike: channels last, say, or transposed.
    """
    if parameter.is_contiguous():
        return flat.view_as(parameter)
    return torch.empty_like(parameter).copy_(flat.view_as(parameter))


def refuse_sparse(parameter: nn.Parameter, what: str) -> None:
    """Raise ExecutionError where the parameter's gradient is sparse and can't be `what`."""
    grad = parameter.grad
    if grad is not None and grad.layout is not torch.strided:
        raise ExecutionError(
            f"the gradient of a parameter of shape {list(parameter.shape)} is sparse and can't be "
            f"{what}; leave sparse=True out of its nn.Embedding"
        )


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type, together at most a bucket's bytes, or one that is larger."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            if parameter.dtype is not dtype:
                continue
            if bucket and size + parameter.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        if bucket:
            yield bucket
