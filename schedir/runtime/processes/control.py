"""Messages beside the payloads: to compare schedules, agree on shapes, share the loss.

They have a gloo group of their own, on CUDA too, so that they never meet the pipeline's traffic.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.grid import Grid
from schedir.runtime.processes.groups import Group, Groups, Message

_OBJECT_TAG = 0
_LOSS_TAG = 1
PIPELINE_TAG = 6
RANK_TAG = 7
_BESIDE_TAG = 8
CLOCK_TAG = 9
_DESCRIBED_TAG = 13  # and those after it

T = TypeVar("T")


def packed(value: object) -> Tensor:
    """Any object as bytes to send."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    """The object of bytes from `packed`, in a process of the same job."""
    return pickle.loads(content.numpy().tobytes())


class Control:
    """The control messages between the processes of one executor, in their own `group`.

    *Ranks* are those of the schedule, in this process's pipeline; *numbers* are those of the group,
    over all pipelines. `own` is this process's number, and `pipeline` has those of its pipeline.
    `posted` are messages that are on their way.
    """

    group: Group

    def __init__(self, grid: Grid) -> None:
        self._numbers = [grid.number(rank) for rank in range(grid.ranks)]
        self.pipeline = [*dict.fromkeys(self._numbers)]
        self.own = grid.number(grid.rank)
        self._everyone = grid.everyone
        self.posted: deque[Message] = deque()  # the courier posts as well
        self._earlier = 0  # of these, those of the calls before
        self.courier = Courier()

    def connect(self, groups: Groups) -> None:
        """Make the group. Raises WaitError where the other processes don't come in time."""
        self.group = groups.make("control", self._everyone)

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
        values = self.collect(value, begin, (first, *others), what)
        if values is None:
            return list(self._receive(first, what))
        if others:
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
        if not others:
            return [value]
        content = packed(value)
        begin()
        if self.own != first:
            self._post(content, first, what)
            return None
        return [unpacked(content), *(self._receive(number, what) for number in others)]

    def meet(self, processes: Sequence[int]) -> None:
        """Wait until all of these processes, this one among them, have called this. Raises
        WaitError if they don't in time."""
        numbers = [*map(self._everyone.index, processes)]
        self.gather(None, numbers=numbers, what="a connection")

    def beside(self) -> Beside:
        """Transfers from host to host between ranks whose payloads are on a device."""
        return Beside(self.group, self._numbers, _BESIDE_TAG)

    def described(self, tag: int) -> Beside:
        """Transfers of payloads with their description, where the transport has no tags."""
        return Beside(self.group, self._numbers, _DESCRIBED_TAG + tag)

    def _post(self, content: Tensor, number: int, what: str) -> None:
        for part in (torch.tensor([len(content)], device="cpu"), content):
            self.group.tell(part, number, _OBJECT_TAG, what).wait()

    def _receive(self, number: int, what: str) -> Any:
        place = number, _OBJECT_TAG, f"{what} from"
        size = int(self.group.expect(1, *place).wait())
        return unpacked(self.group.expect(size, *place, torch.uint8).wait())

    def expect(self, numbers: Sequence[int], size: int, late: bool) -> Exchange:
        """Post receives of losses, vectors of float64 of this size, from these numbers.

        Vectors that come `late`, from a device, are waited for by the courier, not by later calls.
        """
        receives = {
            n: self.group.expect(size, n, _LOSS_TAG, "the loss of", torch.float64)
            for n in numbers
            if n != self.own
        }
        if not late:
            self.posted += receives.values()
        return Exchange(self, numbers, receives)

    def settle(self) -> None:
        """Wait for the messages of earlier calls, so that they do not pile up."""
        for _ in range(self._earlier):
            self.posted.popleft().wait()
        self._earlier = len(self.posted)


@attrs.define(eq=False)
class Exchange:
    """An exchange of losses with these numbers; the receives are posted."""

    _control: Control
    _numbers: Sequence[int]
    _messages: dict[int, Message]

    def give(self, own: Tensor, numbers: Iterable[int]) -> None:
        """Send `own` on its way to these numbers."""
        control = self._control
        self._messages[control.own] = Message(own, "", control.own, None)
        for number in numbers:
            if number != control.own:
                control.posted.append(control.group.tell(own, number, _LOSS_TAG, "the loss"))

    def result(self) -> list[Tensor]:
        """Wait for all expected vectors; returns them in that order, with this process's own."""
        return [self._messages[number].wait() for number in self._numbers]


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
    """A broadcast of a vector of integers, from the first of some members to all, once a call.

    It goes over a binomial tree: member i receives from i without its lowest bit. A receive is
    always posted one call ahead, so a vector arrives even if the receiver makes no call. `members`
    are numbers in the group of `control`; this process is one of them.
    """

    def __init__(self, control: Control, members: Sequence[int], size: int, tag: int) -> None:
        place = members.index(control.own)
        self._group, self._size, self._tag = control.group, size, tag
        self._parent = members[_without_lowest_bit(place)] if place else None
        below = reversed(range(place + 1, len(members)))  # the largest part of the tree first
        self._children = [members[i] for i in below if _without_lowest_bit(i) == place]
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
        if self._parent is None:
            with suppress(WaitError):
                self.pass_on(own)
                for message in self._sent:
                    message.wait()


def _without_lowest_bit(number: int) -> int:
    return number & (number - 1)


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
    _last: Future[Any] | None = None

    def send(self, errand: Callable[[], T]) -> Future[T]:
        """Run an errand in its turn; returns a future of its result."""
        if self._last is None:
            # Not one that Python waits for at its end: the device may have failed.
            Thread(target=_run, args=(self._errands,), name="schedir courier", daemon=True).start()
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
