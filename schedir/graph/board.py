"""What may run next on each rank, and when: the rules of the actions, one step after the other.

`paths.finish` runs lists that are there; a Board is asked what may come next, and takes it. What a
step uses up waits for it in a queue of its stage, first in, first out:

    QUEUES             filled by                                 taken by
    input              F of the stage before                     F
    kept               F that is to be run again                 R, ahead of its B or I
    output gradient    B or I of the stage after, the last F     B, I
    deferred           I                                         W

So the k-th F of a stage is that of microbatch k, and so are its k-th B or I, and the k-th W of what
is split: all microbatches of a stage are alike. A *step* is one number for a way to run and a
stage, `way * stages + stage` with a place in WAYS; a queue is one for a value and a stage, with a
place in QUEUES. Each stage is on one rank.

Pipelines side by side, as stages with replicas make them, have their stages one after the other:
stage s of pipeline p is the Board's stage `p * depth + s`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import attrs

from schedir.ir import VALUES, Kind
from schedir.ir.kinds import uses_of

Order: TypeAlias = list[list[int]]
"""`order[rank]`: the steps of a rank."""

QUEUES = ("input", "kept", "output gradient", "deferred")
"""The first value that each way uses up, in the order in which a microbatch comes by them."""
PLACED = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.RECOMPUTE,
)
"""The kinds that a Board runs. All others are left out by what asks it: by the searches, that is,
which add updates and communication to what they have found."""
WAYS = tuple(
    (kind, beside)
    for kind in PLACED
    for beside in (False, True)[: 1 + any(u.beside or u.without for u in kind.meaning.uses)]
)
"""The placed kinds, twice where they do other things beside another kind: an F that is to be run
again keeps less."""
DOWN, KEPT, BACK, DEFERRED = range(4)


@attrs.frozen(eq=False)
class Steps:
    """The rules of the steps of pipelines, in numbers; -1 stands for none. `microbatches` has those
    of each pipeline.

    By step: how long it `lasts`, the `queue` that it takes from, and the queue that it `needs` from
    another stage or that its rank has filled. It `feeds` a queue of another stage, and `puts` into
    queues of its stage; in `puts` a queue has 1 if it names microbatches, else 0. It `changes` what
    its rank holds; the first step of a stage that `completes` gradients adds the stage's
    `gradient`.

    By queue: how long its input `travels`, and how long it `holds` its `channel`. There are
    `channels` channels, numbered after the ranks.
    """

    placement: tuple[int, ...]
    queues_of: list[list[tuple[int, ...]]]
    microbatches: tuple[int, ...]
    lasts: list[float]
    queue: list[int]
    needs: list[int]
    feeds: list[int]
    puts: list[tuple[tuple[int, int], ...]]
    changes: list[float]
    completes: list[bool]
    gradient: Sequence[float]
    travels: list[float]
    holds: list[float]
    channel: list[int]
    channels: int

    @property
    def depth(self) -> int:
        """The number of stages of each pipeline."""
        return len(self.placement) // len(self.microbatches)


def steps_of(
    placement: Sequence[int],
    microbatches: Sequence[int],
    lasts: Mapping[Kind, Sequence[float]],
    transfers: Mapping[str, Sequence[tuple[float, float]]],
    sizes: Mapping[str, Sequence[float]],
) -> Steps:
    """The steps of pipelines whose stage s is on rank `placement[s]`. Each has its number of
    `microbatches`, and as many stages as the others.

    By stage: how long each kind `lasts`; how long the `transfers` of values from other stages take,
    and occupy the channel; and the `sizes` of the values that a rank holds.
    """
    stages, ranks = len(placement), 1 + max(placement)
    depth = stages // len(microbatches)
    links = [VALUES[value].link or ("", 0) for value in QUEUES]
    sized = [value for value in sizes if VALUES[value].per == "microbatch"]
    queue, feeds, puts, changes, completes = [], [], [], [], []
    for way in WAYS:
        ended = _values(way, "end")
        for stage in range(stages):
            first, last = "not " * (stage % depth > 0), "not " * ((stage + 1) % depth > 0)
            made = _values(way, "make", ("any", "not summed", f"{first}first", f"{last}last"))
            fed = (
                value * stages + stage - further
                for value, (name, further) in enumerate(links)
                if name in made
            )
            own = (
                (value * stages + stage, int(value == KEPT))
                for value, name in enumerate(QUEUES)
                if name in made
            )
            more = (sizes[value][stage] * ((value in made) - (value in ended)) for value in sized)
            queue.append(QUEUES.index(ended[0]) * stages + stage)
            feeds.append(next(fed, -1))
            puts.append(tuple(own))
            changes.append(sum(more))
            completes.append(any(VALUES[value].goal for value in made))
    fed_by_others = set(feeds)
    numbers: dict[tuple[int, int], int] = {}
    channel, ways = [], []
    for name, (_, further) in zip(QUEUES, links, strict=True):
        for stage, rank in enumerate(placement):
            ends = placement[(stage + further) % stages], rank
            crosses = ends[0] != rank
            channel.append(numbers.setdefault(ends, ranks + len(numbers)) if crosses else -1)
            ways.append(transfers[name][stage] if further else (0, 0))
    return Steps(
        placement=tuple(placement),
        queues_of=[
            [
                tuple(range(at, len(channel), stages))
                for at in range(stages)
                if placement[at] == rank
            ]
            for rank in range(ranks)
        ],
        microbatches=tuple(microbatches),
        lasts=[time for kind, _ in WAYS for time in lasts[kind]],
        queue=queue,
        needs=[each if each in fed_by_others else -1 for each in queue],
        feeds=feeds,
        puts=puts,
        changes=changes,
        completes=completes,
        gradient=sizes.get("gradient", (0,) * stages),
        travels=[takes for takes, _ in ways],
        holds=[holds for _, holds in ways],
        channel=channel,
        channels=len(numbers),
    )


def _values(way: tuple[Kind, bool], does: str, at: Sequence[str] = ("any",)) -> list[str]:
    """What a way does that to, at a stage which is `at` such places."""
    kind, beside = way
    uses = (use for use in uses_of(kind, does) if use.where in at)
    return [use.value for use in uses if not (use.without if beside else use.beside)]


@attrs.define(eq=False)
class Board:
    """The steps of a pipeline that have begun, none at first.

    `there[queue]` holds the arrival time of each waiting input: 0 for one made by the same stage,
    which is there as soon as its rank is free. For kept inputs it holds the microbatches. `turns`
    counts how many each queue has had. `free` is when each rank, and then each channel, is free.
    `held` is what each rank holds.
    """

    steps: Steps
    there: list[tuple[float, ...]]
    turns: list[int]
    free: list[float]
    held: list[float]

    @classmethod
    def of(cls, steps: Steps) -> Board:
        """The Board before anything has begun."""
        queues, ranks = len(steps.channel), len(steps.queues_of)
        there: list[tuple[float, ...]] = [()] * queues
        there[: len(steps.placement) : steps.depth] = [(0,) * many for many in steps.microbatches]
        return cls(steps, there, [0] * queues, [0] * (ranks + steps.channels), [0] * ranks)

    def copy(self) -> Board:
        """Another one, on which other steps may be taken."""
        return Board(self.steps, [*self.there], [*self.turns], [*self.free], [*self.held])


def options(board: Board, rank: int, now: float) -> list[tuple[float, int, int]]:
    """What may run next on a rank that is free `now`: the time, and the value and stage of the
    queue."""
    there, found = board.there, []
    for down, kept, back, deferred in board.steps.queues_of[rank]:
        waiting = there[down]
        if waiting:
            found.append((waiting[0] if waiting[0] > now else now, DOWN, down))
        again = there[kept]
        if again:
            found.append((now, KEPT, down))
        waiting = there[back]
        if waiting and not (again and again[0] <= board.turns[back]):
            found.append((waiting[0] if waiting[0] > now else now, BACK, down))
        if there[deferred]:
            found.append((now, DEFERRED, down))
    return found


def take(board: Board, step: int, start: float) -> float:
    """Begin a step, the next of its queue, and say when it ends."""
    steps, there, turns, free = board.steps, board.there, board.turns, board.free
    stages = len(steps.placement)
    stage = step % stages
    rank = steps.placement[stage]
    queue = steps.queue[step]
    board.held[rank] += steps.changes[step]
    if steps.completes[step]:
        completed = turns[BACK * stages + stage] - len(there[DEFERRED * stages + stage])
        if not completed:
            board.held[rank] += steps.gradient[stage]
    for own, named in steps.puts[step]:
        there[own] += (turns[queue] * named,)
    turns[queue] += 1
    there[queue] = there[queue][1:]
    end = free[rank] = start + steps.lasts[step]
    fed = steps.feeds[step]
    if fed >= 0:
        begin, channel = end, steps.channel[fed]
        if channel >= 0:
            if free[channel] > end:
                begin = free[channel]
            free[channel] = begin + steps.holds[fed]
        there[fed] += (begin + steps.travels[fed],)
    return end


def play(board: Board, choose: Callable[[int, float], tuple[float, int]]) -> Order | None:
    """The lists made by the choices of `choose`, from time 0 on; None if not every step runs.

    A free rank is asked what it takes: `choose(rank, now)` returns a time and a step. A later time
    asks again by then; -1 asks again as soon as a step begins that feeds the rank.
    """
    steps, free = board.steps, board.free
    placement, stages = steps.placement, len(steps.placement)
    completes, feeds = steps.completes, steps.feeds
    order: Order = [[] for _ in steps.queues_of]
    due: list[tuple[float, int]] = [(0, rank) for rank in range(len(order))]
    asked: list[float] = [0] * len(order)  # -1 for a rank that waits to be fed
    left = steps.depth * sum(steps.microbatches)
    while due:
        now, rank = heappop(due)
        if asked[rank] != now:
            continue
        start, step = choose(rank, now)
        if step < 0 or start > now:
            asked[rank] = start
            if step >= 0:
                heappush(due, (start, rank))
            continue
        order[rank].append(step)
        left -= completes[step]
        end = asked[rank] = take(board, step, now)
        heappush(due, (end, rank))
        fed = feeds[step]
        if fed >= 0:
            other = placement[fed % stages]
            if other != rank and free[other] <= now and asked[other] != now:
                asked[other] = now
                heappush(due, (now, other))
    return None if left else order


def follow(steps: Steps, order: Order) -> tuple[list[list[float]], list[float]] | None:
    """When each step of the lists starts, and when each rank is done; None if they block.

    Each rank must be able to run its list alone (`most_held`).
    """
    needs, feeds, channel, lasts = steps.needs, steps.feeds, steps.channel, steps.lasts
    travels, holds = steps.travels, steps.holds
    there: list[deque[float]] = [deque() for _ in channel]
    waiting = [-1] * len(channel)
    free: list[float] = [0] * (len(order) + steps.channels)
    reached = [0] * len(order)
    starts: list[list[float]] = [[] for _ in order]
    ready = list(range(len(order)))
    left = len(order)
    while ready:
        rank = ready.pop()
        listed, time, put = order[rank], free[rank], starts[rank].append
        for place in range(reached[rank], len(listed)):
            step = listed[place]
            queue = needs[step]
            if queue >= 0:
                arrived = there[queue]
                if not arrived:
                    waiting[queue] = rank
                    reached[rank] = place
                    break
                at = arrived.popleft()
                if at > time:
                    time = at
            put(time)
            time += lasts[step]
            queue = feeds[step]
            if queue >= 0:
                # As in `take`.
                begin, held = time, channel[queue]
                if held >= 0:
                    if free[held] > time:
                        begin = free[held]
                    free[held] = begin + holds[queue]
                there[queue].append(begin + travels[queue])
                if waiting[queue] >= 0:
                    ready.append(waiting[queue])
                    waiting[queue] = -1
        else:
            left -= 1
        free[rank] = time
    return None if left else (starts, free[: len(order)])


def most_held(steps: Steps, order: Sequence[int], limit: float = math.inf) -> float:
    """The most that a rank holds when it runs these steps alone, in this order, with all inputs
    from other ranks in time. Infinite if it can't run them, or would hold more than the limit."""
    stages, queues, puts = len(steps.placement), steps.queue, steps.puts
    changes, completes = steps.changes, steps.completes
    there, turns = [0] * len(steps.channel), [0] * len(steps.channel)
    kept: dict[int, deque[int]] = {}
    gradient = [*steps.gradient]
    held: float = 0
    most = -1.0  # so that a limit below 0 is noticed, also where no step adds anything
    for step in order:
        queue = queues[step]
        turn = turns[queue]
        turns[queue] = turn + 1
        if queue >= stages:
            # The stage after answers each F at once.
            if turn >= (turns[step % stages] if queue // stages == BACK else there[queue]):
                return math.inf
            if kept:
                again = kept.get(step % stages)
                if again:
                    if queue // stages == KEPT:
                        again.popleft()
                    elif queue // stages == BACK and again[0] <= turn:
                        return math.inf
        for own, named in puts[step]:
            there[own] += 1
            if named:
                kept.setdefault(step % stages, deque()).append(turn)
        held += changes[step]
        if completes[step]:
            held += gradient[step % stages]
            gradient[step % stages] = 0
        if held > most:
            most = held
            if most > limit:
                return math.inf
    return most
