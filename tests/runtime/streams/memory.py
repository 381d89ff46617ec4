"""Who has read and written which memory, and what of it no clock orders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import attrs
from torch import Tensor

Extent: TypeAlias = tuple[int, int]
"""From one byte of a storage up to another."""


@attrs.frozen
class Access:
    """A stream, in its own turn, reads or writes a part of some memory."""

    stream: int
    turn: int
    extent: Extent
    writes: bool
    action: str
    operator: str

    def meets(self, other: Access) -> bool:
        """Whether one of them writes what the other one reads or writes."""
        overlap = self.extent[0] < other.extent[1] and other.extent[0] < self.extent[1]
        return overlap and (self.writes or other.writes)

    def before(self, clock: Mapping[int, int]) -> bool:
        """Whether it comes before what has that clock."""
        return clock.get(self.stream, 0) >= self.turn

    def __str__(self) -> str:
        return f"{self.action} ({self.operator})"


@attrs.frozen
class Race:
    """Two accesses that meet, in no order; `freed` where the second is to other tensors, which may
    be given the memory that was freed."""

    first: Access
    second: Access
    freed: bool = False

    @property
    def actions(self) -> tuple[str, str]:
        """What was being carried out at either."""
        return self.first.action, self.second.action

    def __str__(self) -> str:
        did = "written" if self.first.writes else "read"
        if self.freed:
            return (
                f"{self.second} may be given the memory of what {self.first} has {did}, which was "
                "freed, and does not wait for that"
            )
        does = "writes" if self.second.writes else "reads"
        return f"{self.second} {does} what {self.first} has {did}, and does not wait for that"


@attrs.define(eq=False)
class Block:
    """Some memory, made by the stream `owner`; `users` are streams that it is kept for."""

    owner: int
    size: int
    users: set[int] = attrs.field(factory=set)
    _accesses: list[Access] = attrs.field(factory=list)

    def add(self, access: Access, clock: Mapping[int, int]) -> list[Race]:
        """Take in an access of a stream with that clock; what it races with."""
        found = self._racing(access, clock)
        start, end = access.extent
        # What comes before it, and is not looked at for more than it will be, can be forgotten.
        self._accesses = [
            other
            for other in self._accesses
            if not (
                other.before(clock)
                and start <= other.extent[0]
                and other.extent[1] <= end
                and (access.writes or not other.writes)
            )
        ]
        self._accesses.append(access)
        return found

    def given_again(self, access: Access, clock: Mapping[int, int]) -> list[Race]:
        """What its use by another tensor, once it is freed, races with."""
        return [
            Race(race.first, access, freed=True)
            for race in self._racing(access, clock)
            if race.first.stream not in self.users
        ]

    def _racing(self, access: Access, clock: Mapping[int, int]) -> list[Race]:
        return [
            Race(other, access)
            for other in self._accesses
            if other.stream != access.stream and access.meets(other) and not other.before(clock)
        ]


class Memory:
    """The blocks that are in use, by storage."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def note(self, tensor: Tensor, owner: int, free: Callable[[Block], None]) -> bool:
        """Take in a tensor's memory as the owner's, and have `free` told of its end; False where it
        is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return False
        self._blocks[key] = Block(owner, max(storage.nbytes(), 1))
        # A storage's Python object lives as long as the storage does, whoever refers to it.
        weakref.finalize(storage, partial(self._end, key, free)).atexit = False
        return True

    def __getitem__(self, tensor: Tensor) -> Block:
        return self._blocks[tensor.untyped_storage()._cdata]

    def _end(self, key: int, free: Callable[[Block], None]) -> None:
        free(self._blocks.pop(key))


def extent_of(tensor: Tensor) -> Extent:
    """The bytes of its storage that it lies in, gaps and all."""
    size, first = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + (sum((n - 1) * int(step) for n, step in steps) + 1) * size
