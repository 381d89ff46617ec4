"""A device whose streams are vector clocks: it knows of what each stream has done and waited for.

    rank 0   F0 ──mark───────┐              a stream's clock says up to where it has each stream
    rank 1          F1 ────wait── B1        behind it: B1 is after F0, F1 is not

What runs on the device runs at once, on the CPU; only the order that the streams are promised
counts, so that a wait that is missing shows even where all went well by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.runtime import accelerator
from schedir.runtime.accelerator import Host
from tests.runtime.streams.memory import Access, Block, Memory, Race, extent_of

Clock: TypeAlias = dict[int, int]
"""By stream, how much of what it has done comes before."""

CALLER = "the caller"


def advance(clock: Clock, other: Clock) -> None:
    """Have a clock come after another one."""
    for stream, turn in other.items():
        if clock.get(stream, 0) < turn:
            clock[stream] = turn


@attrs.define(eq=False)
class Stream:
    """One queue of the device."""

    number: int
    clock: Clock


@attrs.frozen(eq=False)
class Mark(accelerator.Mark):
    """A point on a stream."""

    device: FakeDevice
    clock: Clock

    def wait(self) -> None:
        """Have the current stream wait, unless this is the wait that the test leaves out."""
        self.device.wait_for(self.clock)

    def query(self) -> bool:
        """Never known: the device may be slow."""
        return False

    def synchronize(self) -> None:
        """Have the host wait, and so all that it queues from now on."""
        self.device.settle(self.clock)

    def elapsed_time(self, end: Mark) -> float:
        """It keeps no time."""
        return 0.0


class FakeDevice(Host):
    """Keeps the clocks of its streams, and the `races`: accesses to memory that no clock orders.

    `doing` is what the host carries out. Of the `waits`, each with what was being done and the
    number of the stream, the one of number `left_out` is ignored; `needless` are the numbers of
    those that say nothing new. Stream 0 is the caller's.
    """

    queues = True

    def __init__(self, left_out: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.memory = Memory()
        self.doing = CALLER
        self.races: list[Race] = []
        self.waits: list[tuple[str, int]] = []
        self.needless: set[int] = set()
        self._left_out = left_out
        self._host: Clock = {}
        self._freed: dict[int, list[Block]] = {}
        self._streams: list[Stream] = []
        self._added: list[Stream] = []
        self.current = self.stream()

    def stream(self) -> Stream:
        """A new stream, behind nothing but what the host has waited for."""
        self._streams.append(Stream(len(self._streams), dict(self._host)))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def mark(self, timed: bool = False) -> Mark:
        """All that the current stream has queued, and what that comes after."""
        return Mark(self, dict(self.current.clock))

    def use_again(self, marks: Iterable[object], after: object) -> None:
        """Marks cost nothing here."""

    def used(self, tensor: Tensor) -> None:
        """The tensor's memory is not given out before the current stream is done with it."""
        self._block(tensor).users.add(self.current.number)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def synchronize(self) -> None:
        for stream in self._streams:
            self.settle(stream.clock)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """The host carries this out inside."""
        before, self.doing = self.doing, place
        try:
            yield
        finally:
            self.doing = before

    def wait_for(self, clock: Clock) -> None:
        own, number = self.current.clock, len(self.waits)
        self.waits.append((self.doing, self.current.number))
        if all(own.get(stream, 0) >= turn for stream, turn in clock.items()):
            self.needless.add(number)
        if number != self._left_out:
            advance(own, clock)

    @contextmanager
    def adding(self, accumulator: Stream | None, added: Sequence[Tensor]) -> Iterator[None]:
        """A backward of the current stream adds to gradients on that of their accumulator, inside:
        autograd has it wait for what is `added`, and keeps that memory from others."""
        if accumulator is None:
            yield
            return
        advance(accumulator.clock, self.current.clock)
        self._added.append(accumulator)
        with self.on(accumulator):
            for tensor in added:
                self.used(tensor)
            yield

    def join(self) -> None:
        """A backward is over: autograd has its caller's stream wait for all that was added."""
        for stream in self._added:
            advance(self.current.clock, stream.clock)
        self._added.clear()

    def settle(self, clock: Clock) -> None:
        advance(self._host, clock)
        for stream in self._streams:
            advance(stream.clock, self._host)

    def unjoined(self) -> list[int]:
        """The streams that have done something which the current one does not come after."""
        own = self.current.clock
        return [
            stream.number
            for stream in self._streams
            if own.get(stream.number, 0) < stream.clock.get(stream.number, 0)
        ]

    def access(self, tensors: Iterable[Tensor], operator: str, writes: bool) -> None:
        """The current stream reads or writes tensors, at one point."""
        stream = self.current
        turn = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for block in self._freed.pop(stream.number, ()):
            again = Access(stream.number, turn, (0, block.size), True, self.doing, operator)
            self.races += block.given_again(again, stream.clock)
        for tensor in tensors:
            block = self._block(tensor)
            access = Access(stream.number, turn, extent_of(tensor), writes, self.doing, operator)
            self.races += block.add(access, stream.clock)

    def made(self, tensor: Tensor) -> bool:
        """Note a tensor that the current stream may have made; False where its memory is known."""
        return self.memory.note(tensor, self.current.number, self._free)

    def _block(self, tensor: Tensor) -> Block:
        self.memory.note(tensor, 0, self._free)  # it was there before
        return self.memory[tensor]

    def _free(self, block: Block) -> None:
        """The stream that made it may write to its memory with whatever it does next."""
        self._freed.setdefault(block.owner, []).append(block)
