"""Has a device know of what every torch operation reads and writes, as torch's CUDA sanitizer does.

An operation's arguments are read, unless its schema says that they are written, or only viewed; its
results are written, and where they are new memory, made by the current stream. Backwards are seen
too: they run on the stream of their forward, which is that of their rank. But a gradient is added
to on the stream that was current when the accumulator was made, which is the first forward's of
those whose graphs are alive:

    0F0 ──┐ makes it                      0F1 … 0B1 ─ mark ─┐        0B1's caller ─ wait ─
    side  └─ accumulator of 0's weight                     wait ── add ── mark ──────┘
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.streams.clocks import FakeDevice, Stream

_LIKE = re.compile(r"aten::(new_.*|.*_like)")  # they look at shapes alone


_STREAM = "the stream that it was made on"
"""In the metadata of an accumulator, which live as long as it does."""


class Graphs(TorchFunctionMode):
    """Notes on which stream of a device each accumulator is made."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        nodes = [tensor.grad_fn for tensor in _tensors(results) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if _STREAM not in (metadata := _metadata(node)):
                metadata[_STREAM] = self._device.current
                nodes += [below for below, _ in node.next_functions if below is not None]
        return results


class Sanitizer(TorchDispatchMode):
    """Watches all operations inside on behalf of a device."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        names, written, viewed = _meaning(func)
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in given.items():
            if name in written:
                writes += _tensors(value)
            elif name not in viewed:
                reads += _tensors(value)
        known = {t.untyped_storage()._cdata for value in given.values() for t in _tensors(value)}
        operator = func.name()
        with self._device.adding(_accumulates_on(), reads):
            for tensor in _tensors(results):
                if tensor.untyped_storage()._cdata not in known:
                    self._device.made(tensor)
                    writes.append(tensor)
            if operator == "aten::lift_fresh":  # of Python's numbers
                writes += [tensor for tensor in reads if self._device.made(tensor)]
            if reads:
                self._device.access(reads, operator, writes=False)
            if writes:
                self._device.access(writes, operator, writes=True)
        return results


def _accumulates_on() -> Stream | None:
    """The stream of the accumulator that runs now, if one does."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() != "torch::autograd::AccumulateGrad":
        return None
    return _metadata(node).get(_STREAM)


def _metadata(node: Node) -> dict[str, Stream]:
    found: Any = node.metadata  # which is not the function that it says it is
    return cast(dict[str, Stream], found)


@cache
def _meaning(func: Any) -> tuple[list[str], set[str], set[str]]:
    """The names of an operation's arguments, which of them it writes, and which it only views."""
    schema: torch.FunctionSchema = func._schema
    alias = {argument.name: argument.alias_info for argument in schema.arguments}
    written = {name for name, info in alias.items() if info is not None and info.is_write}
    looks = bool(_LIKE.match(schema.name))
    viewed = {name for name, info in alias.items() if info is not None or looks} - written
    return [*alias], written, viewed


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those with memory, of an argument or a result."""
    if isinstance(value, Tensor):
        real = not isinstance(value, FakeTensor) and not value.is_meta
        if real and value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
