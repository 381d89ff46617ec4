"""The device that the stages are on: its streams, its events, and where the host waits for it.

All that the runtime has to do with streams goes through an `Accelerator`, so that any device of
torch's will do, the CPU among them, and a test can put one in its place that keeps count of what
happens before what.

    rank 0's stream     0F0 ──mark──┐
    rank 1's stream                 └─wait── copy ── 1F0        the host waits for neither
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from socket import gethostname
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

T = TypeVar("T")


class Mark(Protocol):
    """A point on a stream, with all that was queued there before it."""

    def wait(self) -> None:
        """Have the current stream wait for it; the host does not."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Have the host wait for it."""

    def elapsed_time(self, end: Any) -> float:
        """The milliseconds from here to a later one; both were made with `timed`."""


class Accelerator:
    """A device whose work is queued on streams, while the host goes on.

    `queues` says whether it is one; the CPU, a `Host`, works at once.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        # Who waits for one on CUDA would else keep a core busy.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}
        self._timed: list[Any] = []  # events that keep time, to be recorded again

    def chosen(self) -> AbstractContextManager[object]:
        """Make it the current device inside."""
        context: AbstractContextManager[object] = self._module.device(self.device)
        return context

    def stream(self) -> Any:
        """A new stream."""
        return self._module.Stream(self.device)

    def accumulate_on(self, stream: Any, parameters: Iterable[Tensor]) -> Sequence[object]:
        """Have gradients of parameters be added to on a stream, as long as what this returns lives.

        Else autograd adds on the stream of the first forward whose graph is alive, and other
        streams' backwards and forwards wait for each other there. Its warning of backwards on other
        streams than that is turned off.
        """
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with self.on(stream):
            return [get_gradient_edge(p).node for p in parameters if p.requires_grad]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make it the current stream inside; None leaves the one that is."""
        if stream is None:
            return nullcontext()
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def mark(self, timed: bool = False) -> Mark:
        """A mark on the current stream."""
        if timed and self._timed:
            event: Any = self._timed.pop()
        else:
            event = self._module.Event(enable_timing=timed, **self._event_options)
        self._module.current_stream(self.device).record_event(event)
        mark: Mark = event
        return mark

    def use_again(self, marks: Iterable[Mark], after: object) -> None:
        """Make others of these timed marks after the end of `after`, the last that asks for them:
        a step has two for each of its actions, and to make one costs what a send does."""
        unlike = {id(mark): mark for mark in marks}
        weakref.finalize(after, self._timed.extend, [*unlike.values()]).atexit = False

    def makes(self, tensor: Tensor) -> bool:
        """Whether the host would have to wait for its value."""
        return self.queues and tensor.device.type == self.device.type

    def used(self, tensor: Tensor) -> None:
        """The current stream uses a tensor that another one has made: its memory is not given out
        again before that is done."""
        tensor.record_stream(self._module.current_stream(self.device))

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor to the host, which does not wait for it; returns how to get the copy."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        done = self.mark()

        def fetched() -> Tensor:
            done.synchronize()
            return copy

        return fetched

    def host_memory(self, size: int) -> Tensor:
        """So many bytes of the host's, for copies that it does not wait for."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        """Have the host wait for the values of scalars that the current stream makes."""
        if not scalars:
            return []
        values: list[float] = self.to_host(
            torch.stack([scalar.to(torch.float64) for scalar in scalars])
        )().tolist()
        return values

    def synchronize(self) -> None:
        """Have the host wait for all that is queued."""
        self._module.synchronize(self.device)

    @property
    def name(self) -> str:
        """What no other device is called, and the host that it is in."""
        # A part of a GPU (MIG) has a uuid of its own. Other accelerators have none to tell.
        uuid = getattr(self._module.get_device_properties(self.device), "uuid", None)
        return "" if uuid is None else f"{uuid} of {gethostname()}"

    @property
    def processors(self) -> int:
        """How many kernels can run at once."""
        properties = self._module.get_device_properties(self.device)
        return int(getattr(properties, "multi_processor_count", 1))  # as CUDA and ROCm call it

    def generators(self) -> Iterable[torch.Generator]:
        """The default generators that a forward here may draw from, besides the CPU's."""
        return (self._module.default_generators[self.device.index or 0],)


class _Moment:
    """A mark on the CPU, which has done by then what it was told before."""

    def __init__(self) -> None:
        self._seconds = perf_counter()

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Moment) -> float:
        return 1e3 * (end._seconds - self._seconds)


class Host(Accelerator):
    """The CPU: what it is told is done by the time the call is back."""

    queues = False

    def chosen(self) -> AbstractContextManager[object]:
        """There is one."""
        return nullcontext()

    def stream(self) -> Any:
        """It has none."""
        return None

    def mark(self, timed: bool = False) -> Mark:
        """This moment."""
        return _Moment()

    def used(self, tensor: Tensor) -> None:
        """Memory is given back once nobody refers to it."""

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """It is there."""
        return lambda: tensor

    def host_memory(self, size: int) -> Tensor:
        """So many bytes."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        """They are there."""
        return [float(scalar.item()) for scalar in scalars]

    def synchronize(self) -> None:
        """Nothing is queued."""

    @property
    def name(self) -> str:
        """Processes may share it."""
        return ""

    @property
    def processors(self) -> int:
        """It runs what it is told."""
        return 1

    def generators(self) -> Iterable[torch.Generator]:
        """None but its own."""
        return ()


class Streams:
    """The streams of this process's ranks and stages, each made when it is first asked for.

    Calls that train and others share them: cuBLAS keeps tens of MiB for each.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._made: dict[tuple[str, int], Any] = {}

    def of(self, what: str, number: int) -> Any:
        """The one of a rank or stage that `what` is done on; None on a device without streams."""
        key = what, number
        if key not in self._made:
            self._made[key] = self._accelerator.stream()
        return self._made[key]


class Late(Generic[T]):
    """What `made` makes of a tensor that the device makes, and the host reads after the step.

    To wait for it within a step would let the device run out of work. So it is copied to the host
    behind what makes it, and read when somebody asks for it, or once it is there.
    """

    def __init__(
        self, accelerator: Accelerator, tensor: Tensor, made: Callable[[Tensor], T]
    ) -> None:
        self._accelerator = accelerator
        self._fetch = accelerator.to_host(tensor)
        self._copied = accelerator.mark()
        self._made = made
        self._found: list[T] = []  # once it has been read

    def is_there(self) -> bool:
        """Whether to read it waits for nothing."""
        return bool(self._found) or self._copied.query()

    def __call__(self) -> T:
        """Read it; the host waits for the device until it is there."""
        if not self._found:
            with self._accelerator.chosen():  # for a thread that has chosen none
                copied = self._fetch()
            self._found.append(self._made(copied))
        return self._found[0]


@attrs.frozen(eq=False)
class Unread:
    """What a call leaves to be looked at though nobody may ask for it: a warning may come of it,
    or an error."""

    _unread: list[Late[Any]] = attrs.field(factory=list)

    def add(self, late: Late[Any]) -> None:
        """Look at it later."""
        self._unread.append(late)

    def look(self, wait: bool = False) -> None:
        """Look at what is there, or wait for all."""
        while self._unread and (wait or self._unread[0].is_there()):
            self._unread.pop(0)()


def accelerator_of(device: torch.device) -> Accelerator:
    """What stands for a device."""
    return (Host if device.type == "cpu" else Accelerator)(device)


def current_accelerator() -> Accelerator:
    """What stands for the current device; for the CPU as long as no other is in use."""
    found = torch.accelerator.current_accelerator()
    if found is not None:
        # Not every accelerator's module can tell; no stage is on one that can't, as mps.
        in_use = getattr(torch.get_device_module(found), "is_initialized", bool)
        if in_use():
            return Accelerator(torch.device(found.type, torch.accelerator.current_device_index()))
    return Host(torch.device("cpu"))
