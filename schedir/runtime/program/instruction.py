"""An entry of a rank's list as it runs, an action and its bound calls; and who observes it.

An observer is a function Instruction → Instruction that wraps an instruction's wait and run:

    observer        around the wait                     around the run
    Recorder        leaves two marks                    leaves two marks
    profiler        a range "wait for 0F1"              a range "0F1"
    Progress                                            keeps what it has posted on a device

So an instruction without an observer costs nothing, and the loop that runs a list does not know of
observers. Permanent observers wrap instructions when the list is compiled; for the others each call
checks once whether they are on. An instruction has its rank and its index in the list, so an
observer can record when each entry of each rank starts and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import attrs
import torch.distributed as dist
from torch.autograd.profiler import record_function

from schedir.ir import RECEIVES, Action
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.processes.control import Courier
from schedir.runtime.processes.failure import Patience, WaitError
from schedir.runtime.processes.groups import ABORT
from schedir.runtime.stage.stage import Cell, Stage
from schedir.runtime.transports import Work

Bound: TypeAlias = Callable[[], object]
"""A call with all that it works on: what one action does, resolved when the list is compiled."""


@attrs.frozen(eq=False)
class Instruction:
    """An action of the list and its bound calls: first `wait`, if there is one, then `run`.

    `index` is its place in the list that runs, `listed_at` its place in the list before receives
    were moved: users see that one, and errors name it. `receives` has the works of the receives
    that it waits for. It `computes` if its time counts as compute. It is `listed` if it does its
    action, and not something that has to be done before the action.

    Among the ranks of one process it comes `after` events, each of which must have happened so many
    times; what it `does` are events. They are the actions that it posts, and the meetings to which
    its rank comes.

    For observers: the `cell` and `stage` that it works on, the `peer` of a transfer, the `sums`
    that it posts or ends, and the `parts` of a batch that it posts.
    """

    rank: int
    index: int
    listed_at: int
    action: Action
    run: Bound
    wait: Bound | None = None
    receives: list[Work] = attrs.field(factory=list)
    after: Sequence[tuple[object, int]] = ()
    does: Sequence[object] = ()
    computes: bool = False
    listed: bool = True
    cell: Cell | None = None
    stage: Stage | None = None
    peer: int | None = None
    sums: Sequence[Reduction] = ()
    parts: Sequence[Instruction] = ()


def nothing() -> None:
    """Do nothing: of an entry that is there to be waited for, or observed."""


Observer: TypeAlias = Callable[[Instruction], Instruction]


def profiler_ranges(instruction: Instruction) -> Instruction:
    """Show in a profile what an instruction waits for and what it does: each range costs what a
    send does."""
    name, wait = str(instruction.action), instruction.wait
    waits = f"wait for {name}"
    return attrs.evolve(
        instruction,
        wait=None if wait is None else _in_range(waits, wait),
        run=_in_range(name if instruction.listed else waits, instruction.run),
    )


def _in_range(name: str, function: Bound) -> Bound:
    def in_range() -> None:
        with record_function(name):
            function()

    return in_range


def observed(
    instructions: Sequence[Instruction], observers: Iterable[Observer]
) -> Sequence[Instruction]:
    """The instructions with what the observers put around them."""
    for observer in observers:
        instructions = list(map(observer, instructions))
    return instructions


@attrs.frozen(eq=False)
class _Step:
    """Work that is under way: what an instruction has posted or, without an instruction, a call.
    Once it is done, `check` raises its error, if it has failed."""

    is_done: Callable[[], bool]
    check: Callable[[], object]
    instruction: Instruction | None = None

    def awaited(self) -> str:
        """The thing that it waits for, in words."""
        if self.instruction is None:
            return "the device to come to the end of a call"
        if self.instruction.parts:
            return f"all of {', '.join(map(_transfer, self.instruction.parts))}"
        return _transfer(self.instruction)


def _transfer(instruction: Instruction) -> str:
    action, peer = instruction.action, instruction.peer
    if peer is None:
        return f"all that take part in {action}"
    return f"{action} {'from' if action.kind in RECEIVES else 'to'} rank {peer}"


@attrs.define(eq=False)
class Progress:
    """The transfers of the latest two calls whose completion the host has not observed yet.

    A GPU waits for transfers itself, and the host goes on. If a transfer never completes, the GPU
    stands still, and nothing says where. So everything that is posted is kept in list order, and
    before the host waits for the GPU, it looks at these transfers:

        host      call 3: posts 0RECV_GRAD0, 0SEND_ACT1 …   call 4: posts …   .loss: waits
        device    call 3: … 0RECV_GRAD0 never comes
                            └─ the first that is not done: where the rank stands, and its peer

    The host is at most one call ahead of the device. A work that has failed counts as completed,
    and only waiting for it raises the error. NCCL aborts its communicator then, which may never
    return. So a separate thread waits, and the host waits for the thread no longer than for any
    abort.

    If it `follows`, it is an observer of instructions. Works are noted in `posted` when they are
    posted.
    """

    _patience: Patience
    _posted: list[dist.Work]
    _accelerator: Accelerator
    follows: bool
    _before: deque[_Step] = attrs.field(factory=deque)
    _latest: deque[_Step] = attrs.field(factory=deque)

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        if not self.follows:
            return instruction
        run = instruction.run

        def followed() -> None:
            run()
            if self._posted:
                self._take(instruction)

        return attrs.evolve(instruction, run=followed)

    def _take(self, instruction: Instruction | None) -> None:
        self._latest.extend(
            _Step(work.is_completed, work.wait, instruction) for work in self._posted
        )
        self._posted.clear()

    def begin(self) -> None:
        """A call begins: the one before the latest has to be done."""
        if not self.follows:
            return
        self._end(self._before)
        self._before, self._latest = self._latest, deque()

    def end(self) -> Callable[[], bool]:
        """A call, or a batch of it, has ended here; the result tells whether it has on the device,
        for `reach`."""
        if not self.follows:
            return lambda: True
        self._take(None)
        ended = self._accelerator.mark().query
        self._latest.append(_Step(ended, nothing))
        return ended

    def reach(self, ended: Callable[[], bool]) -> None:
        """Wait until the device has come to what `ended` tells: the end of a call, or a value that
        a step reads. Raises WaitError, with the place in the list, where that is in vain."""
        for posted in (self._before, self._latest):
            self._end(posted, ended)
        self._patience.until(ended, lambda: "the device")

    def settle(self) -> None:
        """Wait until all is done; raises as `reach` does."""
        for posted in (self._before, self._latest):
            self._end(posted)

    def _end(self, posted: deque[_Step], early: Callable[[], bool] = lambda: False) -> None:
        """Wait for one after the other, or until there is an early end; each has the timeout to
        itself, so a step may take longer."""
        done: list[_Step] = []
        try:
            while posted and (posted[0].is_done() or not early()):
                first = posted[0]
                self._patience.until(lambda: first.is_done() or early(), first.awaited)  # noqa: B023  # called within
                if first.is_done():
                    done.append(posted.popleft())
        except WaitError as stalled:
            _check(done)  # one that failed may be why
            raise _at(stalled, posted[0]) from None
        _check(done)

    def drop(self) -> None:
        """A call has failed: nothing of it will be done."""
        self._posted.clear()
        self._before.clear()
        self._latest.clear()


def _check(done: Sequence[_Step]) -> None:
    """Raise WaitError for the first of these that has failed."""
    asked: list[_Step] = []

    def ask() -> None:
        for step in done:
            asked.append(step)
            step.check()

    if not done:
        return
    courier = Courier()
    try:
        courier.send(ask).result(ABORT)
    except Exception as error:
        if isinstance(error, TimeoutError):
            error = RuntimeError("it has failed, and its communicator does not end")
        raise _at(WaitError(error, asked[-1].awaited()), asked[-1]) from None
    finally:
        courier.stop()


def _at(stalled: WaitError, step: _Step) -> WaitError:
    """The error at the place in the list that has posted a step."""
    if (at := step.instruction) is not None:
        stalled.at(at.rank, at.listed_at, at.action)
    return stalled
