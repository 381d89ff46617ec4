"""A device that queues all its work and comes to it after the step alone, made up for tests.

Whoever waits for it within a step fails: the host must not. Another thread may wait, until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Condition, current_thread, main_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime import StepResult, arguments, plan
from schedir.runtime.accelerator import Host, Mark, Reach
from schedir.runtime.engine import Engine
from schedir.runtime.gradients import copies
from schedir.runtime.plan import Choice, transport_for
from schedir.runtime.processes.groups import Group
from schedir.runtime.program import transfers
from schedir.runtime.transports import GlooTransport, Work

META = torch.device("meta")


class FarDevice(Host):
    """With the CPU's tensors, or on meta, whose tensors have no values to read at all."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self.device = device
        self._condition = Condition()
        self._depth = 0  # of steps in one another
        self._over = 0  # steps; what was queued in them is done
        self.fetched = 0
        self.reads = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step inside, or several that are queued behind each other."""
        with self._condition:
            self._depth += 1
        try:
            yield
        finally:
            with self._condition:
                self._depth -= 1
                self._over += not self._depth
                self._condition.notify_all()

    def now(self) -> int:
        """How many steps have to be over until the device has come to here."""
        return self._over + (self._depth > 0)

    def is_past(self, point: int) -> bool:
        """Whether the device has come to a point."""
        return self._over >= point

    def wait_for(self, point: int) -> None:
        """Have the host wait for that."""
        with self._condition:
            if current_thread() is main_thread():
                assert self.is_past(point), "the host waits for the device within a step"
            self._condition.wait_for(lambda: self.is_past(point))

    def stream(self) -> Any:
        return object()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self, timed: bool = False) -> _Mark:
        return _Mark(self)

    def use_again(self, marks: Iterable[Mark], after: object) -> None:
        """Marks cost nothing here."""

    def used(self, tensor: Tensor) -> None:
        assert tensor.device.type == self.device.type

    def to_host(self, tensor: Tensor) -> Tensor:
        assert tensor.device.type == self.device.type
        self.fetched += 1
        return torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()

    def read(self, scalars: Sequence[Tensor], reach: Reach) -> list[float]:
        """Where the host may wait within a step: before OPTIM_STEPs. On meta all is finite."""
        assert all(scalar.device.type == self.device.type for scalar in scalars)
        self.reads += 1
        return [0.0 if scalar.is_meta else float(scalar.item()) for scalar in scalars]

    def synchronize(self) -> None:
        self.wait_for(self.now())


class _Mark(Mark):
    def __init__(self, device: FarDevice) -> None:
        self._device = device
        self._point = device.now()

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return self._device.is_past(self._point)

    def synchronize(self) -> None:
        self._device.wait_for(self._point)

    def elapsed_time(self, end: _Mark) -> float:
        end.synchronize()
        return 1.0


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> FarDevice:
    """The CPU, as a device that is far away."""
    return _stand_for(torch.device("cpu"), monkeypatch)


@pytest.fixture
def far_meta(monkeypatch: pytest.MonkeyPatch) -> FarDevice:
    """The device meta, which is refused to users; between processes nothing stands for a tensor."""
    monkeypatch.setattr(arguments, "_check_tensors", lambda *_: None)
    monkeypatch.setattr(plan, "device_of", lambda stages: META)
    monkeypatch.setattr(copies, "digest", lambda parameter: 0)  # read before any step
    monkeypatch.setattr(plan, "transport_for", _without_gpu)
    monkeypatch.setattr(Group, "allreduce", _of_nothing(Group.allreduce))
    for name in ("send", "receive"):
        real = getattr(GlooTransport, name)
        monkeypatch.setattr(GlooTransport, name, _of_something(real))
    # What first calls send goes through the host, on purpose.
    monkeypatch.setattr(transfers, "_bytes_of", _made_up)
    return _stand_for(META, monkeypatch)


def _made_up(content: Tensor) -> Tensor:
    return torch.zeros(content.nbytes, dtype=torch.uint8, device="cpu")


def _stand_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> FarDevice:
    found = FarDevice(device)
    real = Engine.call

    def call(self: Engine, *arguments: Any, **options: Any) -> StepResult:
        with found.step():
            return real(self, *arguments, **options)

    monkeypatch.setattr(Engine, "call", call)
    monkeypatch.setattr(plan, "accelerator_of", lambda device: found)
    return found


def _without_gpu(alone: bool, device: torch.device) -> Choice:
    return transport_for(alone, torch.device("cpu"))


def _of_something(post: Callable[..., Work]) -> Callable[..., Work]:
    def posted(transport: GlooTransport, tensor: Tensor, peer: int) -> Work:
        return post(transport, torch.zeros(1) if tensor.is_meta else tensor, peer)

    return posted


def _of_nothing(post: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    def posted(group: Group, tensors: list[Tensor], *where: int) -> dist.Work:
        if tensors[0].is_meta:
            tensors = [torch.zeros(1)]
        return post(group, tensors, *where)

    return posted
