"""What ProcessGroupNCCL does, between processes without GPUs: over gloo, and as strict as NCCL.

Communicators are made by what is posted first on them, which all of their ranks have to do; what is
posted alone has another one than what is posted as one. Each does one thing after the other, on a
thread that stands for its stream. Refused is

- a type that NCCL does not take, and memory that is not in one piece;
- a transfer whose ends differ in type or size, on both of its sides: NCCL would hang, or worse;
- a communicator that is not made by a warmup, and one that is used before the host knows that it
  is made: others may be made in another order, or by what must not wait;
- kernels that leave compute less than half of a GPU: those of a transfer take a power of two of its
  multiprocessors, rounded up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime import plan
from schedir.runtime.accelerator import Host
from schedir.runtime.processes import groups
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.grid import Grid
from schedir.runtime.transports import NcclTransport

_TYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
REFUSED = (torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64)


class RefusedError(Exception):
    """NCCL would not do it, or would hang."""


@attrs.define(eq=False)
class Work:
    """Done once its communicator's thread has done it, and `seen` once the host knows; the current
    stream is the host."""

    done: Future[None]
    seen: bool = False

    def is_completed(self) -> bool:
        self.seen = self.done.done()
        return self.seen

    def wait(self) -> bool:
        self.done.result()
        self.seen = True
        return True


@attrs.frozen(eq=False)
class End:
    """What one rank does of a transfer with a `peer`; of a sum where there is none."""

    tensor: Tensor
    peer: int | None = None
    sends: bool = False

    def __str__(self) -> str:
        size = f"{self.tensor.numel()} of {self.tensor.dtype}"
        if self.peer is None:
            return f"to sum {size}"
        return f"to {'send' if self.sends else 'receive'} {size}"


class Communicator:
    """Some ranks, connected; does one thing after the other."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        self._rank, self._size = rank, size
        self._stream, self._ends = ThreadPoolExecutor(1), ThreadPoolExecutor(16)
        self._turns: Counter[tuple[int, bool]] = Counter()
        self._warm_up: Work | None = None

    def run(self, ends: Sequence[End]) -> Work:
        if self._warm_up is None:
            if any(end.tensor.numel() > 1 for end in ends):
                raise RefusedError(f"{ends[0]} makes a communicator, in the midst of things")
        elif not self._warm_up.seen:
            raise RefusedError(f"{ends[0]} comes before the communicator is known to be made")
        work = Work(self._stream.submit(self._carry_out, ends))
        self._warm_up = self._warm_up or work
        return work

    def _carry_out(self, ends: Sequence[End]) -> None:
        # Each goes on by itself: another rank may have the parts of a batch one after the other.
        under_way = [self._ends.submit(self._meet, end, self._tag(end)) for end in ends]
        for end in under_way:
            end.result()

    def _tag(self, end: End) -> int:
        """That of the j-th transfer on its channel: NCCL has none, and matches them by order."""
        if end.peer is None:
            return 0
        channel = (end.peer, end.sends)
        self._turns[channel] += 1
        return 4 * self._turns[channel] + 2 * (end.sends == (self._rank < end.peer))

    def _meet(self, end: End, tag: int) -> None:
        size = torch.tensor([_TYPES.index(end.tensor.dtype), end.tensor.numel()])
        others = self._sizes(end.peer, size, tag)
        for other in others:
            if not torch.equal(size, other):
                kind, number = other.tolist()
                raise RefusedError(f"{end}, but another end is of {number} of {_TYPES[kind]}")
        if end.peer is None:
            self._gloo.allreduce([end.tensor]).wait()
        else:
            post = self._gloo.send if end.sends else self._gloo.recv
            post([end.tensor], end.peer, tag + 1).wait()

    def _sizes(self, peer: int | None, size: Tensor, tag: int) -> Sequence[Tensor]:
        """What the other ends are of, before anything moves."""
        if peer is None:
            found = [torch.empty_like(size) for _ in range(self._size)]
            self._gloo.allgather([found], [size]).wait()
            return found
        other = torch.empty_like(size)
        for work in (self._gloo.send([size], peer, tag), self._gloo.recv([other], peer, tag)):
            work.wait()
        return [other]


PROCESSORS = 132


class NcclOverGloo:
    """In place of a process group of NCCL; what becomes of it is written to `log`, and the
    multiprocessors that its kernels take to `taken`."""

    def __init__(
        self,
        log: list[str],
        taken: dict[str, int],
        store: Any,
        position: int,
        processes: Sequence[int],
        name: str,
        timeout: timedelta,
        max_ctas: int | None,
    ) -> None:
        self._log, self._store, self._position, self._size = log, store, position, len(processes)
        self._name = name.split("/", 4)[-1]  # without what tells executors apart
        self._communicators: dict[str, Communicator] = {}
        self._as_one: list[End] | None = None
        if max_ctas is not None and not name.endswith("everyone"):
            transfers = self._name.startswith("channel/")
            taken[name] = 1 << (max_ctas - 1).bit_length() if transfers else max_ctas
            if sum(taken.values()) > PROCESSORS // 2:
                raise RefusedError(f"all kernels take {taken} of {PROCESSORS} multiprocessors")
        self._taken, self._name_taken = taken, name

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work | None:
        return self._transfer(End(_taken(tensors), rank, sends=True))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work | None:
        return self._transfer(End(_taken(tensors), rank, sends=False))

    def allreduce(self, tensors: list[Tensor]) -> Work | None:
        end = End(_taken(tensors))
        if self._as_one is not None:
            self._as_one.append(end)
            return None
        return self._whole().run([end])

    def _start_coalescing(self) -> None:
        self._as_one = []

    def _end_coalescing(self) -> Work | None:
        posts, self._as_one = self._as_one, None
        return self._whole().run(posts) if posts else None

    def _transfer(self, end: End) -> Work | None:
        assert end.peer is not None
        if self._as_one is not None:
            self._as_one.append(end)
            return None
        low, high = sorted((self._position, end.peer))
        pair = self._of(f"alone {low}:{high}", int(self._position == high), 2)
        return pair.run([attrs.evolve(end, peer=int(end.peer == high))])

    def _whole(self) -> Communicator:
        return self._of("whole", self._position, self._size)

    def _of(self, key: str, rank: int, size: int) -> Communicator:
        if key not in self._communicators:
            store = dist.PrefixStore(key, self._store)  # type: ignore[attr-defined]
            self._communicators[key] = Communicator(store, rank, size)
            self._log.append(f"make {self._name} {key}")
        return self._communicators[key]

    def _end(self, how: str) -> None:
        if self._communicators:
            self._log.append(f"{how} {self._name}")
        self._taken.pop(self._name_taken, None)
        self._communicators.clear()

    def abort(self) -> None:
        self._end("abort")

    def shutdown(self) -> None:
        self._end("shutdown")


def _taken(tensors: list[Tensor]) -> Tensor:
    (tensor,) = tensors
    if tensor.dtype in REFUSED:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return tensor


@contextmanager
def nccl_over_gloo() -> Iterator[list[str]]:
    """Executors inside take the CPU for a GPU; what their process groups do is in the list."""
    log: list[str] = []
    taken: dict[str, int] = {}

    def backend(*arguments: Any) -> NcclOverGloo:
        return NcclOverGloo(log, taken, *arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(groups, "nccl_backend", backend)
        monkeypatch.setattr(groups, "goes_over_nccl", lambda device: device is not None)
        monkeypatch.setattr(plan, "transport_for", lambda *_: NcclTransport)
        monkeypatch.setattr(Host, "processors", PROCESSORS)
        yield log


def connect_all(made: groups.Groups, processes: Sequence[int]) -> None:
    """Make what was asked of some groups, as an executor of these processes does."""
    grid = Grid(((tuple(processes),),), rank=processes.index(dist.get_rank()))
    control = Control(grid)
    control.connect(made)
    made.connect(control.gather, control.meet, PROCESSORS)
