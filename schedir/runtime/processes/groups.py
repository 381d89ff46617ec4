"""Process groups of one's own: each of some processes alone, for one purpose, on its own keys."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _enable_record_function
from torch.distributed import (  # type: ignore[attr-defined]  # public, unlisted
    HashStore,
    PrefixStore,
)
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store
from torch.distributed.rendezvous import rendezvous

from schedir.runtime.processes.failure import WaitError

_CPU = torch.device("cpu")


class Group:
    """A process group of gloo or NCCL, for one purpose; ranks are positions in its processes.

    Once closed its connections end, as soon as nothing under way holds them any more.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a send. Raises WaitError where the other side is gone."""
        try:
            work: dist.Work = _unseen(self._backend.send)(tensors, rank, tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a receive. Raises WaitError where the other side is gone."""
        try:
            work: dist.Work = _unseen(self._backend.recv)(tensors, rank, tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group."""
        work: dist.Work = _unseen(self._backend.allreduce)(tensors)
        return work

    def close(self, abort: bool) -> None:
        """Let the connections go; NCCL's communicators too, which would outlive the group."""
        if isinstance(self._backend, dist.ProcessGroupGloo):
            self._backend = None
        elif abort:
            self._backend.abort()
        else:
            self._backend.shutdown()


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

    def __init__(self, everyone: tuple[int, ...], timeout: timedelta | None) -> None:
        # All members have made as many executors together, so they find the same keys.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"schedir/{attempt}/{everyone}/{Groups._made[everyone]}"
        Groups._made[everyone] += 1
        alone = len(everyone) == 1
        self.store = PrefixStore(name, HashStore() if alone else _get_default_store())
        self.timeout = _timeout_of_user() if timeout is None else timeout
        self._groups: list[Group] = []

    def make(self, purpose: str, processes: Sequence[int], device: torch.device = _CPU) -> Group:
        """A group for a purpose that no other one has: of gloo, or of NCCL for a GPU.

        That of one process alone is never used. Raises WaitError where the other processes don't
        make it in time.
        """
        if len(processes) == 1:
            return Group(None)
        store = PrefixStore(purpose, self.store)
        position, size = processes.index(dist.get_rank()), len(processes)
        backend: Any
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout
                backend = dist.ProcessGroupNCCL(store, position, size, options)
            else:
                backend = dist.ProcessGroupGloo(store, position, size, self.timeout)
        except RuntimeError as error:
            raise WaitError(error, "all ranks to make their executors") from error
        self._groups.append(Group(backend))
        return self._groups[-1]

    def close(self, abort: bool = False) -> None:
        """Let all groups go."""
        while self._groups:
            self._groups.pop().close(abort)


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
