"""What ProcessGroupNCCL does, between processes without GPUs: over gloo, and as strict as NCCL.

Communicators are made by what is posted first on them, which all of their ranks have to do; what is
posted alone has another one than what is posted as one. Each does one thing after the other, on a
thread that stands for its stream. Types that NCCL does not take are refused, and so is memory that
is not in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from schedir.runtime.processes import groups
from schedir.runtime.processes.nccl import Settings
from schedir.runtime.transports.nccl import NcclTransport

REFUSED = (torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.uint64)


@attrs.frozen(eq=False)
class Work:
    """Done once its communicator's thread has done it; the current stream is the host."""

    done: Future[None]

    def is_completed(self) -> bool:
        return self.done.done()

    def wait(self) -> bool:
        self.done.result()
        return True


class Communicator:
    """Some ranks, connected; does one thing after the other."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        self._stream = ThreadPoolExecutor(1)

    def run(self, posts: Sequence[Callable[[Any], dist.Work]]) -> Work:
        def carry_out() -> None:
            for work in [post(self._gloo) for post in posts]:
                work.wait()

        return Work(self._stream.submit(carry_out))


class NcclOverGloo:
    """In place of a process group of NCCL; what becomes of it is written to `log`."""

    def __init__(
        self,
        log: list[str],
        store: Any,
        position: int,
        processes: Sequence[int],
        name: str,
        settings: Settings,
    ) -> None:
        self._log, self._store, self._position, self._size = log, store, position, len(processes)
        self._name = name.split("/", 4)[-1]  # without what tells executors apart
        self.settings = settings
        self._communicators: dict[str, Communicator] = {}
        self._as_one: list[Callable[[Any], dist.Work]] | None = None

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work | None:
        (tensor,) = map(_taken, tensors)
        return self._transfer(rank, lambda gloo, peer: gloo.send([tensor], peer, 0))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work | None:
        (tensor,) = map(_taken, tensors)
        return self._transfer(rank, lambda gloo, peer: gloo.recv([tensor], peer, 0))

    def allreduce(self, tensors: list[Tensor]) -> Work:
        (tensor,) = map(_taken, tensors)
        return self._whole().run([lambda gloo: gloo.allreduce([tensor])])

    def _start_coalescing(self) -> None:
        self._as_one = []

    def _end_coalescing(self) -> Work:
        posts, self._as_one = self._as_one, None
        assert posts
        return self._whole().run(posts)

    def _transfer(self, rank: int, post: Callable[[Any, int], dist.Work]) -> Work | None:
        if self._as_one is not None:
            self._as_one.append(lambda gloo: post(gloo, rank))
            return None
        low, high = sorted((self._position, rank))
        pair = self._of(f"alone {low}:{high}", int(self._position == high), 2)
        return pair.run([lambda gloo: post(gloo, int(rank == high))])

    def _whole(self) -> Communicator:
        return self._of("whole", self._position, self._size)

    def _of(self, key: str, rank: int, size: int) -> Communicator:
        if key not in self._communicators:
            store = dist.PrefixStore(key, self._store)  # type: ignore[attr-defined]
            self._communicators[key] = Communicator(store, rank, size)
            self._log.append(f"make {self._name} {key}")
        return self._communicators[key]

    def abort(self) -> None:
        self._log.append(f"abort {self._name}")
        self._communicators.clear()

    def shutdown(self) -> None:
        self._log.append(f"shutdown {self._name}")
        self._communicators.clear()

    def _group_start(self) -> None:
        self._log.append("group start")

    def _group_end(self) -> None:
        self._log.append("group end")


def _taken(tensor: Tensor) -> Tensor:
    if tensor.dtype in REFUSED:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return tensor


@contextmanager
def nccl_over_gloo() -> Iterator[list[str]]:
    """Executors inside take the CPU for a GPU; what their process groups do is in the list."""
    log: list[str] = []

    def backend(*arguments: Any) -> NcclOverGloo:
        return NcclOverGloo(log, *arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(groups, "nccl_backend", backend)
        monkeypatch.setattr(groups, "goes_over_nccl", lambda device: device is not None)
        monkeypatch.setattr(plan, "transport_for", lambda *_: NcclTransport)
        yield log
