"""When compute runs: each rank in list order, each action as soon as what it needs has arrived.

    time     0    1    2    3    4    5
    rank 0   0F0  0F1                       a transfer is posted at each end once the compute
                ↘    ↘                      before it is done; it begins when all its ends are
    rank 1        1F0  1B0------ 1F1        posted and its channel is free

One pass over all compute, each rank as far as it gets until it waits; what it posts begins with the
last of its ends. Two parts that start together are two numbers in a row: the first takes no time,
and the second, once it has its input as well, the time of both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import attrs
import numpy as np

from schedir.ir.columns import KINDS, Ints

Time: TypeAlias = float
"""In the unit of the costs; ints stay ints."""


TEXTBOOK = np.array([kind.meaning.cost for kind in KINDS])
"""What each kind costs in the textbook, by its index in KINDS: a backward is two forwards."""


@attrs.frozen(eq=False)
class Exchanges:
    """What compute waits for: transfers, and collectives, numbered from 0.

    `posted[c]` are those of which an end is posted after compute c, in list order, and `ends[e]`
    says how many ends of exchange e that are. `queue[e]` is the number of its channel, say: those
    of one begin one after the other, in the order in which each of their ranks posts them.

    Where there are batches, `followers[e]` are those that wait for exchange e, and `followed[e]`
    says for how many it waits itself. Those from `closing` on are the ends of batches, which wait
    until the others have arrived.
    """

    posted: Sequence[Sequence[int]]
    ends: Sequence[int]
    queue: Sequence[int]
    followers: Sequence[Sequence[int]] = ()
    followed: Sequence[int] = ()
    closing: int = sys.maxsize


def posted_after(compute: Ints, exchange: Ints, computes: int, queue: Ints) -> Exchanges:
    """Exchanges without batches: each `exchange` has an end that is posted after the `compute`, of
    which -1 stands for the beginning. Those after one compute are given in list order."""
    known = np.flatnonzero(compute >= 0)
    order = known[np.argsort(compute[known], kind="stable")]
    listed = tuple(exchange[order].tolist())
    bounds = np.searchsorted(compute[order], np.arange(computes + 1)).tolist()
    return Exchanges(
        posted=[listed[begin:end] for begin, end in pairwise(bounds)],
        ends=np.bincount(exchange[known], minlength=len(queue)).tolist(),
        queue=queue.tolist(),
    )


@attrs.frozen
class Times:
    """When compute starts and ends, and exchanges begin; -1 for what never does: then some compute
    is `blocked`."""

    starts: list[Time]
    ends: list[Time]
    begins: list[Time]
    blocked: bool


def run(
    bounds: Sequence[int],
    durations: Sequence[Time],
    needs: Sequence[int],
    exchanges: Exchanges,
    takes: Sequence[Time] = (),
    holds: Sequence[Time] = (),
) -> Times:
    """Run all compute, numbered rank by rank: rank r's is `bounds[r]` to `bounds[r + 1]` - 1.

    `needs[c]` is the exchange that compute c waits for, -1 for none. What an exchange brings has
    arrived `takes[e]` after it begins, and what follows it may begin `holds[e]` after that, no
    later; both are empty where nothing takes any time.
    """
    posted, queue, followers = exchanges.posted, exchanges.queue, exchanges.followers
    missing = [*exchanges.ends]
    if followers:
        missing = [ends + others for ends, others in zip(missing, exchanges.followed, strict=True)]
    takes, holds = takes or [0] * len(missing), holds or [0] * len(missing)
    starts: list[Time] = [-1] * len(durations)
    ends = starts.copy()
    begins: list[Time] = [0] * len(missing)
    arrivals: list[Time] = [-1] * len(missing)
    free: list[Time] = [0] * (max(queue, default=-1) + 1)
    reached = list(bounds[:-1])
    clock: list[Time] = [0] * len(reached)
    # By exchange, the rank that waits for it; by rank, the one that waits behind it.
    waiting, behind = [-1] * len(missing), [-1] * len(reached)
    ready = list(range(len(reached)))
    done = 0
    # What waits for nothing any more, in the order in which it is posted on each channel.
    begun = [e for e, left in enumerate(missing) if not left] if 0 in missing else []
    while ready or begun:
        for exchange in begun:
            begin, channel = begins[exchange], queue[exchange]
            if free[channel] > begin:
                begin = begins[exchange] = free[channel]
            free[channel] = begin + holds[exchange]
            arrivals[exchange] = begin + takes[exchange]
            woken = waiting[exchange]
            while woken >= 0:
                ready.append(woken)
                woken = behind[woken]
            if followers:
                for follower in followers[exchange]:
                    over = takes if follower >= exchanges.closing else holds
                    begins[follower] = max(begins[follower], begin + over[exchange])
                    missing[follower] -= 1
                    if not missing[follower]:
                        begun.append(follower)
        begun.clear()
        if not ready:
            break
        rank = ready.pop()
        time = clock[rank]
        for compute in range(reached[rank], bounds[rank + 1]):
            need = needs[compute]
            if need >= 0:
                arrival = arrivals[need]
                if arrival < 0:
                    waiting[need], behind[rank] = rank, waiting[need]
                    reached[rank] = compute
                    break
                if arrival > time:
                    time = arrival
            starts[compute] = time
            time += durations[compute]
            ends[compute] = time
            for exchange in posted[compute]:
                if time > begins[exchange]:
                    begins[exchange] = time
                if missing[exchange] > 1:
                    missing[exchange] -= 1
                else:
                    begun.append(exchange)
        else:
            done += 1
        clock[rank] = time
    blocked = done < len(reached)
    if blocked:
        begins = [-1 if over < 0 else time for time, over in zip(begins, arrivals, strict=True)]
    return Times(starts, ends, begins, blocked)
