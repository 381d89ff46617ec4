"""GPUs that promise no two streams progress of their own: do the ranks of a schedule come through?

Each rank's host posts its list in order, and waits for nothing but what the adversary makes it wait
for. What it posts goes to streams: for compute and what runs abreast, for each channel and each
group that sums, for the gradients of each stage. They share the device's few queues in turn:

    the list           0F0    0SEND_ACT0     1RECV_ACT0    0F1
    queue 0, compute   0F0                                 0F1
    queue 1, 0 to 1           (0F0) send
    queue 0, 1 to 0                          (0F0) recv           before 0F1, which needs it not

A queue's entries run one after the other; a wait for an event, in brackets here, is one of them. A
transfer runs where both ends are at the heads of their queues, a sum where those of all ranks are.
And the host waits for all that it has posted before the first computation of each kind of a stage,
as its kernels are loaded only then, and wherever the allocator returns memory: it may be anywhere.

Written apart from schedir's checker, and without torch. An adversary only adds waits: what it does
is drawn beforehand, and in which order the ranks go on makes no difference.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias

import attrs

from schedir import Action, Kind, Schedule
from schedir.graph.compile import graph_of
from schedir.ir import COMPLETES_GRADIENTS, COMPUTE, CONSUMES, RECEIVES, SENDS, Entry, Ties, flat

Meeting: TypeAlias = tuple[Hashable, int, int]
"""What kernels of several ranks run together for, the j-th of a channel or a group; how many."""


@attrs.frozen
class Adversary:
    """What devices do that nobody has asked for.

    `queues` is how many each has; streams take them in turn, from a random one. With `lazy` kernels
    are loaded when they are first used; `frees` is how likely an entry has memory returned.
    """

    queues: int
    lazy: bool = True
    frees: float = 0.0
    seed: int = 0


KINDEST = Adversary(queues=1 << 10, lazy=False)
"""As many queues as there are streams, and all kernels loaded before."""
HARSHEST = Adversary(queues=1, frees=1.0)


@attrs.define(eq=False)
class Kernel:
    """An entry of a queue: it runs once it is at the head; done once its meetings are."""

    meetings: Sequence[Meeting] = ()
    runs: bool = False
    done: bool = False


@attrs.frozen(eq=False)
class Wait:
    """An entry of a queue, which is over once a kernel is done."""

    event: Kernel


Post: TypeAlias = tuple[int, Kernel | Wait] | None
"""What a host does: an entry for a queue; None: it waits for all that it has posted."""


class Host:
    """Posts one rank's list, as the runtime does."""

    def __init__(self, schedule: Schedule, rank: int, adversary: Adversary, ties: Ties) -> None:
        self._schedule, self._rank, self._adversary = schedule, rank, adversary
        self._ties = ties
        self._chance = random.Random(f"{adversary.seed} of rank {rank}")
        self._streams: dict[Hashable, int] = {}
        self._first_queue = self._chance.randrange(adversary.queues)
        self._posts: list[Post] = []
        self._turns: Counter[Hashable] = Counter()
        self._last: dict[Hashable, Kernel] = {}
        self._computed: Kernel | None = None
        self._received: dict[tuple[Kind, int, int | None], Kernel] = {}
        self._sums: dict[int, list[Kernel]] = {}
        self._loaded: set[tuple[Kind, int]] = set()

    def posts(self) -> list[Post]:
        """All of it."""
        entries = self._schedule.actions[self._rank]
        self._queue("compute")
        for index, entry in enumerate(entries):
            if self._chance.random() < self._adversary.frees:
                self._posts.append(None)
            actions = tuple(flat([entry]))
            kind = actions[0].kind
            if kind is Kind.OPTIM_STEP and not any(map(_is_step, entries[index - 1 : index])):
                self._meet([step.stage for step in flat(takewhile(_is_step, entries[index:]))])
            if kind in COMPUTE:
                self._compute(actions)
            elif kind is Kind.REDUCE_GRAD:
                self._reduce(actions[0].stage)
            else:
                self._transfer(actions)
        return self._posts

    def _queue(self, stream: Hashable) -> int:
        number = self._streams.setdefault(stream, len(self._streams))
        return (self._first_queue + number) % self._adversary.queues

    def _post(self, stream: Hashable, kernel: Kernel, *after: Kernel | None) -> Kernel:
        queue = self._queue(stream)
        self._posts += [(queue, Wait(event)) for event in after if event is not None]
        self._posts.append((queue, kernel))
        self._last[stream] = kernel
        return kernel

    def _meeting(self, whose: Hashable, parties: int) -> Meeting:
        self._turns[whose] += 1
        return whose, self._turns[whose], parties

    def _compute(self, actions: Sequence[Action]) -> None:
        """After what they consume; its stream keeps it after all compute before. The parts of a
        pair start together, one of them on a stream beside; and gradients of parameters are added
        to on a stream of the stage, for which the rank's own waits."""
        for action in actions:
            if self._adversary.lazy and (action.kind, action.stage) not in self._loaded:
                self._loaded.add((action.kind, action.stage))
                self._posts.append(None)
        received = [
            self._received.get((CONSUMES.get(a.kind, a.kind), a.stage, a.microbatch))
            for a in actions
        ]
        self._computed = self._post("compute", Kernel(), *received)
        if len(actions) > 1:
            beside = self._post("beside", Kernel(), self._computed)
            self._computed = self._post("compute", Kernel())
            self._posts.append((self._queue("compute"), Wait(beside)))
        for action in actions:
            if action.kind in COMPLETES_GRADIENTS:
                added = self._post(("gradients", action.stage), Kernel(), self._computed)
                self._posts.append((self._queue("compute"), Wait(added)))

    def _transfer(self, actions: Sequence[Action]) -> None:
        """After all compute before, on the streams of the channels: those of a batch are joined,
        as it is one kernel."""
        channels = [self._channel(action) for action in actions]
        first, *others = dict.fromkeys(channels)
        before = [self._last.get(channel) for channel in others]
        meetings = [self._meeting(channel, 2) for channel in channels]
        posted = self._post(first, Kernel(meetings), self._computed, *before)
        for channel in others:
            self._posts.append((self._queue(channel), Wait(posted)))
            self._last[channel] = posted
        for action in actions:
            if action.kind in RECEIVES:
                self._received[action.kind, action.stage, action.microbatch] = posted

    def _channel(self, action: Action) -> tuple[int, int]:
        peer = graph_of(self._schedule).peer(action)
        assert peer is not None
        return (self._rank, peer) if action.kind in SENDS else (peer, self._rank)

    def _reduce(self, stage: int) -> None:
        ranks = self._schedule.placement[stage]
        if len(ranks) > 1:
            kernel = Kernel([self._meeting(("sum", stage), len(ranks))])
            self._sums.setdefault(stage, []).append(
                self._post(("sum", ranks), kernel, self._computed)
            )

    def _meet(self, stages: Sequence[int]) -> None:
        """What comes before a rank's consecutive steps: its sums end, and tied gradients are added
        up over the ranks that hold them."""
        for stage in stages:
            for kernel in self._sums.pop(stage, ()):
                self._posts.append((self._queue("compute"), Wait(kernel)))
        for number, tie in enumerate(self._ties):
            ranks = _holders(self._schedule, tie)
            if len(ranks) > 1 and set(tie) & set(stages):
                kernel = Kernel([self._meeting(("tie", number), len(ranks))])
                done = self._post(("tie", number), kernel, self._computed)
                self._posts.append((self._queue("compute"), Wait(done)))


def _is_step(entry: Entry) -> bool:
    return isinstance(entry, Action) and entry.kind is Kind.OPTIM_STEP


def _holders(schedule: Schedule, stages: Iterable[int]) -> set[int]:
    return {rank for stage in stages for rank in schedule.placement[stage]}


class Device:
    """One rank's: its queues, which its host fills."""

    def __init__(self, posts: Iterable[Post], queues: int) -> None:
        self._posts = iter(posts)
        self._queues: list[deque[Kernel | Wait]] = [deque() for _ in range(queues)]
        self._filled: set[int] = set()
        self._waits = False

    def goes_on(self, present: Counter[Meeting]) -> bool:
        """Post and run as much as can be; whether that was anything.

        `present` counts who has come to each meeting.
        """
        moved = self._post()
        for number in [*self._filled]:
            queue = self._queues[number]
            while queue and self._is_over(queue[0], present):
                queue.popleft()
                moved = True
            if not queue:
                self._filled.discard(number)
        return moved

    def _post(self) -> bool:
        if self._waits and self._filled:
            return False
        moved, self._waits = self._waits, False
        for post in self._posts:
            moved = True
            if post is None:
                self._waits = True
                if self._filled:
                    break
                continue
            number, entry = post
            self._queues[number].append(entry)
            self._filled.add(number)
        return moved

    def _is_over(self, head: Kernel | Wait, present: Counter[Meeting]) -> bool:
        if isinstance(head, Wait):
            return head.event.done
        if not head.runs:
            head.runs = True
            present.update(head.meetings)
        head.done = all(present[meeting] == meeting[2] for meeting in head.meetings)
        return head.done

    @property
    def is_through(self) -> bool:
        """Whether all has been posted, and has run."""
        return not self._filled and next(self._posts, None) is None


def comes_through(schedule: Schedule, adversary: Adversary, ties: Ties = ()) -> bool:
    """Whether all ranks of a complete schedule come to the end of their lists, as posted."""
    devices = [
        Device(Host(schedule, rank, adversary, ties).posts(), adversary.queues)
        for rank in range(schedule.ranks)
    ]
    present: Counter[Meeting] = Counter()
    while any(device.goes_on(present) for device in devices):
        pass
    return all(device.is_through for device in devices)
