"""schedir's own process groups: each has some of the processes, one purpose, and its own keys.

Groups of gloo, between hosts, are made at once. Groups of NCCL are first asked for, one after the
other, and then made together: how much of a GPU each may take depends on all.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain, count
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store
from torch.distributed.rendezvous import rendezvous

from schedir.errors import ExecutionError, SchedirError
from schedir.runtime.processes.failure import (
    Patience,
    WaitError,
    describe,
    end_quietly,
    interface_advice,
    record,
    waiting,
)
from schedir.runtime.processes.grid import slices_of
from schedir.runtime.processes.nccl import Shares, end, in_turn, nccl_backend, shares
from schedir.runtime.processes.noticeboard import Noticeboard, Verdict

_MAKING = "all ranks to make their executors"
_NOT_ALL = "making the executor: not all processes have come together"


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

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a send. Raises WaitError if the other side is gone."""
        try:
            work: dist.Work = _unseen(self.backend.send)(tensors, rank, tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Post a receive. Raises WaitError if the other side is gone."""
        try:
            work: dist.Work = _unseen(self.backend.recv)(tensors, rank, tag)
        except RuntimeError as error:
            raise WaitError(error) from error
        return work

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Post a sum over all of the group."""
        work: dist.Work = _unseen(self.backend.allreduce)(tensors)
        return work

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
            return Message(value, what, rank, post([value], rank, tag))
        except WaitError as error:
            raise WaitError(error.cause, what, process=rank) from error


@attrs.frozen
class Asked:
    """A request for a communicator of NCCL, equal on all of its processes. It `sums`, or it moves
    tensors between two ends."""

    purpose: str
    processes: tuple[int, ...]
    sums: bool


class NcclGroup(Group):
    """A process group of NCCL: the request for it, `asked`, and the communicator once it is made.

    `warm_up` posts the work that makes it, on all of its processes at once. Posted works are noted
    in `posted`, because waiting for one makes the device wait, and not the host.
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
        """Post several as one, so that no order among them can block."""

        def post_all() -> None:
            for post in posts:
                (self.send if post.sends else self.recv)([post.tensor], post.peer, 0)

        return self._as_one(post_all)

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


def wait_for_sum(works: Iterable[dist.Work], whose: str) -> None:
    """Wait for sums over processes. Raises WaitError if they can't complete any more."""
    with waiting(f"the sum of {whose}"):
        for work in works:
            work.wait()


def _unseen(post: Callable[..., Any]) -> Callable[..., Any]:
    """A posting call, hidden from a running profiler.

    A work that the profiler has seen reports its end to it. If that comes after the profile, as for
    receives posted ahead, it writes into freed memory.
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
    """Makes the process groups of one executor, each of some of the processes, for one purpose.

    It does not use torch's new_group: with that, either all processes make all groups, or a group
    is named by how many groups its process has made, and hangs if the members have made different
    numbers.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()
    _told_rank: ClassVar[bool] = False

    def __init__(self, everyone: tuple[int, ...], timeout: timedelta | None) -> None:
        self._name = Groups.named(everyone)
        alone = len(everyone) == 1
        self.store = PrefixStore(self._name, HashStore() if alone else _get_default_store())
        self.timeout = timeout_of_user() if timeout is None else timeout
        self.patience = Patience(self.timeout, Noticeboard(self.store).has_failed)
        self.posted: list[dist.Work] = []  # over NCCL, for whoever follows it
        self._asked: list[NcclGroup] = []
        self._groups: list[Group] = []
        self._first: dict[tuple[tuple[int, ...], bool], Group] = {}  # by processes, and over NCCL
        self._purposes: Counter[str] = Counter()

    @classmethod
    def named(cls, everyone: tuple[int, ...]) -> str:
        """The name of the next groups of these processes. All of them have made, or tried to make,
        the same number of executors together, so they use the same keys."""
        cls._made[everyone] += 1
        return f"schedir/{_attempt()}/{everyone}/{cls._made[everyone]}"

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
        made = self._new(purpose, processes, device)
        self._first.setdefault((tuple(processes), goes_over_nccl(device)), made)
        return made

    def _new(self, purpose: str, processes: Sequence[int], device: torch.device | None) -> Group:
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

    def for_numbers(self, processes: Iterable[int], device: torch.device | None = None) -> Group:
        """The group in which some processes sum a call's numbers: samples at its beginning, norms
        and verdicts after all other sums, so any group of the same processes does."""
        own = tuple(sorted(processes))
        found = self._first.get((own, goes_over_nccl(device)))
        if found is None:
            found = self.make(f"numbers/{','.join(map(str, own))}", own, device)
        return found

    def ask(self, asked: Asked, warm_up: Callable[[NcclGroup], Iterable[dist.Work]]) -> NcclGroup:
        """Ask for a group of NCCL; `warm_up` posts its first work."""
        self._asked.append(NcclGroup(asked, warm_up, self.posted))
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
            everyone = Asked("everyone", tuple(range(dist.get_world_size())), sums=True)
            self._make_backend(NcclGroup(everyone, group.warm_up, self.posted), 1)
        self._make_backend(group, share.sum if group.asked.sums else share.transfer)
        self.settle(group.warm_up(group))

    def settle(self, works: Iterable[dist.Work]) -> None:
        """Wait, on host and device, for works that warm a group up."""
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
            group.backend = None
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


def _attempt() -> str:
    """How often torchrun has started this job again: keys of an earlier attempt are taken."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


_groups_made = count()
_SOON = timedelta(seconds=5)
_kept: list[Store] = []  # until this process ends, so that others can read why


def hello(
    store: Store, everyone: Sequence[int], own: int, said: Any, timeout: timedelta
) -> list[Any]:
    """Tell all processes something that JSON can hold, as process `own`, before there is any group,
    and wait for what they tell, in the order of `everyone`.

    Raises WaitError, with those that have not come, if they don't in time; ExecutionError if one of
    them can't make its executor.
    """
    board = Noticeboard(store)
    keys = {f"hello/{number}": f"process {number}" for number in everyone}
    with waiting(_MAKING, interface_advice()):
        store.set(f"hello/{own}", json.dumps(said))
        try:
            patience = Patience(timeout, board.has_failed)
            patience.until(lambda: store.check([*keys]), lambda: _MAKING, over_network=True)
        except WaitError as stalled:
            verdict = None if stalled.timed_out else board.verdict()
            if verdict is not None:
                line = f"{_NOT_ALL}: process {everyone[verdict.by]}: {verdict.reason}"
                raise ExecutionError(line, one_line=True) from None
            away = (name for key, name in keys.items() if not store.check([key]))
            advice = (
                f"missing: {', '.join(away)}; make the executor on all of them, with a mesh of the "
                "same processes"
            )
            stalled.advice = "; ".join(filter(None, (advice, interface_advice())))
            raise
        return [json.loads(store.get(key)) for key in keys]


@contextmanager
def declining(
    mesh: DeviceMesh | None, pipeline_dim: str, data_dims: Sequence[str]
) -> Iterator[None]:
    """Inside, an error is told to the other processes, so that they don't wait for this one."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, SchedirError) else describe(error)
        # It may not be one of several, or be alone yet.
        with suppress(RuntimeError, ValueError, SchedirError):
            if not dist.is_initialized():
                store, rank, world = _joined(_SOON)
                everyone = tuple(range(world))
            else:
                rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
                if mesh is not None:
                    slices = slices_of(mesh, pipeline_dim, data_dims)
                    everyone = tuple(sorted(slices.flatten().tolist()))
                store = PrefixStore(Groups.named(everyone), _get_default_store())
            if len(everyone) > 1:
                _kept.append(store)
                Noticeboard(store).give(Verdict((), reason, everyone.index(rank)))
        raise


def _joined(timeout: timedelta) -> tuple[Store, int, int]:
    """The store of the processes that torchrun has started, with keys that no group has used; this
    process's rank there, and their number.

    gloo would find the addresses of an earlier group of this job, or of the run before a restart.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(f"schedir/{_attempt()}/{next(_groups_made)}", store), rank, world


def init_process_group(timeout: timedelta | None) -> None:
    """Join the ranks that torchrun has started.

    Raises ExecutionError if they don't come in time, or if one of them can't make its executor.
    """
    limit = default_pg_timeout if timeout is None else timeout
    store, rank, world = _joined(default_pg_timeout)
    try:
        hello(store, range(world), rank, None, limit)
        with waiting(advice=interface_advice()):
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timeout
            )
    except (WaitError, ExecutionError) as error:
        found = error
        if isinstance(error, WaitError):
            advice = error.advice if error.timed_out else ""
            line = "; ".join(filter(None, (f"{_NOT_ALL}: {error}", advice)))
            found = ExecutionError(line, cause=error.cause, one_line=True)
        record(found)
        end_quietly()
        raise found from None
