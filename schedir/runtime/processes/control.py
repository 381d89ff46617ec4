"""Messages beside the payloads: to compare schedules, agree on shapes, share the loss.

They have a gloo group of their own, on CUDA too, so that they never meet the pipeline's traffic.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes import clocks
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.grid import Grid
from schedir.runtime.processes.groups import Group, Groups, Message

_OBJECT_TAG = 0
_LOSS_TAG = 1
PIPELINE_TAG = 6
RANK_TAG = 7
_BESIDE_TAG = 8
_CLOCK_TAG = 9
_DESCRIBED_TAG = 13  # and those after it

T = TypeVar("T")


def packed(value: object) -> Tensor:
    """Any object as bytes to send."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    """The object of bytes from `packed`, in a process of the same job."""
    return pickle.loads(content.numpy().tobytes())


class Control:
    """The control messages between the processes of one executor, in their own group.

    *Ranks* are those of the schedule, in this process's pipeline; *numbers* are those of the group,
    over all pipelines.
    """

    def __init__(self, grid: Grid) -> None:
        self._numbers = [grid.number(rank) for rank in range(grid.ranks)]
        self._own = grid.number(grid.rank)
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

    def gather(
        self,
        value: Any,
        begin: Callable[[], object] = int,
        numbers: Sequence[int] = (),
        what: str = "a message",
    ) -> list[Any]:
        """The values of all processes, or of these `numbers`, in their order, on each of them; as
        in `collect`."""
        first, *others = numbers or range(len(self._everyone))
        if not others:
            return [value]
        values = self.collect(value, begin, numbers, what)
        if values is None:
            return list(self._receive(first, what))
        answer = packed(values)
        for number in others:
            self._post(answer, number, what)
        return values

    def collect(
        self,
        value: Any,
        begin: Callable[[], object] = int,
        numbers: Sequence[int] = (),
        what: str = "a message",
    ) -> list[Any] | None:
        """The values of all processes, or of these `numbers`, on the first of them alone. The value
        is packed before this process waits for others, which it tells by `begin`."""
        # By hand, not as a collective: gloo's threads drop a collective's tensors some time after
        # it is done, and abort the process if Python is shutting down by then.
        first, *others = numbers or range(len(self._everyone))
        content = packed(value)
        begin()
        if self._own != first:
            self._post(content, first, what)
            return None
        return [unpacked(content), *(self._receive(number, what) for number in others)]

    def in_pipeline(self, value: Any) -> list[Any]:
        """The values of the processes of this pipeline, on each of them."""
        return self.gather(value, numbers=[*dict.fromkeys(self._numbers)], what="the buffers")

    def meet(self, processes: Sequence[int]) -> None:
        """Wait until all of these processes, this one among them, have called this. Raises
        WaitError if they don't in time."""
        numbers = [*map(self._everyone.index, processes)]
        self.gather(None, numbers=numbers, what="a connection")

    def beside(self) -> Beside:
        """Transfers from host to host between ranks whose payloads are on a device."""
        return Beside(self._group, self._numbers, _BESIDE_TAG)

    def described(self, tag: int) -> Beside:
        """Transfers of payloads with their description, where the transport has no tags."""
        return Beside(self._group, self._numbers, _DESCRIBED_TAG + tag)

    def relay(self, members: Sequence[int], size: int, tag: int) -> Relay:
        """A relay between some numbers, of which this process is one."""
        self._relays.append(Relay(self._group, members, self._own, size, tag))
        return self._relays[-1]

    def read_clocks(self) -> clocks.Reading:
        """This process's clock beside that of this pipeline's rank 0; all its ranks call it."""
        first, *others = dict.fromkeys(self._numbers)
        if self._own != first:
            return clocks.ask(self._group, first, _CLOCK_TAG)
        for number in others:
            clocks.answer(self._group, number, _CLOCK_TAG)
        return clocks.Reading(clocks.now())  # by which all go

    def send(self, value: object, rank: int) -> None:
        """Send any object; `receive` on the other side takes it."""
        self._post(packed(value), self._numbers[rank], "a message")

    def receive(self, rank: int) -> Any:
        """Receive what `send` sends."""
        return self._receive(self._numbers[rank], "a message")

    def _post(self, content: Tensor, number: int, what: str) -> None:
        for part in (torch.tensor([len(content)], device="cpu"), content):
            self._group.tell(part, number, _OBJECT_TAG, what).wait()

    def _receive(self, number: int, what: str) -> Any:
        place = number, _OBJECT_TAG, f"{what} from"
        size = int(self._group.expect(1, *place).wait())
        return unpacked(self._group.expect(size, *place, torch.uint8).wait())

    def expect(self, numbers: Sequence[int], size: int, late: bool) -> Exchange:
        """Post receives of losses, vectors of float64 of this size, from these numbers.

        Vectors that come `late`, from a device, are waited for by the courier, not by later calls.
        """
        receives = {
            n: self._group.expect(size, n, _LOSS_TAG, "the loss of", torch.float64)
            for n in numbers
            if n != self._own
        }
        if late:
            self._late.update(receives.values())
        else:
            with self._posting:
                self._posted += receives.values()
        return Exchange(self, [receives.get(number) for number in numbers])

    def tell(self, value: Tensor, numbers: Iterable[int]) -> None:
        """Send a vector on its way to these numbers."""
        for number in numbers:
            if number != self._own:
                message = self._group.tell(value, number, _LOSS_TAG, "the loss")
                with self._posting:
                    self._posted.append(message)

    def settle(self) -> None:
        """Wait for the messages of earlier steps, so that they do not pile up."""
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


@attrs.define(eq=False)
class Exchange:
    """An exchange of losses between processes; the receives are posted."""

    _control: Control
    _receives: Sequence[Message | None]  # None in one's own place
    _own: Tensor | None = None

    def give(self, own: Tensor, numbers: Iterable[int]) -> None:
        """Send `own` on its way to these numbers."""
        self._own = own
        self._control.tell(own, numbers)

    def result(self) -> list[Tensor]:
        """Wait for all expected vectors; returns them in that order, with this process's own."""
        found = (self._own if message is None else message.wait() for message in self._receives)
        return [vector for vector in found if vector is not None]


@attrs.frozen(eq=False)
class Beside:
    """Transfers of CPU tensors between the ranks of a pipeline, in order on each channel."""

    _group: Group
    _numbers: Sequence[int]
    _tag: int

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Post a send."""
        return self._group.send([tensor], self._numbers[peer], self._tag)

    def receive(self, buffer: Tensor, peer: int) -> dist.Work:
        """Post a receive."""
        return self._group.recv([buffer], self._numbers[peer], self._tag)


class Relay:
    """A broadcast of a vector of integers, from the first of some processes to all, once a call.

    It goes over a binomial tree: member i receives from i without its lowest bit. A receive is
    always posted one call ahead, so a vector arrives even if the receiver makes no call.
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
        self._sent: list[Message] = []
        self._next = self._post_receive()

    def _post_receive(self) -> Message | None:
        if self._parent is None:
            return None
        return self._group.expect(self._size, self._parent, self._tag, "the call of")

    def pass_on(self, own: Tensor | None) -> Tensor:
        """The first member's vector, on every member; only it has to give its own."""
        for message in self._sent:
            message.wait()
        if self._next is not None:
            own = self._next.wait()
            self._next = self._post_receive()
        assert own is not None  # it is the first member's
        self._sent = [self._group.tell(own, n, self._tag, "its call") for n in self._children]
        return own

    def leave(self, own: Tensor) -> None:
        """Send a last vector, if this member is the first, to whoever is still there."""
        if self._next is None:
            with suppress(WaitError):
                self.pass_on(own)
                for message in self._sent:
                    message.wait()

    def drop(self) -> None:
        """Forget what is under way."""
        self._next = None
        self._sent.clear()


_Errands: TypeAlias = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


@attrs.define(eq=False)
class Courier:
    """Runs errands that wait for the device and then talk to other processes, one after the other
    on a separate thread, which ends with the process.

        rank 1, which has the loss      step ─ next call: waits for rank 0's announcement …
                 its courier                      └─ waits for the device, sends the loss ──┐
        rank 0                          step ─ reads the loss: waits ◀──────────────────────┘  …

    If rank 1 itself sent the loss before its next call, its device would run out of work; if it
    sent it after rank 0's announcement, both would wait for ever. The courier also receives the
    messages of others. All couriers have the same errands in the same order, so none waits for
    another in vain.
    """

    _errands: _Errands = attrs.field(factory=SimpleQueue)
    _started: bool = False
    _last: Future[Any] | None = None

    def send(self, errand: Callable[[], T]) -> Future[T]:
        """Run an errand in its turn; returns a future of its result."""
        if not self._started:
            # Not one that Python waits for at its end: the device may have failed.
            Thread(target=_run, args=(self._errands,), name="schedir courier", daemon=True).start()
            self._started = True
        done: Future[T] = Future()
        self._errands.put((errand, done))
        self._last = done
        return done

    def finish(self) -> None:
        """Wait for all errands; there is no other."""
        if self._last is not None:
            self._last.exception()
        self.stop()

    def stop(self) -> None:
        """There is no other errand, and nobody waits for the last one any more."""
        self._last = None
        self._errands.put(None)


def _run(errands: _Errands) -> None:
    for errand, done in iter(errands.get, None):
        try:
            done.set_result(errand())
        except BaseException as error:  # whoever waits for it raises it
            done.set_exception(error)
        del errand, done
