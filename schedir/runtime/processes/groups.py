"""schedir's own process groups: each has some of the processes, one purpose, and its own keys.

Groups of gloo, between hosts, are made at once. Groups of NCCL are first asked for, one after the
other, and then made together: how much of a GPU each may take depends on all. No other module
talks to torch's ProcessGroupNCCL.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count
from threading import Thread
from time import monotonic
from typing import Any, ClassVar
from weakref import WeakSet

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

from schedir.runtime.processes.failure import Patience, WaitError, interface_advice, waiting
from schedir.runtime.processes.noticeboard import MAKING, Noticeboard, named


@attrs.frozen(eq=False)
class Post:
    """One end of a transfer: a tensor to send to a peer, or to receive into from it."""

    tensor: Tensor
    peer: int
    sends: bool


@attrs.define(eq=False)
class Message:
    """A vector that is being sent or received; with gloo a work can be waited for only once.

    `what` names the vector, its direction and the other process, for the error if it never arrives.
    """

    _value: Tensor
    _what: str
    _process: int
    _work: dist.Work | None
    _dropped: bool = False

    def wait(self) -> Tensor:
        """Wait for the vector. Raises WaitError if it can't arrive any more."""
        if self._dropped:
            raise WaitError(RuntimeError("the executor has failed since"), self._what)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                self.drop()  # the error's frames hold this message
                raise WaitError(error, self._what, process=self._process) from error
            self._work = None
        return self._value

    def drop(self) -> None:
        """Release its connection. A later `wait` fails."""
        self._dropped |= self._work is not None
        self._work = None


class Group:
    """A process group of gloo for one purpose; ranks are positions in its processes.

    gloo connects the processes when the group is made. Once the group is closed, its connections
    end when no work under way holds them.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        # Weak: a group that is dropped without an end lets go of its connections at once.
        self._messages: WeakSet[Message] = WeakSet()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a send. Raises WaitError if the other side is gone."""
        return _posted(self.backend.send, tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a receive. Raises WaitError if the other side is gone."""
        return _posted(self.backend.recv, tensors, rank, tag)

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group. Raises WaitError if another process is gone."""
        return _posted(self.backend.allreduce, tensors)

    def sum(self, vector: Tensor, what: str) -> Callable[[], Tensor]:
        """Begin to sum a vector over all of the group; returns a function that waits for the sum,
        to be called once. A value that only one process puts in, among zeros, stays exact.
        """
        if self.backend is None:  # a single process
            return lambda: vector
        work = self.allreduce([vector])

        def summed() -> Tensor:
            wait_for_sum([work], what)
            return vector

        return summed

    def tell(self, vector: Tensor, rank: int, tag: int, what: str) -> Message:
        """Send a vector; `what` names it in messages."""
        return self._message(self.send, vector, rank, tag, f"{what} to reach")

    def expect(
        self, size: int, rank: int, tag: int, what: str, dtype: torch.dtype = torch.int64
    ) -> Message:
        """Post the receive of a vector; `what` names it, and its sender, in messages."""
        buffer = torch.empty(size, dtype=dtype, device="cpu")
        return self._message(self.recv, buffer, rank, tag, what)

    def _message(
        self, post: Callable[..., dist.Work], value: Tensor, rank: int, tag: int, what: str
    ) -> Message:
        what = f"{what} process {rank}"
        try:
            message = Message(value, what, rank, post([value], rank, tag))
        except WaitError as error:  # its frames hold the connection: no other error may keep it
            error.what, error.process = what, rank
            raise
        self._messages.add(message)
        return message

    def end(self) -> None:
        """Let go of the connections, and of the messages that would hold them."""
        self.backend = None
        with suppress(KeyError):  # until there is no other
            while True:
                self._messages.pop().drop()


def wait_for_sum(works: Iterable[dist.Work], whose: str) -> None:
    """Wait for sums over processes. Raises WaitError if they can't complete any more."""
    with waiting(f"the sum of {whose}"):
        for work in works:
            work.wait()


def _posted(post: Callable[..., dist.Work], *arguments: Any) -> dist.Work:
    """Post, hidden from a running profiler. Raises WaitError if that fails.

    A work that the profiler has seen reports its end to it. If that comes after the profile, as for
    receives posted ahead, it writes into freed memory.
    """
    hides = torch.autograd.profiler._is_profiler_enabled
    if hides:
        _enable_record_function(False)
    try:
        return post(*arguments)
    except RuntimeError as error:
        raise WaitError(error) from error
    finally:
        if hides:
            _enable_record_function(True)


class Groups:
    """Makes the process groups of one executor, each of some of the processes, for one purpose.

    It does not use torch's new_group: with that, either all processes make all groups, or a group
    is named by how many groups its process has made, and hangs if the members have made different
    numbers.
    """

    _told_rank: ClassVar[bool] = False

    def __init__(self, everyone: tuple[int, ...], timeout: timedelta | None) -> None:
        self._name = named(everyone)
        alone = len(everyone) == 1
        self.store = PrefixStore(self._name, HashStore() if alone else _get_default_store())
        self.timeout = timeout_of_user() if timeout is None else timeout
        self.patience = Patience(self.timeout, Noticeboard(self.store).has_failed)
        self.posted: list[dist.Work] = []  # over NCCL, for whoever follows it
        self._asked: list[NcclGroup] = []
        self._groups: list[Group] = []
        self._first: dict[tuple[tuple[int, ...], bool], Group] = {}  # by processes, and over NCCL
        self._purposes: Counter[str] = Counter()

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait as long as this from now on."""
        self.timeout = self.patience.timeout = timeout
        for group in self._groups:
            group.backend._set_default_timeout(timeout)

    def make(
        self, purpose: str, processes: Sequence[int], device: torch.device | None = None
    ) -> Group:
        """Make a group for a new purpose, between hosts, or for sums on a device.

        A group of a single process only sums. Raises WaitError if the other processes don't make it
        in time.
        """
        members, over_nccl = tuple(processes), goes_over_nccl(device)
        made: Group
        if len(members) == 1:
            made = Group(None)
        elif over_nccl:
            made = self.ask(Asked(purpose, members), device)
        else:
            with waiting(MAKING, interface_advice()):
                place = self._place(purpose, members)
                made = Group(dist.ProcessGroupGloo(*place, len(members), self.timeout))
            self._groups.append(made)
        self._first.setdefault((members, over_nccl), made)
        return made

    def for_numbers(self, processes: Iterable[int], device: torch.device | None = None) -> Group:
        """The group in which some processes sum a call's numbers: samples at its beginning, norms
        and verdicts after all other sums, so any group of the same processes does."""
        own = tuple(sorted(processes))
        found = self._first.get((own, goes_over_nccl(device)))
        if found is None:
            found = self.make(f"numbers/{','.join(map(str, own))}", own, device)
        return found

    def ask(self, asked: Asked, device: torch.device | None) -> NcclGroup:
        """Ask for a group of NCCL."""
        self._asked.append(NcclGroup(asked, device, self.posted))
        return self._asked[-1]

    def connect(
        self,
        gather: Callable[[list[Asked]], list[list[Asked]]],
        meet: Callable[[Sequence[int]], object],
        processors: int,
    ) -> None:
        """Make the groups of NCCL that were asked for, so that the kernels of all of them fit on a
        GPU at once.

        `processors` are the multiprocessors of the smallest GPU: both ends of a transfer must use
        the same number. The processes of a group `meet` over gloo first, which has a timeout; NCCL
        has none there. Raises WaitError if they don't come in time.
        """
        own = {group.asked: group for group in self._asked}
        every = [*dict.fromkeys(chain.from_iterable(gather([*own])))]

        def most(sums: bool) -> int:
            """The most groups of a kind that a process has."""
            held = Counter(process for a in every if a.sums is sums for process in a.processes)
            return max(held.values(), default=0)

        share = shares(processors, most(sums=False), most(sums=True))
        for number in in_turn([asked.processes for asked in every], dist.get_rank()):
            meet(every[number].processes)
            self.make_asked(own[every[number]], share)
        self._asked.clear()

    @property
    def aborts(self) -> bool:
        """Whether there are groups of NCCL, which a failure aborts."""
        return any(isinstance(group, NcclGroup) for group in self._groups)

    def make_asked(self, group: NcclGroup, share: Shares) -> None:
        """Make a group that was asked for; its other processes make it at the same time."""
        if not Groups._told_rank:
            # The first group of a process determines the rank in the name of its flight recorder's
            # file. So it is a group of all processes; it is never used, and makes no communicator.
            Groups._told_rank = True
            everyone = Asked("everyone", tuple(range(dist.get_world_size())))
            self._make_backend(NcclGroup(everyone, None, self.posted), 1)
        self._make_backend(group, share.sum if group.asked.sums else share.transfer)
        self.settle(group.warm_up())

    def settle(self, works: Iterable[dist.Work]) -> None:
        """Wait, on host and device, for works that warm a group up."""
        for work in works:
            self.patience.until(work.is_completed, lambda: MAKING)
            with waiting(MAKING):
                work.wait()
        self.posted.clear()

    def _make_backend(self, group: NcclGroup, max_ctas: int) -> None:
        purpose, processes = group.asked.purpose, group.asked.processes
        name, place = f"{self._name}/{purpose}", self._place(purpose, processes)
        with waiting(MAKING):
            group.backend = nccl_backend(*place, processes, name, self.timeout, max_ctas)
        self._groups.append(group)

    def _place(self, purpose: str, processes: Sequence[int]) -> tuple[Store, int]:
        # The processes of another slice of a mesh make a group for the same purpose, and so do the
        # segments of a stream.
        key = f"{purpose}/{','.join(map(str, processes))}"
        self._purposes[key] += 1
        store = PrefixStore(f"{key}/{self._purposes[key]}", self.store)
        return store, processes.index(dist.get_rank())

    def close(self, abort: bool = False) -> None:
        """Release all groups, the latest first, as on all processes."""
        groups, self._groups = self._groups[::-1], []
        backends = [group.backend for group in groups if isinstance(group, NcclGroup)]
        # Those of gloo first: an abort may wait for the other ranks to abort too, and they may wait
        # for this rank's connections to end.
        for group in groups:
            group.end()
        end(backends, abort)


def goes_over_nccl(device: torch.device | None) -> bool:
    """Whether NCCL sends the tensors of a device; otherwise gloo does."""
    return device is not None and device.type == "cuda"


def timeout_of_user() -> timedelta:
    """That of the default process group, where there is one."""
    if dist.is_initialized():
        group = _get_default_group()
        for device in group._device_types:
            with suppress(RuntimeError):  # it has no backend for it
                timeout: timedelta = group._get_backend(device).options._timeout
                return timeout
    return default_pg_timeout


# What torch's ProcessGroupNCCL does is in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; schedir
# builds on this:
#
# - `pointToPoint`: a send or receive alone goes over a communicator of its two ranks, those within
#   `startCoalescing` and `endCoalescing` over one of the whole group, as collectives do; each has a
#   stream of its own. So one group uses one of the two ways alone. Inside, no call returns a work;
#   the one at the end is of all, and holds none of their tensors once it is waited for, as that of
#   a transfer or sum alone would (`batch_isend_irecv` and `_coalescing_manager`, which do that for
#   torch's own groups, are in torch/distributed/distributed_c10d.py).
# - It calls `recordStream` for what a transfer uses: what is freed then goes to nobody before the
#   host has seen the transfer's stream come past; see `schedir.runtime.program.transfers`.
# - A work's `wait` has the current stream wait, not the host. `is_completed` is true of a work that
#   has failed as well; `wait` then aborts its communicator and raises.
# - What is posted first makes the communicator, and blocks the host until all of its processes have
#   come; no time limit holds for that, and the watchdog does not see it.
# - `shutdown` waits for what is under way, `abort` does not. Each ends its kernels first and then
#   frees memory, which waits for the kernels of all communicators, and does so on a thread of its
#   own that the caller waits for: several are aborted at the same time, or the first one waits for
#   what only the others would end. (A group of NCCL's calls around them, as `_abort_process_group`
#   of distributed_c10d.py has, does not reach those threads.) An abort may never return, where it
#   joins a thread of NCCL's that waits for the network (nccl, issues 863 and 1777).
# - The destructor joins the watchdog, which sleeps for a minute once it has seen an error, to let
#   others write their flight recorders.
# - The first group of a process, of whatever library, tells it its rank (`globalRank`).
# - The watchdog ends the process where a work is not done in time, counted from its post.

_WATCHDOG = timedelta(minutes=10)  # torch's own default
_MOST_OF_A_TRANSFER = 8  # multiprocessors; more make no single transfer faster
ABORT = 20.0
"""Seconds that all aborts together may take."""


@attrs.frozen
class Asked:
    """A request for a communicator of NCCL, equal on all of its processes: for sums, or for
    transfers from the one to the other process of each of the `channels`."""

    purpose: str
    processes: tuple[int, ...]
    channels: tuple[tuple[int, int], ...] = ()

    @property
    def sums(self) -> bool:
        """Whether it is for sums."""
        return not self.channels


class NcclGroup(Group):
    """A process group of NCCL: the request for it, `asked`, and the communicator once it is made.

    Posted works are noted in `posted`, because waiting for one makes the device wait, and not the
    host.
    """

    def __init__(self, asked: Asked, device: torch.device | None, posted: list[dist.Work]) -> None:
        super().__init__(None)
        self.asked, self._device, self._posted = asked, device, posted

    def warm_up(self) -> Sequence[dist.Work]:
        """Post what makes the communicator, and connects the ends of its channels: a number on
        each, on all of its processes at once."""
        own, place = dist.get_rank(), self.asked.processes.index
        posts = [
            Post(torch.zeros(1, device=self._device), place(peer), sends)
            for source, target in self.asked.channels
            for end, peer, sends in ((source, target, True), (target, source, False))
            if end == own
        ]
        if posts:
            return [self.together(posts)]
        return [self.allreduce([torch.zeros(1, device=self._device)])]

    def together(self, posts: Iterable[Post]) -> dist.Work:
        """Post several as one, so that no order among them can block."""
        return self._as_one(
            lambda: [(self.send if p.sends else self.recv)([p.tensor], p.peer, 0) for p in posts]
        )

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group, coalesced too: a plain work would keep its tensors, and
        so the gradients of a step, as long as it is noted."""
        return self._as_one(partial(super().allreduce, tensors))

    def _as_one(self, post: Callable[[], object]) -> dist.Work:
        """Post everything that `post` posts as one."""
        self.backend._start_coalescing()
        try:
            post()
        finally:
            work: dist.Work = self.backend._end_coalescing()
        self._posted.append(work)
        return work


@attrs.frozen
class Shares:
    """The multiprocessors of a GPU that a communicator may take, for transfers and for sums."""

    transfer: int
    sum: int


def shares(processors: int, transfers: int, sums: int) -> Shares:
    """The shares of a process with these numbers of communicators for transfers and for sums.

    The kernels of all communicators run at the same time, because a receive is a kernel that runs
    until its data has come. Half of the GPU is left for compute, which the receives wait for. NCCL
    rounds the number of blocks of a transfer up to a power of two (`ncclTopoComputeP2pChannels`;
    nccl, issue 1598), so a transfer's share is a power of two. Sums take what transfers leave. On
    132 multiprocessors, four communicators for transfers may take 8 each, and three for sums 11
    each. If a GPU has too few for that, each takes one.
    """
    half = processors // 2
    for_transfers = half // 2 if sums else half
    each = max(1, min(_MOST_OF_A_TRANSFER, for_transfers // max(1, transfers)))
    transfer = 1 << (each.bit_length() - 1)
    return Shares(transfer, max(1, (half - transfers * transfer) // max(1, sums)))


def rounds(groups: Iterable[Collection[int]]) -> list[int]:
    """The round in which each group is made; a group is given by its members.

    All processes of a communicator must come to make it, and none goes on before. One after the
    other, the communicators of a pipeline would take long. In a round each process makes at most
    one, so many are made at the same time:

        ring of 4 ranks    round 0   0─1   2─3
                           round 1   1─2   3─0     as many rounds as a rank has groups, or some more

    Each group goes to the first round in which none of its members has another group, so processes
    that list the groups in the same order get the same rounds. Groups of two members, with at most
    n groups a process, take fewer than 2 n rounds (an edge colouring); neighbours that are listed
    in turn take about n.
    """
    found: list[int] = []
    taken: dict[int, set[int]] = defaultdict(set)  # by member, the rounds in which it has a group
    for members in groups:
        busy = set().union(*(taken[member] for member in members))
        found.append(next(turn for turn in count() if turn not in busy))
        for member in members:
            taken[member].add(found[-1])
    return found


def in_turn(groups: Sequence[Collection[int]], own: int) -> list[int]:
    """The numbers of the groups that a process is in, in the order in which it makes them."""
    here = (number for number, members in enumerate(groups) if own in members)
    return sorted(here, key=rounds(groups).__getitem__)


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
    # High priority: results are sent before more is computed.
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # The watchdog counts from the post, which may be a call ahead of the device, and ends the
    # process without saying where it stands. It is only for a host that hangs.
    options._timeout = max(2 * timeout, _WATCHDOG)
    # The flight recorder uses these names in its files.
    options.group_name = name
    options.global_ranks_in_group = list(processes)
    if max_ctas is not None and hasattr(options, "config"):  # of NCCL 2.17
        options.config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, position, len(processes), options)


def end(backends: Sequence[Any], abort: bool) -> None:
    """Destroy communicators, which would outlive their groups: after the work under way or, with
    `abort`, at once.

    Aborts that have not ended after 20 seconds are left to their threads, which end with the
    process.
    """
    if not abort:
        for backend in backends:
            backend.shutdown()
        return
    threads = [Thread(target=_abort, args=(backend,), daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    until = monotonic() + ABORT
    for thread in threads:
        thread.join(max(0.0, until - monotonic()))
    for backend in backends:  # never free it: the process might not end for a minute
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # it has failed already
        backend.abort()
