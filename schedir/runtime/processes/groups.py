"""Process groups of one's own: each of some processes alone, for one purpose, on its own keys.

Those between hosts, of gloo, are there once they are made. Those of NCCL are asked for, one after
the other, and made together (`connecting`): how much of a GPU each may take depends on all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _enable_record_function
from torch.distributed import (  # type: ignore[attr-defined]  # public, unlisted
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store
from torch.distributed.rendezvous import rendezvous

from schedir.runtime.processes.failure import (
    Board,
    Patience,
    WaitError,
    interface_advice,
    joining,
    waiting,
)
from schedir.runtime.processes.nccl import Shares, end, nccl_backend

_MAKING = "all ranks to make their executors"


@attrs.frozen(eq=False)
class Post:
    """One end of a transfer: a tensor to send to a peer, or to receive into from it."""

    tensor: Tensor
    peer: int
    sends: bool


@attrs.define(eq=False)
class Message:
    """A vector that is being sent or received; gloo lets a work be waited for once only.

    `what` says in words what it is, which way it goes and between whom, for the error if it never
    arrives.
    """

    _value: Tensor
    _what: str
    _work: dist.Work | None
    _dropped: bool = False

    def wait(self) -> Tensor:
        """The vector, once it has arrived. Raises WaitError where it can't any more."""
        if self._dropped:
            raise WaitError(RuntimeError("the executor has failed since"), self._what)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise WaitError(error, self._what) from error
            self._work = None
        return self._value

    def drop(self) -> None:
        """Let its connection go; whoever has not waited yet waits in vain."""
        self._dropped = self._work is not None
        self._work = None


class Group:
    """A process group for one purpose; ranks are positions in its processes.

    Of gloo, which connects them when it is made. Once closed its connections end, as soon as
    nothing under way holds them any more.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a send. Raises WaitError where the other side is gone."""
        try:
            work: dist.Work = _unseen(self.backend.send)(tensors, rank, tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a receive. Raises WaitError where the other side is gone."""
        try:
            work: dist.Work = _unseen(self.backend.recv)(tensors, rank, tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group."""
        work: dist.Work = _unseen(self.backend.allreduce)(tensors)
        return work

    def tell(self, vector: Tensor, rank: int, tag: int, what: str) -> Message:
        """Send a vector; `what` says what it is."""
        return self._message(self.send, vector, rank, tag, f"{what} to reach")

    def expect(
        self, size: int, rank: int, tag: int, what: str, dtype: torch.dtype = torch.int64
    ) -> Message:
        """Post the receive of a vector; `what` says what it is, and of whom."""
        buffer = torch.empty(size, dtype=dtype, device="cpu")
        return self._message(self.recv, buffer, rank, tag, what)

    def _message(
        self, post: Callable[..., dist.Work], value: Tensor, rank: int, tag: int, what: str
    ) -> Message:
        what = f"{what} process {rank}"
        try:
            return Message(value, what, post([value], rank, tag))
        except WaitError as error:
            raise WaitError(error.cause, what) from error


@attrs.frozen
class Asked:
    """What a communicator of NCCL is asked for by, alike in all of its processes: it `sums`, or it
    moves tensors between two ends."""

    purpose: str
    processes: tuple[int, ...]
    sums: bool


class NcclGroup(Group):
    """A process group of NCCL: what it is `asked` for, and the communicator once that is made.

    `warm_up` posts what makes it, in all of its processes at once. What is posted is noted in
    `posted`, as waiting for it has the device wait, and not the host.
    """

    def __init__(
        self,
        asked: Asked,
        warm_up: Callable[[NcclGroup], Iterable[dist.Work]],
        posted: list[dist.Work],
    ) -> None:
        super().__init__(None)
        self.asked, self.warm_up = asked, warm_up
        self._posted = posted

    def together(self, posts: Iterable[Post]) -> dist.Work:
        """Post several as one, which no order among them can block."""

        def post_all() -> None:
            for post in posts:
                (self.send if post.sends else self.recv)([post.tensor], post.peer, 0)

        return self._as_one(post_all)

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group, as one as well: a work of its own would keep its
        tensors, and so the gradients of a step, for as long as it is noted."""
        return self._as_one(partial(super().allreduce, tensors))

    def _as_one(self, post: Callable[[], object]) -> dist.Work:
        """Post what this posts as one."""
        self.backend._start_coalescing()
        try:
            post()
        finally:
            work: dist.Work = self.backend._end_coalescing()
        self._posted.append(work)
        return work


def wait_for_sum(works: Iterable[dist.Work], whose: str) -> None:
    """Wait for sums over processes. Raises WaitError where they can't end any more."""
    with waiting(f"the sum of {whose}"):
        for work in works:
            work.wait()


def _unseen(post: Callable[..., Any]) -> Callable[..., Any]:
    """A call that posts, hidden from a profiler that runs.

    Work that one has seen posted tells it when it ends, and if that is after the profile, as for
    receives posted ahead, writes into memory that was freed.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return post

    def unseen(*arguments: Any) -> Any:
        _enable_record_function(False)
        try:
            return post(*arguments)
        finally:
            _enable_record_function(True)

    return unseen


class Groups:
    """Makes the process groups of one executor, each of some processes alone, for one purpose.

    Not by torch's new_group: that has all processes make all groups, or names a group by how many
    its process has made, which hangs where the members have made different numbers.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()
    _told_rank: ClassVar[bool] = False

    def __init__(self, everyone: tuple[int, ...], timeout: timedelta | None) -> None:
        # All members have made as many executors together, so they find the same keys.
        self._name = f"schedir/{_attempt()}/{everyone}/{Groups._made[everyone]}"
        Groups._made[everyone] += 1
        alone = len(everyone) == 1
        self.store = PrefixStore(self._name, HashStore() if alone else _get_default_store())
        self.timeout = _timeout_of_user() if timeout is None else timeout
        self.patience = Patience(self.timeout, Board(self.store).has_failed)
        self.posted: list[dist.Work] = []  # over NCCL, for whoever follows it
        self.asked: list[NcclGroup] = []
        self._for_numbers: dict[tuple[int, ...], Group] = {}
        self._groups: list[Group] = []

    def make(
        self, purpose: str, processes: Sequence[int], device: torch.device | None = None
    ) -> Group:
        """A group for a purpose that no other one has, between hosts, or for sums on a device.

        That of one process alone is never used. Raises WaitError where the other processes don't
        make it in time.
        """
        if len(processes) == 1:
            return Group(None)
        if goes_over_nccl(device):

            def warm_up(group: NcclGroup) -> list[dist.Work]:
                return [group.allreduce([torch.zeros(1, device=device)])]

            return self.ask(Asked(purpose, tuple(processes), sums=True), warm_up)
        with waiting(_MAKING, interface_advice()):
            place = self._place(purpose, processes)
            self._groups.append(Group(dist.ProcessGroupGloo(*place, len(processes), self.timeout)))
        return self._groups[-1]

    def for_numbers(self, processes: Sequence[int], device: torch.device) -> Group:
        """The group in which some processes sum a call's numbers on a device: its samples, its
        scales, the norms of its gradients. In that order all post them, so one serves all."""
        key = tuple(sorted(processes))
        if key not in self._for_numbers:
            purpose = f"numbers/{','.join(map(str, key))}"
            self._for_numbers[key] = self.make(purpose, key, device)
        return self._for_numbers[key]

    def ask(self, asked: Asked, warm_up: Callable[[NcclGroup], Iterable[dist.Work]]) -> NcclGroup:
        """Ask for a group of NCCL, which `warm_up` has post what it is for."""
        self.asked.append(NcclGroup(asked, warm_up, self.posted))
        return self.asked[-1]

    def make_asked(self, group: NcclGroup, share: Shares) -> None:
        """Make one that was asked for, as its other processes do at the same time."""
        if not Groups._told_rank:
            # The first one of a process gives it the rank that its flight recorder's file is named
            # by. So it is one of all processes; it is never used, and no communicator is made.
            Groups._told_rank = True
            everyone = Asked("everyone", tuple(range(dist.get_world_size())), sums=True)
            self._make_backend(NcclGroup(everyone, group.warm_up, self.posted), 1)
        self._make_backend(group, share.sum if group.asked.sums else share.transfer)
        self.settle(group.warm_up(group))

    def settle(self, works: Iterable[dist.Work]) -> None:
        """Wait for works that warm a group up, host and device."""
        for work in works:
            self.patience.until(work.is_completed, lambda: _MAKING)
            with waiting(_MAKING):
                work.wait()
        self.posted.clear()

    def _make_backend(self, group: NcclGroup, max_ctas: int) -> None:
        purpose, processes = group.asked.purpose, group.asked.processes
        name, place = f"{self._name}/{purpose}", self._place(purpose, processes)
        with waiting(_MAKING):
            group.backend = nccl_backend(*place, processes, name, self.timeout, max_ctas)
        self._groups.append(group)

    def _place(self, purpose: str, processes: Sequence[int]) -> tuple[Store, int]:
        return PrefixStore(purpose, self.store), processes.index(dist.get_rank())

    def close(self, abort: bool = False) -> None:
        """Let all groups go; the latest first, as all processes do."""
        groups, self._groups = self._groups[::-1], []
        backends = [group.backend for group in groups if isinstance(group, NcclGroup)]
        # First those of gloo: an abort may wait for the other ranks to abort too, and these may
        # wait for this one's connections to end.
        for group in groups:
            group.backend = None
        end(backends, abort)


def goes_over_nccl(device: torch.device | None) -> bool:
    """Whether what lies on a device is sent by NCCL; all else is by gloo."""
    return device is not None and device.type == "cuda"


def _timeout_of_user() -> timedelta:
    """That of the default process group, where there is one."""
    if dist.is_initialized():
        group = _get_default_group()
        for device in group._device_types:
            with suppress(RuntimeError):  # it has no backend for it
                timeout: timedelta = group._get_backend(device).options._timeout
                return timeout
    return default_pg_timeout


def _attempt() -> str:
    """How often torchrun has started this job again: keys of an earlier attempt are taken."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


_groups_made = count()


def init_process_group(timeout: timedelta | None) -> None:
    """Join the ranks that torchrun has started, on keys of the store that no group has used.

    gloo would find the addresses of an earlier group of this job, or of the run before a restart.
    """
    store, rank, world = next(rendezvous("env://"))
    own = PrefixStore(f"schedir/{_attempt()}/{next(_groups_made)}", store)
    with joining():
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=timeout)
