"""Process groups of one's own: each of some processes alone, for one purpose, on its own keys.

Those of NCCL are at the end: all that is said to torch's ProcessGroupNCCL is said there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Thread
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

from schedir.runtime.processes.failure import Board, Patience, WaitError, waiting

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


class NcclGroup(Group):
    """A process group of NCCL, which makes its communicator with what is posted first.

    What is posted is noted in `posted`, as waiting for it has the device wait, and not the host.
    """

    def __init__(self, backend: Any, posted: list[dist.Work]) -> None:
        super().__init__(backend)
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
        self._max_ctas: int | None = None
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
        with waiting(_MAKING):
            place = self._place(purpose, processes)
            self._groups.append(Group(dist.ProcessGroupGloo(*place, len(processes), self.timeout)))
        return self._groups[-1]

    def make_nccl(self, purpose: str, processes: Sequence[int]) -> NcclGroup:
        """One of NCCL, which has to be warmed up by what it is for, on all processes at once."""
        if not Groups._told_rank:
            # The first one of a process gives it the rank that its flight recorder's file is named
            # by. So it is one of all processes; it is never used, and no communicator is made.
            Groups._told_rank = True
            self.make_nccl("everyone", range(dist.get_world_size()))
        name, place = f"{self._name}/{purpose}", self._place(purpose, processes)
        with waiting(_MAKING):
            backend = nccl_backend(*place, processes, name, self.timeout, self._max_ctas)
        group = NcclGroup(backend, self.posted)
        self._groups.append(group)
        return group

    def _place(self, purpose: str, processes: Sequence[int]) -> tuple[Store, int]:
        return PrefixStore(purpose, self.store), processes.index(dist.get_rank())

    def settle(self, works: Iterable[dist.Work]) -> None:
        """Wait for works that warm a group up, host and device."""
        for work in works:
            self.patience.until(work.is_completed, lambda: _MAKING)
            with waiting(_MAKING):
                work.wait()
        self.posted.clear()

    def share_gpu(self, processors: int, most: int) -> None:
        """Let the kernels of all communicators fit on a GPU at once; a process has up to `most`.

        All processes say the same: both ends of a channel must take as many multiprocessors.
        """
        self._max_ctas = shares(processors, most)

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
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=timeout)


# In which order process groups are made, so that no process waits for a chain of others.
#
# The members of a group meet when it is made. In an order of all groups, ranks of a pipeline would
# make theirs one after the other; in rounds, each of which has at most one group of any process, as
# many as there are ranks make theirs at the same time:
#
#     ring of 4 ranks    round 0   0─1   2─3
#                        round 1   1─2   3─0     as many rounds as a rank has groups, or some more


def rounds(groups: Sequence[Collection[int]]) -> list[list[int]]:
    """The numbers of the groups, of which each is given by its members, round by round.

    Each goes to the first round in which none of its members has another one, so all processes that
    list the groups alike find the same. Of two members each, with at most n a process, they take
    fewer than 2 n rounds (an edge colouring); neighbours that are listed in turn take about n.
    """
    found: list[list[int]] = []
    taken: dict[int, set[int]] = {}  # by member, the rounds in which it has a group
    for number, members in enumerate(groups):
        busy = set().union(*(taken.setdefault(member, set()) for member in members))
        turn = next(turn for turn in count() if turn not in busy)
        for member in members:
            taken[member].add(turn)
        if turn == len(found):
            found.append([])
        found[turn].append(number)
    return found


def in_turn(groups: Sequence[Collection[int]], own: int) -> list[int]:
    """The numbers of the groups that a process is in, in the order in which it makes them."""
    return [n for together in rounds(groups) for n in together if own in groups[n]]


# What ProcessGroupNCCL does is in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, of which this
# builds on:
#
# - `pointToPoint`: a send or receive alone goes over a communicator of its two ranks, those within
#   `startCoalescing` and `endCoalescing` over one of the whole group, as collectives do; each has a
#   stream of its own. So one group uses one of the two ways alone. Inside, no call returns a work;
#   the one at the end is of all, and holds none of their tensors once it is waited for, as that of
#   a transfer or sum alone would (`batch_isend_irecv` and `_coalescing_manager`, which do that for
#   torch's own groups, are in torch/distributed/distributed_c10d.py).
# - It calls `recordStream` for what a transfer uses: what is freed then goes to nobody before the
#   host has seen the transfer's stream come past; see `schedir.runtime.boundaries.buffers`.
# - A work's `wait` has the current stream wait, not the host.
# - `shutdown` waits for what is under way, `abort` does not. Each ends its kernels first and then
#   frees memory, which waits for the kernels of all communicators, and does so on a thread of its
#   own that the caller waits for: several are aborted at the same time, or the first one waits for
#   what only the others would end. (A group of NCCL's calls around them, as `_abort_process_group`
#   of distributed_c10d.py has, does not reach those threads.)
# - The first group of a process, of whatever library, tells it its rank (`globalRank`).
# - The watchdog ends the process where a work is not done in time, counted from its post.

_WATCHDOG = timedelta(minutes=10)  # torch's own default


def shares(processors: int, communicators: int) -> int:
    """How many of a GPU's multiprocessors each of its communicators may take.

    The kernels of all of them run at once, for a receive is a kernel that runs until its data has
    come; half of the GPU is left to compute, which they wait for. Of 132 multiprocessors, ten
    communicators may take 6 each.
    """
    return max(1, processors // 2 // communicators)


def nccl_backend(
    store: Store,
    position: int,
    processes: Sequence[int],
    name: str,
    timeout: timedelta,
    max_ctas: int | None = None,
) -> Any:
    """A process group of NCCL of some processes, by their ranks in the default process group.

    A kernel of its communicator takes at most `max_ctas` of a GPU's multiprocessors; see `shares`.
    """
    # Of high priority: what has been computed goes on its way before more is computed.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # The watchdog counts from the post, which may be a call ahead of the device, and ends the
    # process without a word of where it stands: it is there for a host that hangs.
    options._timeout = max(2 * timeout, _WATCHDOG)
    # By these the flight recorder names what is in its files.
    options.group_name = name
    options.global_ranks_in_group = list(processes)
    if max_ctas is not None and hasattr(options, "config"):  # of NCCL 2.17
        options.config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, position, len(processes), options)


def end(backends: Sequence[Any], abort: bool) -> None:
    """Let communicators go, which would outlive their groups: once what is under way is done, or
    at once."""
    if not abort:
        for backend in backends:
            backend.shutdown()
        return
    threads = [Thread(target=_abort, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # it has failed already
        backend.abort()
