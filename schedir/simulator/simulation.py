"""Runs a schedule under given costs: as a transport posts it, or as if none held anything up.

Without a channel model every schedule that runs on some transport runs here, on `edge`: a batch
that blocks under it but not if posts never block is run as its parts.

A rank runs its compute in list order, each action as soon as the one before it is done and its
receive has arrived. A transfer is posted when the compute listed before its send is done, starts
when its channel is free, occupies it for as long as its bytes take, and arrives a latency later:

    rank 0   0F0 0SEND_ACT0 0F1 ...         posted at 1
                          ══─ ─ ─ ─         starts at 1: on the channel ══, on its way ─ ─
    rank 1   1RECV_ACT0           1F0 ...   starts when it has arrived

A copy to the host or back is posted when the compute listed before it is done, and starts when its
rank's engine is free.

Under a channel model nothing is buffered: a transfer starts when both its ends are posted and the
first in their queues, and its link is free. Its send holds up its queue for as long as its bytes
take, its receive until the payload has arrived:

    rank 0   1RECV_GRAD0 0SEND_ACT1     under `rank` one queue: 0SEND_ACT1 waits for the gradient
    rank 1   1SEND_GRAD0 1RECV_ACT1     under `edge` two: it waits for its compute alone
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.checker import prove, sound
from schedir.graph.compile import graph_of
from schedir.graph.paths import QUEUED, Prices, Waits, finish, textbook, textbook_prices, waits
from schedir.ir import (
    CHANNELS,
    COMMUNICATION,
    COPIES,
    Schedule,
    expect_schedule,
)
from schedir.ir.tokens import clip
from schedir.passes.receives import SPARE_BYTES
from schedir.simulator.costs import CostModel
from schedir.simulator.moments import CHANNEL, Posting, as_run
from schedir.simulator.timeline import Timeline
from schedir.simulator.values import MOST, Numbers, expect_number

Receives: TypeAlias = Literal["ahead", "listed"]
"""When receives are posted: from the beginning on, or where they are listed."""
Durations: TypeAlias = Mapping[tuple[int, int], float]
"""How long entries take, by (rank, index)."""

_WEAKEST = CHANNELS[-1]
_MOST_INT = 2**62
_SHORT = 10_000  # actions: what waits for what takes a megabyte at most


_textbook = cache(CostModel)  # made once, as small lists are simulated in less time


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    durations: Durations | None = None,
    receives: Receives = "ahead",
    channel: str | None = None,
) -> Timeline:
    """Run the schedule under a cost model (by default the textbook's, `CostModel()`).

    Receives are posted `"ahead"` of their place, so they delay nothing. With `"listed"` a transfer
    also waits for the compute listed before its receive. Parts of a batch are posted with the batch
    in both cases.

    By default no transport's order holds up anything: transfers of one channel follow each other.
    With a `channel` model, or a transport that stands for one, transfers wait for each other as
    there (`schedir.ir.channels`), without buffers: a bound from above. Receives are then `"ahead"`
    as far as the executor moves them: by `advance_receives`, with as many buffers as fit into a
    mebibyte at the largest of `boundary_bytes`. Under `rank`, which `nccl` stands for, the result
    also has its `edge_makespan`: how soon the same lists end if no stream hinders another one.

    `durations[rank, index]` replaces the cost of one entry of the lists as you give them; for an
    overlapped pair it is the time of both parts. For a send or receive it is the time from the
    start of its transfer to its arrival. The channel is then occupied for as long as `costs` says,
    but no longer than the duration. For a batch it is the time of each transfer. If both ends of a
    transfer, or several REDUCE_GRADs that happen together, have durations, the longest counts.

    A compute-only schedule gets its communication first. Times are integers if all costs are.

    Raises ScheduleError, with the findings of `schedir.check`, if the schedule is wrong, or does
    not run under the channel model (without one: under any). Raises SchedirError if the costs lack
    a stage or a link of the schedule. Raises ValueError for `durations` of an unknown entry or that
    are not finite and >= 0, and for another `receives` or `channel`. Raises TypeError for anything
    that is not a Schedule or a CostModel.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=4))
    >>> line.makespan, line.bubble_fraction, line.ranks[0].peak_activations
    (15, 0.19999999999999996, 2)
    """
    if receives not in ("ahead", "listed"):
        raise ValueError(f'receives must be "ahead" or "listed", not {receives!r}')
    costs = _textbook() if costs is None else costs
    complete = completed(schedule, costs, channel)
    priced = costs.prices(complete)
    if durations:
        priced = _overridden(priced, schedule, complete, durations)
    edge_makespan, ahead = None, receives == "ahead"
    posting = posting_of(complete, costs, channel, ahead=ahead)
    starts = _starts(complete, costs, priced, posting, ahead=ahead)
    if posting is not None and posting.channel == "rank":
        free = _starts(complete, costs, priced, posting, CHANNEL)
        edge_makespan = (free + priced.takes).max(initial=0).item()
    sizes = costs.sizes if costs.sizes.known else None
    ends = starts + priced.takes
    return Timeline(
        complete, starts, ends, sizes, costs.unit, posting=posting, edge_makespan=edge_makespan
    )


def completed(schedule: Schedule, costs: CostModel, channel: str | None = None) -> Schedule:
    """The schedule with its communication. Raises as `simulate` does; without a channel model a
    deadlock only shows when the schedule is run."""
    expect_schedule(schedule)
    if not isinstance(costs, CostModel):
        raise TypeError(f"costs must be a CostModel, not {costs!r}")
    if channel is not None:
        return prove(schedule, channel).proved()
    return sound(schedule) or prove(schedule, _WEAKEST).proved()


def posting_of(
    schedule: Schedule, costs: CostModel, channel: str | None, *, ahead: bool = True
) -> Posting | None:
    """How a complete schedule is posted under a channel model, with as much room for receives
    `ahead` as the executor has; None without a model."""
    if channel is None:
        return None
    largest = max(costs.by_stage("boundary_bytes", schedule.stages - 1), default=0)
    room = min(int(SPARE_BYTES // max(largest, 1)), len(graph_of(schedule).transfers))
    return Posting(channel, room if ahead else None)


def waits_of(
    schedule: Schedule,
    costs: CostModel,
    priced: Prices,
    posting: Posting | None,
    channel: str | None = None,
    ahead: bool = True,
) -> Waits:
    """What waits for what when a complete schedule runs as posted, under another `channel` model if
    one is named; without a posting, with receives `ahead`. Raises ScheduleError if it blocks."""
    waiting = _waits(schedule, ahead) if posting is None else posting.waits(schedule, channel)
    return _sharing_engines(waiting, costs, priced)


def _waits(schedule: Schedule, ahead: bool) -> Waits:
    """What waits for what where posts never block, kept for the next costs if the list is short."""
    waiting = schedule.memo.get((_waits, ahead))
    if not isinstance(waiting, Waits):
        waiting = waits(as_run(schedule), CHANNEL, ahead=ahead)
        if waiting.stuck.any():
            prove(schedule, _WEAKEST).proved()  # raises: what blocks here blocks where posts don't
        if waiting.nodes <= _SHORT:
            schedule.memo[_waits, ahead] = waiting
    return waiting


def _sharing_engines(waiting: Waits, costs: CostModel, priced: Prices) -> Waits:
    """The waits, and those of copies for the ones before them on an engine that ranks share: in the
    order in which they would be posted if no copy took any time."""
    copies, engines = waiting.schedule.columns.where(*COPIES), costs.copy_engine
    if not engines or not len(copies):
        return waiting
    takes, holds = priced.takes.copy(), priced.holds.copy()
    takes[copies] = holds[copies] = 0
    posted = finish(waiting, takes, holds)[copies]
    rank = waiting.schedule.columns.rank[copies]
    engine = np.array([engines.get(each, -1 - each) for each in rank.tolist()])
    # Of those posted at once that of the lower rank goes first, unless it waits for the other.
    for tie in (copies, waiting.turn[copies]):
        order = np.lexsort((tie, posted, engine))
        again = np.flatnonzero(engine[order][1:] == engine[order][:-1])
        later, earlier = copies[order[again + 1]], copies[order[again]]
        shared = attrs.evolve(
            waiting,
            later=np.append(waiting.later, later),
            earlier=np.append(waiting.earlier, earlier),
            why=np.append(waiting.why, np.full(len(again), QUEUED)),
            waiter=np.append(waiting.waiter, later),
            awaited=np.append(waiting.awaited, earlier),
        )
        if not shared.stuck.any():
            break
    return shared


def _starts(
    schedule: Schedule,
    costs: CostModel,
    priced: Prices,
    posting: Posting | None,
    channel: str | None = None,
    ahead: bool = True,
) -> Numbers:
    """When each action of a complete schedule starts, as `waits_of` says. Raises ScheduleError if
    it blocks."""
    if _is_textbook(schedule, priced):
        freely = partial(textbook, as_run(schedule), CHANNEL)
        starts = (
            freely(ahead=ahead)
            if posting is None
            else textbook(schedule, channel or posting.channel)
        )
        starts = _of_places(schedule, starts)
        # Receives are posted between ahead and listed, and transfers take no time.
        settled = posting is None or posting.stays
        settled = settled or np.array_equal(starts, _of_places(schedule, freely(ahead=True)))
        if settled and starts.min(initial=0) >= 0:
            return starts
    waiting = waits_of(schedule, costs, priced, posting, channel, ahead)
    return _of_places(schedule, finish(waiting, priced.takes, priced.holds))


def _of_places(schedule: Schedule, starts: Numbers) -> Numbers:
    starts = starts[: len(schedule.columns)]
    return starts.astype(np.float64) if starts.max(initial=0) > _MOST_INT else starts


def _is_textbook(schedule: Schedule, priced: Prices) -> bool:
    usual = textbook_prices(schedule.columns).takes
    return all(
        each.dtype == usual.dtype and np.array_equal(each, usual)
        for each in (priced.takes, priced.holds)
    )


# Single entries that take another time.


def _overridden(
    priced: Prices, given: Schedule, complete: Schedule, durations: Durations
) -> Prices:
    """The prices with those of some entries replaced, located in the lists as they were `given`.

    Raises ValueError for a key that names no entry, ValueError or TypeError for what is no finite
    time >= 0.
    """
    columns, graph, heads = complete.columns, graph_of(complete), given.columns.heads
    first = np.searchsorted(heads, given.columns.starts)
    lengths, times = np.diff(first).tolist(), np.array([*durations.values()])
    fine = times.dtype.kind in "iuf" and ((times >= 0) & (times <= MOST)).all()
    for key, time in durations.items():
        whole = isinstance(key, tuple) and all(isinstance(at, int | np.integer) for at in key)
        if not whole or len(key) != 2:
            raise ValueError(f"durations must be by (rank, index), not by {key!r}")
        rank, index = key
        name = f"durations[{rank}, {index}]"
        if not (0 <= rank < given.ranks and 0 <= index < lengths[rank]):
            why = f"its ranks have {clip(lengths)} entries"
            raise ValueError(f"{name} is of no entry of {given.name}: {why}")
        if not fine:
            expect_number(f"{name}, of {given.actions[rank][index]},", time)
    ranks, indices = np.array([*durations]).T
    if complete is not given:
        # Both have the same entries, but for communication.
        heads = np.flatnonzero(~columns.is_kind(*COMMUNICATION))[heads]
    # The time given to the entry of each place, -1 for none.
    dtype = np.float64 if times.dtype.kind == "f" else np.int64
    by_entry = np.full(len(columns.heads), -1, dtype)
    by_entry[columns.entry[heads[first[ranks] + indices]]] = times
    longest = by_entry[columns.entry]
    send, receive = graph.transfers.send, graph.transfers.receive
    longest[send] = longest[receive] = np.maximum(longest[send], longest[receive])
    for places in map(list, graph.collectives):
        longest[places] = longest[places].max()
    takes = np.where(longest >= 0, longest, priced.takes)
    holds = takes.copy()
    for ends in (send, receive):
        holds[ends] = np.minimum(priced.holds[ends], takes[ends])
    return Prices(takes, holds)
