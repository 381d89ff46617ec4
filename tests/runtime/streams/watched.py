"""Runs an executor of all ranks on a fake device, and says what its streams race for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from schedir.runtime.accelerator import Host
from schedir.runtime.program import compute
from schedir.runtime.program.instruction import Bound, Instruction
from schedir.runtime.stage import weights
from schedir.runtime.transports import InProcessTransport
from tests.runtime.streams.clocks import FakeDevice
from tests.runtime.streams.communicators import Communicators
from tests.runtime.streams.sanitizer import Graphs, Sanitizer


@contextmanager
def watching(device: FakeDevice, communicators: bool) -> Iterator[pytest.MonkeyPatch]:
    """Executors that are made inside run on the device: their transfers are copies that ranks make
    of each other's tensors, or go over `communicators`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedir.runtime.plan.accelerator_of", lambda _: device)
        patch.setattr("schedir.runtime.program.program.listening", lambda: [_tells(device)])
        post = InProcessTransport.post

        def posted(hub: InProcessTransport, *end: Any, **options: Any) -> Any:
            # Messages are in the host's memory, which no stream touches.
            on_host = type(hub._accelerator) is Host
            with _disable_current_modes() if on_host else nullcontext():
                return post(hub, *end, **options)

        patch.setattr(InProcessTransport, "post", posted)
        if communicators:
            patch.setattr("schedir.runtime.session.InProcessTransport", _transport)
            patch.setattr("schedir.runtime.transports.Endpoint.channel", "rank")
        engine = torch.autograd.Variable._execution_engine
        patch.setattr("torch.autograd._engine_run_backward", _joined(device, engine.run_backward))
        for module in (compute, weights):
            patch.setattr(module, "run_backward", _joined(device, weights.run_backward))
        with Graphs(device), Sanitizer(device):
            yield patch


def _transport(accelerator: Any) -> Any:
    """The transport of payloads, or of messages."""
    return (InProcessTransport if type(accelerator) is Host else Communicators)(accelerator)


def _joined(device: FakeDevice, run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose caller comes after all that it has added to gradients."""

    def joined(outputs: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return run_backward(outputs, *arguments, **options)
        finally:
            device.join()

    return joined


def _tells(device: FakeDevice) -> Callable[[Instruction], Instruction]:
    """An observer that tells the device what is carried out."""

    def observer(instruction: Instruction) -> Instruction:
        place = _place(instruction)

        def telling(run: Bound) -> Bound:
            def told() -> None:
                with device.at(place):
                    run()

            return told

        wait = None if instruction.wait is None else telling(instruction.wait)
        return attrs.evolve(instruction, wait=wait, run=telling(instruction.run))

    return observer


def _place(instruction: Instruction) -> str:
    place = f"rank {instruction.rank} #{instruction.index} {instruction.action}"
    return place if instruction.listed else f"what comes before {place}"
