"""Entries of several actions: what runs for them beside the actions themselves.

(0F4;7B3)                   7B3's wait, 0F4, 7B3           neither starts before both can; on a
                                                           device they run on two streams
(0SEND_ACT1;0RECV_GRAD0)    0SEND_ACT1, 0RECV_GRAD0, post  each says what it posts; then all of
                                                           it is posted as one

The two of an overlapped pair on two streams of a device that queues its work:

    own stream     … ─ mark ─┬──────── 7B3 ────────┬ wait ─ …       what 7B3 waits for is there
    side stream             wait ─ 0F4 ─ mark ─────┘

Autograd runs a backward on the stream of its forward. So the forward of a pair runs on the stream,
side or own, on which the other action's forward has not run. The side stream works only within
pairs: it starts at a mark of the rank's own stream, and that waits for it at the end, so everything
after a pair comes after both. Freed memory is reused by the stream that it was made on, which
within a pair does not wait for the other stream. So memory that the first action frees is held
until the two have met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from torch import Tensor

from schedir.ir import COMMUNICATION, Action, Entry, Kind, Together
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.processes.groups import Post
from schedir.runtime.program.instruction import Bound, Instruction, nothing
from schedir.runtime.stage.activations import Cell
from schedir.runtime.transports.transport import BatchPoster, Work


def communicates(actions: Sequence[Action]) -> bool:
    """Whether the actions of one entry are a batch, to be posted as one."""
    return len(actions) > 1 and actions[0].kind in COMMUNICATION


def wait_of(instruction: Instruction) -> Instruction:
    """What an instruction waits for, by itself: listed first, it has nothing left to wait for."""
    return attrs.evolve(instruction, run=nothing, computes=False, listed=False)


@attrs.define(eq=False)
class _Part:
    """The work of one action, once its batch is posted; several may wait for it."""

    work: Work | None = None

    def wait(self) -> bool:
        """Wait until it is done."""
        if self.work is not None:
            work, self.work = self.work, None
            work.wait()
        return True


@attrs.frozen(eq=False)
class _Whole:
    """The works of a batch: a consumer of one of its receives waits for all."""

    parts: Sequence[_Part]

    def wait(self) -> bool:
        """Wait until all of it is done."""
        return all(part.wait() for part in self.parts)


class Batch:
    """Stands in for the transport, collects what the actions of an entry post, and posts it as
    one."""

    def __init__(self, poster: BatchPoster) -> None:
        self._poster = poster
        self._posts: list[Post] = []
        self._parts: list[_Part] = []

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Take a send. Waiting for it waits for nothing else: it may be known to have arrived when
        the rest has not."""
        return self._take(Post(tensor, peer, sends=True))

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Take a receive."""
        self._take(Post(buffer, peer, sends=False))
        return _Whole(self._parts)

    def _take(self, post: Post) -> _Part:
        self._posts.append(post)
        self._parts.append(_Part())
        return self._parts[-1]

    def post(self) -> None:
        """Post what has been taken."""
        posts, parts = self._posts, self._parts
        self._posts, self._parts = [], []
        if posts:
            for part, work in zip(parts, self._poster.together(posts), strict=True):
                part.work = work


def post_of(batch: Batch, parts: Sequence[Instruction]) -> Instruction:
    """What posts a batch, once its parts have said what."""
    return attrs.evolve(parts[0], run=batch.post, computes=False, listed=False, parts=parts)


def forwards_aside(entries: Iterable[Entry]) -> set[int]:
    """The pairs of a rank's list, by index, whose forward runs on the side stream."""
    aside: set[tuple[int, int | None]] = set()  # the (stage, microbatch) whose graph is there
    found = set()
    for index, entry in enumerate(entries):
        if not isinstance(entry, Together):
            if entry.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                aside.discard((entry.stage, entry.microbatch))
            continue
        for action in entry.actions:
            others = [(a.stage, a.microbatch) for a in entry.actions if a is not action]
            if action.kind is Kind.FORWARD and aside.isdisjoint(others):
                aside.add((action.stage, action.microbatch))
                found.add(index)
    return found


def on_two_streams(entries: Sequence[Entry]) -> set[int]:
    """The stages of a rank's list whose forwards run on the side stream, and on its own."""
    pairs = (entries[index] for index in forwards_aside(entries))
    parts = (action for pair in pairs if isinstance(pair, Together) for action in pair.actions)
    return {action.stage for action in parts if action.kind is Kind.FORWARD}


class Pair:
    """One pair; `cell` is that of its first action, `side` the stream beside the rank's own."""

    def __init__(self, accelerator: Accelerator, side: Any, cell: Cell) -> None:
        self._accelerator, self._side, self._cell = accelerator, side, cell
        self._held: object = None

    def abreast(self, first: Instruction, second: Instruction, aside: Kind) -> list[Instruction]:
        """Both, of which the first begins the pair, and the second ends it; that of the kind
        `aside` runs on the side stream."""
        began, ended = (
            self._on_side(one.run) if one.action.kind is aside else one.run
            for one in (first, second)
        )

        def begin() -> None:
            self._part()
            try:
                began()
            except BaseException:
                self._meet()
                raise

        def end() -> None:
            try:
                ended()
            finally:
                self._meet()

        return [attrs.evolve(first, run=begin), attrs.evolve(second, run=end)]

    def _on_side(self, run: Bound) -> Bound:
        def aside() -> None:
            with self._accelerator.on(self._side):
                run()

        return aside

    def _part(self) -> None:
        """The side stream is behind all that was before the pair."""
        self._held = _shared(self._cell)
        ready = self._accelerator.mark()
        with self._accelerator.on(self._side):
            ready.wait()

    def _meet(self) -> None:
        """What follows is behind both."""
        with self._accelerator.on(self._side):
            done = self._accelerator.mark()
        done.wait()
        self._held = None


def _shared(cell: Cell) -> object:
    """The tensors of a cell that either stream may have made."""
    return cell.leaves, cell.outputs, cell.output_grads
