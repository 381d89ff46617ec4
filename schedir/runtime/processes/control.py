"""Messages beside the payloads: to compare schedules, agree on shapes, share the loss.

They have a gloo group of their own, on CUDA too, so that they never meet the pipeline's traffic.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes.clocks import ClockLine, Reading, reading_of_own
from schedir.runtime.processes.courier import Courier
from schedir.runtime.processes.grid import Grid
from schedir.runtime.processes.groups import Group, Groups
from schedir.runtime.processes.message import Message
from schedir.runtime.processes.relay import Relay

_OBJECT_TAG = 0
LOSS_TAG = 1
COUNT_TAG = 2
NORM_TAG = 3
_ROOM_TAG = 4
DRIFT_TAG = 5
PIPELINE_TAG = 6
RANK_TAG = 7
_BESIDE_TAG = 8
_CLOCK_TAG = 9
WEIGHTS_TAG = 10
VERDICT_TAG = 11
_DESCRIBED_TAGS = {True: 12, False: 13}  # in training, in evaluation
_WORDS = {
    LOSS_TAG: "the loss",
    COUNT_TAG: "the samples",
    NORM_TAG: "the norms",
    _ROOM_TAG: "the buffers",
    DRIFT_TAG: "the weights' fingerprint",
    WEIGHTS_TAG: "the weights of steps",
    VERDICT_TAG: "whether the gradients are finite",
}


def packed(value: object) -> Tensor:
    """Any object as bytes to send."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    """What `packed` has made the bytes of, in a process of the same job."""
    return pickle.loads(content.numpy().tobytes())


class Exchange:
    """Vectors that processes give each other; the receives are posted."""

    def __init__(self, control: Control, tag: int, receives: Sequence[Message | None]) -> None:
        self._control = control
        self._tag = tag
        self._receives = receives  # None in one's own place
        self._own: Tensor | None = None

    def give(self, own: Tensor, numbers: Iterable[int]) -> Exchange:
        """Send `own` on its way to these numbers."""
        self._own = own
        self._control.tell(own, numbers, self._tag)
        return self

    def result(self) -> list[Tensor]:
        """Wait for all that is expected, and give it in that order, one's own among it."""
        found = (self._own if message is None else message.wait() for message in self._receives)
        return [vector for vector in found if vector is not None]


class Control:
    """The messages of the processes of one executor, in a group of their own.

    Ranks are those of the schedule, in this process's own pipeline; *numbers* are the group's, over
    all pipelines.
    """

    def __init__(self, grid: Grid) -> None:
        self._numbers = [grid.number(rank) for rank in range(grid.ranks)]
        self._own = grid.number(grid.rank)
        self._all = len(grid.everyone)
        self._everyone = grid.everyone
        self._relays: list[Relay] = []
        self._earlier: list[Message] = []  # posted by the calls before
        self._posted: list[Message] = []
        self._posting = Lock()  # the courier posts as well
        self._late: WeakSet[Message] = WeakSet()  # what that waits for
        self.courier = Courier()

    def connect(self, groups: Groups) -> None:
        """Make the group. Raises WaitError where the other processes don't come in time."""
        self._group = groups.make("control", self._everyone)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by number, on each of them."""
        found = self.collect(value)
        if found is None:
            everywhere: list[Any] = self._receive(0)
            return everywhere
        for number in range(1, self._all):
            self._send(found, number)
        return found

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all processes, by number, on the first one alone."""
        # By hand, not as a collective: gloo's threads drop a collective's tensors some time after
        # it is done, and abort the process if Python is shutting down by then.
        if self._own:
            self._send(value, 0)
            return None
        return [value, *(self._receive(number) for number in range(1, self._all))]

    def beside(self) -> Beside:
        """How ranks send each other what their hosts know, where payloads are on a device."""
        return Beside(self._group, self._numbers, _BESIDE_TAG)

    def described(self, trains: bool) -> Beside:
        """How ranks send each other payloads with their description."""
        return Beside(self._group, self._numbers, _DESCRIBED_TAGS[trains])

    def relay(self, members: Sequence[int], size: int, tag: int) -> Relay:
        """A relay between some numbers, of which this process is one."""
        self._relays.append(Relay(self._group, members, self._own, size, tag))
        return self._relays[-1]

    def read_clocks(self) -> Reading:
        """This process's clock beside that of this pipeline's rank 0; all its ranks call it."""
        first, *others = dict.fromkeys(self._numbers)
        if self._own != first:
            return ClockLine(self._group, first, _CLOCK_TAG).ask()
        for number in others:
            ClockLine(self._group, number, _CLOCK_TAG).answer()
        return reading_of_own()

    def send(self, value: object, rank: int) -> None:
        """Send any object; `receive` on the other side takes it."""
        self._send(value, self._numbers[rank])

    def receive(self, rank: int) -> Any:
        """Receive what `send` sends."""
        return self._receive(self._numbers[rank])

    def _send(self, value: object, number: int) -> None:
        content = packed(value)
        size = torch.tensor([len(content)], device="cpu")
        for part in (size, content):
            what = "a message to reach"
            Message(self._group.send, part, number, _OBJECT_TAG, what).wait()

    def _receive(self, number: int) -> Any:
        what = "a message from"
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        Message(self._group.recv, size, number, _OBJECT_TAG, what).wait()
        content = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        Message(self._group.recv, content, number, _OBJECT_TAG, what).wait()
        return unpacked(content)

    def share(self, value: int) -> list[int]:
        """A number of each rank of this pipeline, by rank, on each of them."""
        exchange = self.expect(dict.fromkeys(self._numbers, 1), _ROOM_TAG)
        own = torch.tensor([value], dtype=torch.float64, device="cpu")
        return [int(number) for number in exchange.give(own, self._numbers).result()]

    def expect(self, sizes: Mapping[int, int], tag: int, late: bool = False) -> Exchange:
        """Post receives of vectors of float64, from these numbers and of these sizes.

        What comes `late`, from a device, the courier waits for, and no call after this one.
        """
        others = {number: size for number, size in sizes.items() if number != self._own}
        receives = {n: self._receive_vector(size, n, tag) for n, size in others.items()}
        if late:
            self._late.update(receives.values())
        else:
            with self._posting:
                self._posted += receives.values()
        return Exchange(self, tag, [receives.get(number) for number in sizes])

    def tell(self, value: Tensor, numbers: Iterable[int], tag: int) -> None:
        """Send a vector on its way to these numbers."""
        for number in numbers:
            if number != self._own:
                what = f"{_WORDS[tag]} to reach"
                message = Message(self._group.send, value, number, tag, what)
                with self._posting:
                    self._posted.append(message)

    def _receive_vector(self, size: int, number: int, tag: int) -> Message:
        buffer = torch.empty(size, dtype=torch.float64, device="cpu")
        return Message(self._group.recv, buffer, number, tag, f"{_WORDS[tag]} of")

    def settle(self) -> None:
        """Wait for what the steps before this one have posted, so that nothing piles up."""
        for message in self._earlier:
            message.wait()
        with self._posting:
            self._earlier, self._posted = self._posted, []

    def drop(self) -> None:
        """Forget what is under way."""
        self.courier.stop()
        for relay in self._relays:
            relay.drop()
        for message in (*self._earlier, *self._posted, *self._late):
            message.drop()
        self._earlier, self._posted = [], []


class Beside:
    """Transfers of tensors of the CPU between the ranks of a pipeline, in order on each channel."""

    def __init__(self, group: Group, numbers: Sequence[int], tag: int) -> None:
        self._group, self._numbers, self._tag = group, numbers, tag

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Post a send."""
        return self._group.send([tensor], self._numbers[peer], self._tag)

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        """Post a receive."""
        return self._group.recv([buffer], self._numbers[peer], self._tag)
