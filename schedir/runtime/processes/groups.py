"""Process groups of one's own: each of some processes alone, for one purpose, on its own keys."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
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

from schedir.runtime.processes.failure import Board, WaitError
from schedir.runtime.processes.nccl import Settings, end, nccl_backend, shares
from schedir.runtime.processes.patience import Patience

_MAKING = "all ranks to make their executors"


@attrs.frozen(eq=False)
class Post:
    """One end of a transfer: a tensor to send to a peer, or to receive into from it."""

    tensor: Tensor
    peer: int
    sends: bool


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


class NcclGroup(Group):
    """A process group of NCCL, which makes its communicator with what is posted first.

    What is posted is noted in `posted`, as waiting for it has the device wait, and not the host.
    """

    def __init__(self, backend: Any, posted: list[dist.Work]) -> None:
        super().__init__(backend)
        self._posted = posted

    def together(self, posts: Iterable[Post]) -> dist.Work:
        """Post several as one, which no order among them can block."""
        with self._as_one() as works:
            for post in posts:
                (self.send if post.sends else self.recv)([post.tensor], post.peer, 0)
        return works[0]

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group, as one as well: a work of its own would keep its
        tensors, and so the gradients of a step, for as long as it is noted."""
        with self._as_one() as works:
            super().allreduce(tensors)
        return works[0]

    @contextmanager
    def _as_one(self) -> Iterator[list[dist.Work]]:
        """Post what is posted inside as one; its work is in the list then."""
        works: list[dist.Work] = []
        self.backend._start_coalescing()
        try:
            yield works
        finally:
            works.append(self.backend._end_coalescing())
        self._posted += works


def wait_for_sum(works: Sequence[dist.Work], whose: str) -> None:
    """Wait for sums over processes. Raises WaitError where they can't end any more."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise WaitError(error, f"the sum of {whose}") from error


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
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._name = f"schedir/{attempt}/{everyone}/{Groups._made[everyone]}"
        Groups._made[everyone] += 1
        alone = len(everyone) == 1
        self.store = PrefixStore(self._name, HashStore() if alone else _get_default_store())
        self.timeout = _timeout_of_user() if timeout is None else timeout
        self.patience = Patience(self.timeout, Board(self.store).has_failed)
        self.settings = Settings(self.timeout)
        self.posted: list[dist.Work] = []  # over NCCL, for whoever follows it
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
            group = self.make_nccl(purpose, processes)
            self.settle([group.allreduce([torch.zeros(1, device=device)])])
            return group
        store, position = self._place(purpose, processes)
        try:
            backend = dist.ProcessGroupGloo(store, position, len(processes), self.timeout)
        except RuntimeError as error:
            raise WaitError(error, _MAKING) from error
        self._groups.append(Group(backend))
        return self._groups[-1]

    def make_nccl(self, purpose: str, processes: Sequence[int]) -> NcclGroup:
        """One of NCCL, which has to be warmed up by what it is for, on all processes at once."""
        if not Groups._told_rank:
            # The first one of a process gives it the rank that its flight recorder's file is named
            # by. So it is one of all processes; it is never used, and no communicator is made.
            Groups._told_rank = True
            self.make_nccl("everyone", range(dist.get_world_size()))
        store, position = self._place(purpose, processes)
        name = f"{self._name}/{purpose}"
        try:
            backend = nccl_backend(store, position, processes, name, self.settings)
        except RuntimeError as error:
            raise WaitError(error, _MAKING) from error
        group = NcclGroup(backend, self.posted)
        self._groups.append(group)
        return group

    def _place(self, purpose: str, processes: Sequence[int]) -> tuple[Store, int]:
        return PrefixStore(purpose, self.store), processes.index(dist.get_rank())

    def settle(self, works: Iterable[dist.Work]) -> None:
        """Wait for works that warm a group up, host and device."""
        for work in works:
            self.patience.until(work.is_completed, lambda: _MAKING)
            try:
                work.wait()
            except RuntimeError as error:
                raise WaitError(error, _MAKING) from error
        self.posted.clear()

    def share_gpu(self, processors: int, most: int) -> None:
        """Let the kernels of all communicators fit on a GPU at once; a process has up to `most`.

        All processes say the same: both ends of a channel must take as many multiprocessors.
        """
        self.settings = Settings(self.timeout, shares(processors, most))

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
    if not dist.is_initialized():
        return default_pg_timeout
    group = _get_default_group()
    for device in group._device_types:
        with suppress(RuntimeError):  # it has no backend for it
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return default_pg_timeout


_groups_made = count()


def init_process_group(timeout: timedelta | None) -> None:
    """Join the ranks that torchrun has started, on keys of the store that no group has used.

    gloo would find the addresses of an earlier group of this job, or of the run before a restart.
    """
    store, rank, world = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"schedir/{attempt}/{next(_groups_made)}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=timeout)
