"""A device that queues all its work and comes to it after the step alone, made up for tests.

Whoever waits for it within a step fails: the host must not. Another thread may wait, until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime import fitting, plan, world
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.gradients import sharing
from schedir.runtime.processes.groups import Group
from schedir.runtime.transports.choice import Choice, transport_for

META = torch.device("meta")


class FarDevice(Accelerator):
    """With the CPU's tensors, or on meta, whose tensors have no values to read at all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._over = Event()
        self._over.set()
        self.fetched = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step inside."""
        self._over.clear()
        try:
            yield
        finally:
            self._over.set()

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> Any:
        return object()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self, timed: bool = False) -> _Mark:
        return _Mark(self)

    def used(self, tensor: Tensor) -> None:
        assert tensor.device.type == self.device.type

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        assert tensor.device.type == self.device.type
        copy = torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()

        def fetched() -> Tensor:
            self.synchronize()
            self.fetched += 1
            return copy

        return fetched

    def is_there(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        if current_thread() is main_thread():
            assert self._over.is_set(), "the host waits for the device within a step"
        self._over.wait()

    def generators(self) -> tuple[torch.Generator, ...]:
        return ()


class _Mark:
    def __init__(self, device: FarDevice) -> None:
        self._device = device

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return self._device.is_there()

    def synchronize(self) -> None:
        self._device.synchronize()

    def elapsed_time(self, end: _Mark) -> float:
        self._device.synchronize()
        return 1.0


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> FarDevice:
    """The CPU, as a device that is far away."""
    return _stand_for(torch.device("cpu"), monkeypatch)


@pytest.fixture
def far_meta(monkeypatch: pytest.MonkeyPatch) -> FarDevice:
    """The device meta, which is refused to users; between processes nothing stands for a tensor."""
    monkeypatch.setattr(fitting, "_check_tensors", lambda stage, module: None)
    monkeypatch.setattr(plan, "device_of", lambda stages: META)
    monkeypatch.setattr(sharing, "digest", lambda parameter: 0)  # read before any step
    for module in (plan, world):
        monkeypatch.setattr(module, "transport_for", _without_gpu)
    for name in ("send", "recv", "allreduce"):
        monkeypatch.setattr(Group, name, _of_nothing(getattr(Group, name)))
    return _stand_for(META, monkeypatch)


def _stand_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> FarDevice:
    found = FarDevice(device)
    monkeypatch.setattr(plan, "accelerator_of", lambda device: found)
    return found


def _without_gpu(alone: bool, device: torch.device) -> Choice:
    return transport_for(alone, torch.device("cpu"))


def _of_nothing(post: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    def posted(group: Group, tensors: list[Tensor], *where: int) -> dist.Work:
        if tensors[0].is_meta:
            tensors = [torch.zeros(1)]
        return post(group, tensors, *where)

    return posted
