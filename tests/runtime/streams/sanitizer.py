"""Has a device know of what every torch operation reads and writes, as torch's CUDA sanitizer does.

An operation's arguments are read, unless its schema says that they are written, or only viewed; its
results are written, and where they are new memory, made by the current stream. Backwards are seen
too: they run on the stream of their forward, which is that of their rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.streams.clocks import FakeDevice

_LIKE = re.compile(r"aten::(new_.*|.*_like)")  # they look at shapes alone


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
        for tensor in _tensors(results):
            if tensor.untyped_storage()._cdata not in known:
                self._device.made(tensor)
                writes.append(tensor)
        operator = func.name()
        if operator == "aten::lift_fresh":  # of Python's numbers
            writes += [tensor for tensor in reads if self._device.made(tensor)]
        if reads:
            self._device.access(reads, operator, writes=False)
        if writes:
            self._device.access(writes, operator, writes=True)
        return results


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
