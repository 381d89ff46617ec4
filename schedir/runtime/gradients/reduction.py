"""Sums gradients before OPTIM_STEPs: over the processes that run a stage, and over tied copies.

A REDUCE_GRAD posts its sums, bucket by bucket, and the rank goes on with its list; the first use of
the gradients waits. Work that ranks do together before any of them steps, such as the sum over the
copies of a tied parameter, is done at a `Barrier`:

    rank 0   … 0B7 0OPTIM_STEP ─┐
    rank 1   … 1B7 1OPTIM_STEP ─┴ barrier: its action, then each steps

Between processes the action itself waits for the others. Within one process the last rank that
arrives runs it, on a stream that has waited for the other ranks' streams; their next work waits for
it.

    rank 0's stream   … 0B7 ─mark──┐          ┌─wait─ 0OPTIM_STEP
    rank 1's stream   … 1B7 ───── wait ─ action ─mark─ 1OPTIM_STEP
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.processes.groups import Group, wait_for_sum
from schedir.runtime.sharded import local, lying_as, settle

_BUCKET = 25 << 20  # bytes, as DistributedDataParallel has it


@attrs.define(eq=False)
class Reduction:
    """Sums the gradients of some `parameters`, at least one, over a group of processes.

    A gradient that no process has stays None and does not become zeros: AdamW would decay its
    parameter. A host knows its gradients once it has queued its backwards, so `hosts`, a group of
    CPU tensors, tell each other beside the sums, and one that has all gradients does not wait.
    `whose` names the gradients in messages. With `each_call` a call without an update sums too,
    because the caller may step after any call.
    """

    _parameters: Sequence[nn.Parameter]
    _group: Group
    _hosts: Group
    _whose: str
    each_call: bool = False
    _under_way: list[tuple[Tensor, list[nn.Parameter]]] = attrs.field(factory=list)
    _works: list[dist.Work] = attrs.field(factory=list)
    _here: Sequence[bool] = ()  # the gradients that this process has
    _anywhere: Callable[[], Tensor] | None = None  # how many processes have each

    def post(self) -> None:
        """Post the sums of what is there now."""
        self.finish()
        self.hear_hosts()  # what was told last has long arrived
        for parameter in self._parameters:
            refuse_sparse(parameter, "summed over processes")
        settle(self._parameters)
        self._here = [p.grad is not None for p in self._parameters]
        told = torch.tensor(self._here, dtype=torch.int32, device="cpu")
        self._anywhere = self._hosts.sum(told, f"{self._whose} gradients")
        for bucket in _buckets(self._parameters):
            flat = torch.cat([_flat(p) for p in bucket])
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
        here = self._here if all(self._here) else map(bool, self.hear_hosts())
        there = dict(zip(self._parameters, here, strict=True))
        for flat, bucket in self._under_way:
            pieces = flat.split([local(p).numel() for p in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                if there[parameter]:
                    parameter.grad = _laid_out(piece, parameter)
        self._under_way.clear()

    def hear_hosts(self) -> list[int]:
        """Wait until the hosts have told each other how many have each gradient."""
        summed, self._anywhere = self._anywhere, None
        return [] if summed is None else summed().tolist()

    def reset(self) -> None:
        """Forget what is under way: a call has failed, and nobody answers any more."""
        self._under_way.clear()
        self._works.clear()
        self._anywhere = None


@attrs.frozen(eq=False)
class Tie:
    """A parameter that stages share: each holds a copy, and all have the same gradient and step.

    `copies` are those on this process, by stage. The gradients of `counted` copies are summed; of a
    stage's replicas only the first counts. `elsewhere` sums the first copy's gradient with those of
    other processes, if these have copies.
    """

    copies: Mapping[int, nn.Parameter]
    counted: Sequence[nn.Parameter]
    elsewhere: Reduction | None

    def sum(self) -> None:
        """Give every copy the sum of all gradients; none where nobody has one."""
        first, *others = self.copies.values()
        for copy in (first, *others):
            refuse_sparse(copy, "summed with those of its tied copies")
        settle(self.counted)
        grads = [local(copy.grad) for copy in self.counted if copy.grad is not None]
        first.grad = None
        if grads:  # of which the sum may be one
            first.grad = _laid_out(sum(grads[1:], grads[0]).clone().reshape(-1), first)
        if self.elsewhere is not None:
            self.elsewhere.post()
            self.elsewhere.finish()
        for copy in others:
            copy.grad = None
            if first.grad is not None:
                copy.grad = _laid_out(local(first.grad).clone().reshape(-1), copy)


@attrs.define(eq=False)
class Barrier:
    """An action that runs once `parties` ranks of this process have arrived.

    It makes new gradients for the parameters `remade`, on its own stream. All arrive before one of
    them leaves.
    """

    parties: int
    _action: Callable[[], None]
    _accelerator: Accelerator
    _remade: Sequence[nn.Parameter] = ()
    _arrived: list[Mark] = attrs.field(factory=list)
    _done: Mark | None = None

    def arrive(self) -> None:
        """Note that one of the ranks has come to the barrier."""
        self._arrived.append(self._accelerator.mark())
        if len(self._arrived) == self.parties:
            for mark in self._arrived:
                mark.wait()
            self._arrived.clear()
            self._action()
            self._done = self._accelerator.mark()

    def leave(self) -> None:
        """A rank goes on: its stream waits for the action, and uses what that has made."""
        if self._done is not None:
            self._done.wait()
        for parameter in self._remade:
            if parameter.grad is not None:
                self._accelerator.used(local(parameter.grad))

    def reset(self) -> None:
        """Forget who has arrived: a step has failed."""
        self._arrived.clear()


def reduction_groups(schedule: Schedule, sharded: Collection[int] = ()) -> list[tuple[int, ...]]:
    """The stages with sums, together with those that they share a process group with; but for those
    that are sharded, which have groups of their own.

    A group costs a communicator, and on a GPU multiprocessors. Stages share one where their sums
    run over the same ranks, which come to them in the same order:

        rank 0   … 0REDUCE_GRAD 3REDUCE_GRAD        stages 0 and 3 share a group of ranks 0 and 3
        rank 3   … 0REDUCE_GRAD 3REDUCE_GRAD        otherwise each has a group of its own
    """
    every = graph_of(schedule).collectives_of
    together: dict[frozenset[int], list[int]] = {}
    for stage, by_rank in every.items():
        if stage not in sharded:
            together.setdefault(frozenset(by_rank), []).append(stage)
    found: list[tuple[int, ...]] = []
    for ranks, stages in together.items():
        placed = ([(place, s) for s in stages for place in every[s][rank]] for rank in ranks)
        orders = {tuple(stage for _, stage in sorted(own)) for own in placed}
        found += [tuple(stages)] if len(orders) == 1 else [(stage,) for stage in stages]
    return found


def _flat(parameter: nn.Parameter) -> Tensor:
    """The gradient that is here, of elements in order of their indices; zeros for none."""
    if parameter.grad is None:
        own = local(parameter)
        return own.new_zeros(own.numel())
    return local(parameter.grad).reshape(-1)


def _laid_out(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient in the layout of its parameter, of its elements in order of their indices.

    Fused optimisers take for granted that both lie alike: channels last, say, or transposed.
    """
    own = local(parameter)
    part = flat.view_as(own)
    return lying_as(parameter, part if own.is_contiguous() else torch.empty_like(own).copy_(part))


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
        for parameter in (p for p in parameters if p.dtype is dtype):
            own = local(parameter).nbytes
            if bucket and size + own > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += own
        yield bucket
