"""When compute runs: each rank in list order, each action as soon as what it needs has arrived.

    time     0    1    2    3    4    5
    rank 0   0F0  0F1                       a transfer is posted at each end once the compute
                ↘    ↘                      before it is done; it begins when all its ends are
    rank 1        1F0  1B0------ 1F1        posted and its channel is free

One pass over all compute, each rank as far as it gets until it waits. Two parts that start together
are two numbers in a row: the first takes no time, and the second, once it has its input as well,
the time of both.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np

from schedir.ir.columns import KINDS

Time: TypeAlias = float
"""In the unit of the costs; ints stay ints."""


TEXTBOOK = np.array([kind.traits.cost for kind in KINDS])
"""What each kind costs in the textbook, by its index in KINDS: a backward is two forwards."""


@attrs.frozen
class Exchanges:
    """What compute waits for: transfers, and collectives, numbered from 0.

    `posts[e]` names the compute (its number, -1 for none) after which each end of exchange e is
    posted. What it brings has arrived `takes[e]` after its begin, and what follows it may begin
    `holds[e]` after that, no later. `before[e]` is the exchange that it follows, -1 for none, with
    `before` empty where none has to; where it follows several, `also` has the others. Those from
    `closing` on are the ends of batches, which wait until what they follow has arrived.
    """

    posts: Sequence[tuple[int, ...]]
    before: Sequence[int]
    takes: Sequence[Time]
    holds: Sequence[Time]
    also: Mapping[int, Sequence[int]] = attrs.field(factory=dict)
    closing: int = sys.maxsize


@attrs.frozen
class Times:
    """When compute starts and ends, and exchanges begin; -1 for what never does."""

    starts: list[Time]
    ends: list[Time]
    begins: list[Time]


def run(
    bounds: Sequence[int], durations: Sequence[Time], needs: Sequence[int], exchanges: Exchanges
) -> Times:
    """Run all compute, numbered rank by rank: rank r's is `bounds[r]` to `bounds[r + 1]` - 1.

    `needs[c]` is the exchange that compute c waits for, -1 for none.
    """
    posts, takes = exchanges.posts, exchanges.takes
    starts: list[Time] = [-1] * len(durations)
    ends = starts.copy()
    begins: list[Time] = [-1] * len(posts)
    ordered = _in_order(exchanges, ends, begins)
    reached = list(bounds[:-1])
    clock: list[Time] = [0] * len(reached)
    waiting: dict[int, list[int]] = {}
    ready = deque(range(len(reached)))
    while ready:
        rank = ready.popleft()
        time = clock[rank]
        for compute in range(reached[rank], bounds[rank + 1]):
            need = needs[compute]
            if need >= 0:
                if begins[need] < 0:
                    held = ordered(need) if ordered else _begin(need, posts, ends, begins)
                    if held >= 0:
                        waiting.setdefault(held, []).append(rank)
                        reached[rank] = compute
                        break
                arrival = begins[need] + takes[need]
                if arrival > time:
                    time = arrival
            starts[compute] = time
            time += durations[compute]
            ends[compute] = time
            if compute in waiting:
                ready.extend(waiting.pop(compute))
        clock[rank] = time
    if not waiting:
        for exchange, begin in enumerate(begins):
            if begin >= 0:
                continue
            # No compute needs it.
            if ordered:
                ordered(exchange)
            else:
                _begin(exchange, posts, ends, begins)
    return Times(starts, ends, begins)


def _begin(
    exchange: int, posts: Sequence[tuple[int, ...]], ends: list[Time], begins: list[Time]
) -> int:
    """Find when an exchange begins that waits for no other; or the compute that it still waits for,
    -1 for none."""
    begin: Time = 0
    for post in posts[exchange]:
        if post >= 0:
            end = ends[post]
            if end < 0:
                return post
            if end > begin:
                begin = end
    begins[exchange] = begin
    return -1


def _in_order(
    exchanges: Exchanges, ends: list[Time], begins: list[Time]
) -> Callable[[int], int] | None:
    """What does the same for exchanges that wait for others; None where none does."""
    if exchanges.also:
        left = {e: [other] for e, other in enumerate(exchanges.before) if other >= 0}
        for exchange, others in exchanges.also.items():
            left.setdefault(exchange, []).extend(others)
        return _InTurns(exchanges, ends, begins, left)
    if exchanges.before:
        return partial(_begin_in_order, exchanges, ends, begins)
    return None


def _begin_in_order(
    exchanges: Exchanges, ends: list[Time], begins: list[Time], exchange: int
) -> int:
    """Find when an exchange begins that waits for the one before it on its channel."""
    before, holds = exchanges.before, exchanges.holds
    chain = [exchange]
    while before[chain[-1]] >= 0 and begins[before[chain[-1]]] < 0:
        chain.append(before[chain[-1]])
    for current in reversed(chain):
        held = _begin(current, exchanges.posts, ends, begins)
        if held >= 0:
            return held
        if before[current] >= 0:
            free = begins[before[current]] + holds[before[current]]
            begins[current] = max(begins[current], free)
    return -1


@attrs.frozen(eq=False)
class _InTurns:
    """Does the same for exchanges that wait for several.

    `left[e]` are those that exchange e waits for and that have not been seen to be over, `over[e]`
    is when it need not wait any more for the others.
    """

    exchanges: Exchanges
    ends: list[Time]
    begins: list[Time]
    left: dict[int, list[int]]
    over: dict[int, Time] = attrs.field(factory=dict)

    def __call__(self, exchange: int) -> int:
        begins, over, closing = self.begins, self.over, self.exchanges.closing
        takes, holds = self.exchanges.takes, self.exchanges.holds
        chain = [exchange]  # each waits for the next
        chained = {exchange}
        while chain:
            current = chain[-1]
            left = self.left.get(current, [])
            lengths = takes if current >= closing else holds
            while left and begins[left[-1]] >= 0:
                other = left.pop()
                over[current] = max(over.get(current, 0), begins[other] + lengths[other])
            if left:
                if left[-1] in chained:
                    return len(self.ends)  # it waits for itself: for ever, as for no compute
                chain.append(left[-1])
                chained.add(left[-1])
                continue
            held = _begin(current, self.exchanges.posts, self.ends, begins)
            if held >= 0:
                return held
            begins[current] = max(begins[current], over.get(current, 0))
            chain.pop()
        return -1
