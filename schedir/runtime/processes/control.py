"""The small talk between ranks: schedules compared, shapes passed along, the loss handed round.

It has a gloo group of its own, on CUDA too, so that it never meets the pipeline's traffic.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.grid import Grid
from schedir.runtime.processes.groups import Group, Groups

_OBJECT_TAG = 0
LOSS_TAG = 1
COUNT_TAG = 2
NORM_TAG = 3
_ROOM_TAG = 4
DRIFT_TAG = 5
PIPELINE_TAG = 6
RANK_TAG = 7
_WORDS = {
    LOSS_TAG: "the loss",
    COUNT_TAG: "the samples",
    NORM_TAG: "the norms",
    _ROOM_TAG: "the buffers",
    DRIFT_TAG: "the weights' fingerprint",
}


class _Posted:
    """A message under way. gloo lets a work be waited for once only.

    `what` comes from, or goes to, the process of that number: for the error if it never does.
    """

    def __init__(
        self, group: Group, value: Tensor, number: int, tag: int, what: str, *, comes: bool
    ) -> None:
        self._what = f"{what} process {number}"
        self._value = value
        self._work: dist.Work | None = None
        self._dropped = False
        try:
            self._work = (group.recv if comes else group.send)([value], number, tag)
        except WaitError as error:
            raise WaitError(error.cause, self._what) from error

    def wait(self) -> Tensor:
        if self._dropped:
            raise WaitError(RuntimeError("the executor has failed since"), self._what)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise WaitError(error, self._what) from error
            self._work = None
        return self._value

    def drop(self) -> None:
        """Let its connection go; whoever has not waited yet waits in vain."""
        self._dropped = self._work is not None
        self._work = None


class Exchange:
    """Vectors that processes give each other; the receives are posted."""

    def __init__(self, control: Control, tag: int, coming: Sequence[_Posted | None]) -> None:
        self._control = control
        self._tag = tag
        self._coming = coming
        self._own: Tensor | None = None

    def give(self, own: Tensor, listeners: Iterable[int]) -> Exchange:
        """Send `own` on its way to these numbers."""
        self._own = own
        self._control.tell(own, listeners, self._tag)
        return self

    def result(self) -> list[Tensor]:
        """Wait for all that is expected, and give it in that order, one's own among it."""
        found = (self._own if posted is None else posted.wait() for posted in self._coming)
        return [vector for vector in found if vector is not None]


class Relay:
    """A vector of integers from the first of some processes to all of them, once a call.

    It goes over a binomial tree: member i hears from i without its lowest bit. Its receive is
    always posted one call ahead, so what is sent arrives whether the receiver calls or not.
    """

    def __init__(self, group: Group, members: Sequence[int], own: int, size: int, tag: int) -> None:
        place = members.index(own)
        self._group, self._size, self._tag = group, size, tag
        self._parent = members[place & (place - 1)] if place else None
        below = (place | 1 << bit for bit in reversed(range(len(members).bit_length())))
        # Those whose lowest bit is the one that was added.
        self._children = [
            members[child]
            for child in below
            if child != place and child & (child - 1) == place and child < len(members)
        ]
        self._going: list[_Posted] = []
        self._coming = self._post()

    def _post(self) -> _Posted | None:
        if self._parent is None:
            return None
        heard = torch.empty(self._size, dtype=torch.int64)
        return _Posted(self._group, heard, self._parent, self._tag, "the call of", comes=True)

    def pass_on(self, own: Tensor) -> Tensor:
        """The first member's vector, on every member; only its own counts."""
        for posted in self._going:
            posted.wait()
        said = own
        if self._coming is not None:
            said = self._coming.wait()
            self._coming = self._post()
        self._going = [
            _Posted(self._group, said, child, self._tag, "its call to reach", comes=False)
            for child in self._children
        ]
        return said

    def leave(self, own: Tensor) -> None:
        """Say a last word, if this member is the first, to whoever is still there."""
        if self._coming is None:
            with suppress(WaitError):
                self.pass_on(own)
                for posted in self._going:
                    posted.wait()

    def drop(self) -> None:
        """Forget what is under way."""
        self._coming = None
        self._going.clear()


class Control:
    """The control group of the processes of one executor.

    Ranks are those of the schedule, in this process's own pipeline; *numbers* are the group's, over
    all pipelines.
    """

    def __init__(self, grid: Grid) -> None:
        self._numbers = [grid.number(rank) for rank in range(grid.ranks)]
        self._own = grid.number(grid.rank)
        self._all = len(grid.everyone)
        self._everyone = grid.everyone
        self._relays: list[Relay] = []
        self._earlier: list[_Posted] = []  # by the steps before
        self._posted: list[_Posted] = []

    def connect(self, groups: Groups) -> None:
        """Make the group. Raises WaitError where the other processes don't come in time."""
        self._group = groups.make("control", self._everyone)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by number, on each of them."""
        # By hand, not as a collective: gloo's threads drop a collective's tensors some time after
        # it is done, and abort the process if Python is shutting down by then.
        if self._own:
            self._send(value, 0)
            found: list[Any] = self._receive(0)
            return found
        found = [value, *(self._receive(number) for number in range(1, self._all))]
        for number in range(1, self._all):
            self._send(found, number)
        return found

    def relay(self, members: Sequence[int], size: int, tag: int) -> Relay:
        """A relay between some numbers, of which this process is one."""
        self._relays.append(Relay(self._group, members, self._own, size, tag))
        return self._relays[-1]

    def send(self, value: object, rank: int) -> None:
        """Send any object; `receive` on the other side takes it."""
        self._send(value, self._numbers[rank])

    def receive(self, rank: int) -> Any:
        """Receive what `send` sends."""
        return self._receive(self._numbers[rank])

    def _send(self, value: object, number: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        for part in (size, content):
            what = "a message to reach"
            _Posted(self._group, part, number, _OBJECT_TAG, what, comes=False).wait()

    def _receive(self, number: int) -> Any:
        what = "a message from"
        size = torch.empty(1, dtype=torch.int64)
        _Posted(self._group, size, number, _OBJECT_TAG, what, comes=True).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        _Posted(self._group, content, number, _OBJECT_TAG, what, comes=True).wait()
        return pickle.loads(content.numpy().tobytes())  # from a process of the same job

    def share(self, value: int) -> list[int]:
        """A number of each rank of this pipeline, by rank, on each of them."""
        exchange = self.expect(dict.fromkeys(self._numbers, 1), _ROOM_TAG)
        own = torch.tensor([value], dtype=torch.float64)
        return [int(heard) for heard in exchange.give(own, self._numbers).result()]

    def expect(self, sizes: Mapping[int, int], tag: int) -> Exchange:
        """Post receives of vectors of float64, from these numbers and of these sizes."""
        coming = {n: self._hear(size, n, tag) for n, size in sizes.items() if n != self._own}
        self._posted += coming.values()
        return Exchange(self, tag, [coming.get(number) for number in sizes])

    def tell(self, value: Tensor, numbers: Iterable[int], tag: int) -> None:
        """Send a vector on its way to these numbers."""
        for number in numbers:
            if number != self._own:
                what = f"{_WORDS[tag]} to reach"
                self._posted.append(_Posted(self._group, value, number, tag, what, comes=False))

    def _hear(self, size: int, number: int, tag: int) -> _Posted:
        heard = torch.empty(size, dtype=torch.float64)
        return _Posted(self._group, heard, number, tag, f"{_WORDS[tag]} of", comes=True)

    def settle(self) -> None:
        """Wait for what the steps before this one have posted, so that nothing piles up."""
        for posted in self._earlier:
            posted.wait()
        self._earlier, self._posted = self._posted, []

    def drop(self) -> None:
        """Forget what is under way."""
        for relay in self._relays:
            relay.drop()
        for posted in (*self._earlier, *self._posted):
            posted.drop()
        self._earlier, self._posted = [], []
