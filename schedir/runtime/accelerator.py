"""The device of the stages: its streams, its events, and the host's waits for it.

The runtime uses streams only through an `Accelerator`. So any device of torch works, the CPU too,
and a test can replace it by one that tracks what happens before what.

    rank 0's stream     0F0 ──mark──┐
    rank 1's stream                 └─wait── copy ── 1F0        the host waits for neither
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from socket import gethostname
from time import perf_counter
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

T = TypeVar("T")
Reach: TypeAlias = Callable[[Callable[[], bool]], None]
"""Waits until the device has come so far that a function is true; raises if that is in vain."""


class Mark:
    """A point on a stream, after everything that was queued there before: on a device one of its
    events, on the CPU a moment, before which it has finished all its work."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = perf_counter()

    def wait(self) -> None:
        """Make the current stream wait for it; the host does not wait."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        return True

    def synchronize(self) -> None:
        """Make the host wait for it."""

    def elapsed_time(self, end: Any) -> float:
        """The milliseconds from here to a later one; both were made with `timed`."""
        return 1e3 * float(end._seconds - self._seconds)


class Accelerator:
    """A device whose work is queued on streams, while the host goes on.

    `queues` says whether it queues; the CPU, a `Host`, works at once.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        # Without it, a wait for an event on CUDA keeps a core busy.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}
        self._timed: list[Any] = []  # events that keep time, to be recorded again
        self._unchecked: list[Late[object]] = []

    def chosen(self) -> AbstractContextManager[object]:
        """Make it the current device inside."""
        context: AbstractContextManager[object] = self._module.device(self.device)
        return context

    def stream(self) -> Any:
        """A new stream."""
        return self._module.Stream(self.device)

    def accumulate_on(self, stream: Any, parameters: Iterable[Tensor]) -> Sequence[object]:
        """Make autograd add to gradients of parameters on a stream, as long as the result lives.

        Otherwise autograd adds on the stream of the first forward whose graph is alive, and other
        streams' backwards and forwards wait for each other there. Its warning about backwards on
        other streams is turned off.
        """
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with self.on(stream):
            return [get_gradient_edge(parameter).node for parameter in parameters]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make it the current stream inside; None leaves the one that is."""
        if stream is None:
            return nullcontext()
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def mark(self, timed: bool = False) -> Mark:
        """A mark on the current stream."""
        mark: Mark
        if timed and self._timed:
            mark = self._timed.pop()
        else:
            mark = self._module.Event(enable_timing=timed, **self._event_options)
        self._module.current_stream(self.device).record_event(mark)
        return mark

    def use_again(self, marks: Iterable[Mark], after: object) -> None:
        """Reuse these timed marks once `after`, their last user, is freed. A step has two for each
        of its actions, and making one costs as much as a send."""
        unlike = {id(mark): mark for mark in marks}
        weakref.finalize(after, self._timed.extend, [*unlike.values()]).atexit = False

    def makes(self, tensor: Tensor) -> bool:
        """Whether the host would have to wait for a tensor's value."""
        return self.queues and tensor.device.type == self.device.type

    def used(self, tensor: Tensor) -> None:
        """Note that the current stream uses a tensor of another stream, so that its memory is not
        reused before that use is done."""
        tensor.record_stream(self._module.current_stream(self.device))

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host, which does not wait; a later mark tells when it is there."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def host_memory(self, size: int) -> Tensor:
        """Host memory of `size` bytes, for copies that the host does not wait for."""
        pinned = self.device.type != "cpu"
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def read(self, scalars: Sequence[Tensor], reach: Reach) -> list[float]:
        """Make the host wait for the values of scalars that the current stream makes.

        Raises what `reach` raises if they never come.
        """
        if not scalars:
            return []
        stacked = torch.stack([scalar.to(torch.float64) for scalar in scalars])
        values: Late[list[float]] = Late(self, stacked, Tensor.tolist)
        reach(values.is_there)
        return values()

    def check_later(self, tensor: Tensor, check: Callable[[Tensor], object]) -> None:
        """Have `look` check a tensor of this call, though nobody may ask for it."""
        self._unchecked.append(Late(self, tensor, check))

    def look(self, wait: bool = False) -> None:
        """Check what calls have left and the device has come to; with `wait`, all of it. A check
        may warn, or raise ExecutionError."""
        while self._unchecked and (wait or self._unchecked[0].is_there()):
            self._unchecked.pop(0)()

    def synchronize(self) -> None:
        """Make the host wait for everything that is queued."""
        self._module.synchronize(self.device)

    @property
    def name(self) -> str:
        """A name that no other device has, with its host; empty if the device has none, as the CPU,
        which processes may share."""
        # A part of a GPU (MIG) has its own uuid. Other accelerators may have none.
        uuid = getattr(self._properties(), "uuid", None)
        return "" if uuid is None else f"{uuid} of {gethostname()}"

    @property
    def processors(self) -> int:
        """How many kernels can run at once."""
        # As CUDA and ROCm call it.
        return int(getattr(self._properties(), "multi_processor_count", 1))

    def _properties(self) -> object:
        return self._module.get_device_properties(self.device)

    def generators(self) -> Iterable[torch.Generator]:
        """The default generators that a forward here may draw from, besides the CPU's."""
        return (self._module.default_generators[self.device.index or 0],)


class Host(Accelerator):
    """The CPU: work is done when the call returns."""

    queues = False

    def chosen(self) -> AbstractContextManager[object]:
        """Do nothing: there is only one CPU."""
        return nullcontext()

    def stream(self) -> Any:
        """None: the CPU has no streams."""
        return None

    def mark(self, timed: bool = False) -> Mark:
        """This moment."""
        return Mark()

    def use_again(self, marks: Iterable[Mark], after: object) -> None:
        """Do nothing: the marks of a CPU cost nothing to make anew."""

    def used(self, tensor: Tensor) -> None:
        """Do nothing: memory is freed when nothing refers to it."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor itself: it is on the host."""
        return tensor

    def read(self, scalars: Sequence[Tensor], reach: Reach) -> list[float]:
        """Return the values of scalars."""
        return [float(scalar.item()) for scalar in scalars]

    def synchronize(self) -> None:
        """Do nothing: nothing is queued."""

    def _properties(self) -> object:
        return None  # torch knows of none

    def generators(self) -> Iterable[torch.Generator]:
        """No generators besides the CPU's."""
        return ()


Streams: TypeAlias = Callable[[str, int], Any]
"""The stream of a rank or stage for a purpose; None on a device without streams."""


def streams_of(accelerator: Accelerator) -> Streams:
    """The streams of this process's ranks and stages, each made when it is first asked for.

    Calls that train and others share them: cuBLAS keeps tens of MiB for each.
    """
    return cache(lambda purpose, number: accelerator.stream())


class Late(Generic[T]):
    """A value that `made` computes from a tensor on the device; the host reads it after the step.

    Waiting for it within a step would let the device run out of work. So the tensor is copied to
    the host behind the work that makes it, and read on request, or once it is there.
    """

    def __init__(
        self, accelerator: Accelerator, tensor: Tensor, made: Callable[[Tensor], T]
    ) -> None:
        self._accelerator = accelerator
        self._copy = accelerator.to_host(tensor)
        self._copied = accelerator.mark()
        self._made = made
        self._found: list[T] = []  # the value, once it has been read

    def is_there(self) -> bool:
        """Whether it can be read without a wait."""
        return bool(self._found) or self._copied.query()

    def __call__(self) -> T:
        """Read it; the host waits for the device until it is there."""
        if not self._found:
            with self._accelerator.chosen():  # a thread may not have chosen the device
                self._copied.synchronize()
            self._found.append(self._made(self._copy))
        return self._found[0]


def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator of a device."""
    return (Host if device.type == "cpu" else Accelerator)(device)


def current_accelerator() -> Accelerator:
    """The accelerator of the current device; the CPU's as long as no other device is in use."""
    found = torch.accelerator.current_accelerator()
    if found is not None:
        # Some accelerators' modules can't tell, such as mps; no stage is on one of those.
        in_use = getattr(torch.get_device_module(found), "is_initialized", bool)
        if in_use():
            return Accelerator(torch.device(found.type, torch.accelerator.current_device_index()))
    return Host(torch.device("cpu"))
