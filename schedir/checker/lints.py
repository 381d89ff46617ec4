"""S5xx: correct schedules that are slower than necessary.

They are judged at the costs given, by default the textbook's (F = 1, B = 2, I = W = 1, transfers
free), as simulated.

A send may stand right after the compute that makes its payload, and after the send before it on its
channel. The rank at the other end may have to wait for anything computed in between. To find the
send that costs most, the list is run with each send moved. A part of a batch is posted with the
batch, so it is neither late nor early.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, Finding, Move, fault
from schedir.checker.repairs import slide
from schedir.graph.compile import Graph, graph_of
from schedir.graph.paths import (
    AFTER,
    QUEUED,
    Prices,
    Waits,
    compute_before,
    delays,
    finish,
    previous_of_queue,
    textbook,
    textbook_prices,
    waits,
)
from schedir.ir import COMMUNICATION, COMPUTE, RECEIVES, SENDS, Ints, Schedule
from schedir.passes import split_batches

# The list is run again for each late send that may cost something, while this many actions last.
_MOST_RUN = 1_000_000
_OVERHEAD = 2500


@runtime_checkable
class Pricing(Protocol):
    """What prices the actions of a list: a `CostModel`."""

    def prices(self, schedule: Schedule) -> Prices:
        """What every action of a complete schedule costs."""


def lints(schedule: Schedule, channel: str, costs: Pricing | None = None) -> Iterator[Faults]:
    """Why a correct, complete schedule is slower than necessary, by default at the textbook
    costs."""
    posted = _posting(schedule, channel, costs)
    yield from _late_sends(posted)
    # Under `host` every early receive holds up compute too; `edge` holds up no other channel.
    if channel in ("rank", "pair"):
        clock = _clock(schedule, costs, channel, posted.clock.prices)
        yield from _late_receives(posted, _held_up(posted, channel, clock.done))
        yield from _early_receives(clock, posted.listed.max())
    else:
        yield from _late_receives(posted)
    yield from _needless_splits(posted.graph)
    each = 3 if costs is None else _of_one_chunk(schedule, posted.clock.prices.takes)
    if each is not None:
        yield from _group_size(posted, each)


@attrs.frozen(eq=False)
class _Clock:
    """A run of a complete schedule as it is listed, under a channel model.

    `prices` are those of its actions, and an overlapped pair is one action; `begins` is when each
    node begins, and `done` when each place is over. The last element of `done`, for the beginning,
    is 0. `times` says in words what these are in.
    """

    schedule: Schedule
    channel: str
    prices: Prices
    begins: Ints
    done: Ints
    times: str


def _clock(
    schedule: Schedule, costs: Pricing | None, channel: str, prices: Prices | None = None
) -> _Clock:
    """The run of a schedule, of which the `prices` are given if they are known."""
    if costs is None:
        times = "times are in forwards of one stage; a backward takes two"
        prices, begins = prices or textbook_prices(schedule.columns), textbook(schedule, channel)
    else:
        times, prices = "times are at the costs given", prices or costs.prices(schedule)
        if channel != "edge":
            prices = prices.by_ends(graph_of(schedule).transfers.receive)
        begins = finish(_waits(schedule, channel), prices.takes, prices.holds)
    return _Clock(schedule, channel, prices, begins, _done(prices, begins), times)


def _waits(schedule: Schedule, channel: str, posted: Ints | None = None) -> Waits:
    """What waits for what: `edge` as without a channel model, as what could be."""
    return waits(schedule, channel, posted=posted, by_ends=channel != "edge")


def _done(prices: Prices, begins: Ints) -> Ints:
    """When each place is over, and 0 for the beginning, given when each node begins."""
    takes = prices.takes
    return np.append(begins[: len(takes)] + takes, 0)


@attrs.frozen(eq=False)
class _Posting:
    """When a complete schedule runs: as listed, and with no late send.

    By transfer: the transfer `previous` on its channel, -1 for none, and the place of the compute
    after which its send is posted: as `sent`, or at best with only this send moved (`alone`) or
    with all moved (`together`). By place: the compute `before` it, -1 for none, and when the place
    is over, as `listed` or if all sends are `prompt`; the last element, for the beginning, is 0.
    `clock` runs the schedule.
    """

    graph: Graph
    clock: _Clock
    before: Ints
    previous: Ints
    sent: Ints
    alone: Ints
    together: Ints
    listed: Ints
    prompt: Ints


def _posting(schedule: Schedule, channel: str, costs: Pricing | None) -> _Posting:
    """Run the schedule, and again if sends are late."""
    graph, columns = graph_of(schedule), schedule.columns
    # Where posts never block, a batch is its parts; it may not run as one does.
    clock = _clock(split_batches(schedule) if channel == "async" else schedule, costs, "edge")
    transfers, before = graph.transfers, compute_before(columns)
    order, follows = transfers.by_channel
    later, earlier = transfers.in_turn
    sent = before[transfers.send]
    maker = np.where(columns.shared[transfers.send], sent, columns.last[transfers.maker])
    previous = np.full(len(order), -1)
    previous[later] = earlier
    alone = np.maximum(maker, np.where(previous < 0, -1, sent[previous]))
    # No send passes another one of its channel: the latest maker so far, channel by channel.
    ahead_of = np.cumsum(~follows) * len(columns)
    together = maker.copy()
    together[order] = np.maximum.accumulate(ahead_of + maker[order]) - ahead_of
    listed = clock.done
    posted = _Posting(graph, clock, before, previous, sent, alone, together, listed, listed)
    if (sent > together).any():
        posted = attrs.evolve(posted, prompt=_run(posted, together))
    return posted


def _run(posted: _Posting, sent: Ints) -> Ints:
    """When each place is over, if its sends are posted after these places."""
    after = posted.before.copy()
    after[posted.graph.transfers.send] = sent
    clock = posted.clock
    waiting = _waits(clock.schedule, clock.channel, after)
    begins = finish(waiting, clock.prices.takes, clock.prices.holds)
    return _done(clock.prices, begins)


def _late_receives(posted: _Posting, most: Ints | None = None) -> Iterator[Faults]:
    """One finding for all, at the receive that is posted the latest after its send.

    If sends are late, a receive in step with them may come before its send or long after it, so
    receives are judged as if no send were late. `most` limits, by transfer, how late a receive
    counts: if a channel model holds up the send, the receive is not late for that time.
    """
    schedule, columns = posted.graph.schedule, posted.graph.columns
    transfers, before = posted.graph.transfers, posted.before
    late = posted.prompt[before[transfers.receive]] - posted.prompt[posted.together]
    if most is not None:
        late = np.minimum(late, most)
    at_once = before[transfers.receive] == before[transfers.user]
    found = np.flatnonzero((late > 0) & at_once & ~columns.shared[transfers.receive])
    if len(found):
        found = found[np.argsort(-late[found], kind="stable")]
        receive, user = int(transfers.receive[found[0]]), int(transfers.user[found[0]])
        finding = rules.LATE_RECEIVE.at(
            schedule,
            receive,
            user,
            late=float(late[found[0]]),
            receives=len(found),
            times=posted.clock.times,
        )
        moves = slide(schedule, receive, "before", int(before[receive])).moves()
        yield Faults(
            rule=rules.LATE_RECEIVE, keys=found, findings=[Finding(finding, (None, moves))], many=1
        )


def _late_sends(posted: _Posting) -> Iterator[Faults]:
    """One finding for all, at the send whose move saves the most time."""
    makespan, possible = posted.listed.max(), posted.prompt.max()
    if makespan <= possible:
        return
    schedule, transfers = posted.graph.schedule, posted.graph.transfers
    critical = _critical(posted)
    many = max(1, _MOST_RUN // (len(schedule.columns) + _OVERHEAD))
    regained = dict.fromkeys(critical, 0.0)
    for transfer in critical[:many]:
        sent = posted.sent.copy()
        sent[transfer] = posted.alone[transfer]
        regained[transfer] = float(makespan - _run(posted, sent).max())
    worst = max(regained, key=lambda transfer: regained[transfer])
    others = np.flatnonzero(posted.sent > posted.together)
    after = _after(posted, worst)
    finding = rules.LATE_SEND.at(
        schedule,
        transfers.send[worst],
        after,
        sends=len(others),
        makespan=float(makespan),
        alone=float(makespan - regained[worst]),
        possible=float(possible),
        times=posted.clock.times,
    )
    yield Faults(
        rule=rules.LATE_SEND,
        keys=np.concatenate(([worst], others[others != worst])),
        findings=[
            Finding(finding, (None, _sooner(posted, worst, after)) if regained[worst] else None)
        ],
        many=1,
    )


def _critical(posted: _Posting) -> list[int]:
    """The late sends on a critical path, the latest first. There is at least one if late sends make
    the step longer, and moving any other send saves nothing."""
    columns, transfers, listed = posted.graph.columns, posted.graph.transfers, posted.listed
    clock = posted.clock
    waiting, begins = _waits(clock.schedule, clock.channel), clock.begins
    over = begins[waiting.awaited] + delays(waiting, clock.prices.takes, clock.prices.holds)
    tight = np.flatnonzero(over == begins[waiting.waiter])
    # Of the waits of each node that are over as it begins, those for compute first.
    later, why = waiting.later[tight], waiting.why[tight]
    keys = later, ~columns.is_kind(*SENDS)[later], why, waiting.waiter[tight]
    tight = tight[np.lexsort(keys)]
    waiters = waiting.waiter[tight]
    of_send = np.full(len(columns), -1)
    of_send[transfers.send] = np.arange(len(transfers))
    computes = columns.where(*COMPUTE)
    node = int(waiting.node[computes[listed[computes].argmax()]])
    found: dict[int, int] = {}
    while begins[node]:
        wait = int(tight[np.searchsorted(waiters, node)])
        transfer = int(of_send[waiting.later[wait]]) if waiting.why[wait] == AFTER else -1
        if transfer >= 0 and posted.sent[transfer] > posted.together[transfer]:
            while posted.sent[transfer] == posted.alone[transfer]:
                transfer = int(posted.previous[transfer])  # late for the one before on its channel
            found.setdefault(transfer, int(begins[node] - listed[posted.alone[transfer]]))
        node = int(waiting.awaited[wait])
    return sorted(found, key=lambda transfer: -found[transfer])


def _after(posted: _Posting, transfer: int) -> int:
    """The place that a send must follow: its maker, or the send before it on its channel."""
    transfers, previous = posted.graph.transfers, posted.previous[transfer]
    maker = int(transfers.maker[transfer])
    return maker if previous < 0 else max(maker, int(transfers.send[previous]))


def _sooner(posted: _Posting, transfer: int, after: int) -> Iterator[Move]:
    """The change that moves a send right after the place that it must follow, or after other
    communication there."""
    columns = posted.graph.columns
    send = int(posted.graph.transfers.send[transfer])
    rank, index = columns.position(send)
    # The compute after the last one that it has to follow.
    computes = columns.where(*COMPUTE)
    until = int(computes[np.searchsorted(computes, posted.alone[transfer], side="right")])
    targets = dict.fromkeys(
        columns.position(target)[1] for target in range(after, min(until, send))
    )
    for target in targets:
        yield Move(rank, index, "after", target, "post")


def _held_up(posted: _Posting, channel: str, done: Ints) -> Ints:
    """By transfer, how much later its receive is posted than its send could run under a channel
    model; `done` are the times under that model."""
    columns, transfers = posted.graph.columns, posted.graph.transfers
    if columns.together:  # what waits for a part waits for all of its entry
        done = np.append(np.maximum.reduceat(done[:-1], columns.heads)[columns.entry], 0)
    previous = previous_of_queue(posted.graph, channel)[transfers.send]
    ready = np.maximum(done[posted.before[transfers.send]], done[previous])
    late: Ints = done[posted.before[transfers.receive]] - ready
    return late


def _early_receives(clock: _Clock, possible: float) -> Iterator[Faults]:
    """The receive that holds up the most, if it makes the step longer than is possible."""
    makespan = clock.done.max()
    if makespan <= possible:
        return
    schedule, columns = clock.schedule, clock.schedule.columns
    waiting = _waits(schedule, clock.channel)
    # Of all that each node waits for, what is done last, and how much later than all the rest.
    over = delays(waiting, clock.prices.takes, clock.prices.holds)
    node, ends = waiting.waiter, clock.begins[waiting.awaited] + over
    order = np.lexsort((ends, node))
    last = np.flatnonzero(np.append(node[order][1:] != node[order][:-1], True))
    rest = np.where(last > 0, last - 1, last)
    rest_ends = np.where(node[order[rest]] == node[order[last]], ends[order[rest]], 0)
    held = np.where(rest == last, 0, ends[order[last]] - rest_ends)
    edge = order[last]
    blamed = columns.is_kind(*RECEIVES)[waiting.earlier[edge]]
    blamed &= ~columns.shared[waiting.earlier[edge]] & (waiting.why[edge] == QUEUED)
    held = np.where(blamed, held, 0)
    worst = int(held.argmax())
    if held[worst] > 0:
        receive, other = int(waiting.earlier[edge[worst]]), int(waiting.later[edge[worst]])
        yield fault(
            rules.EARLY_RECEIVE.at(
                schedule,
                receive,
                other,
                channel=clock.channel,
                held=float(held[worst]),
                makespan=float(makespan),
                possible=float(possible),
                times=clock.times,
            ),
            slide(schedule, receive, "after", other).moves(),
        )


def _needless_splits(graph: Graph) -> Iterator[Faults]:
    """An I directly followed by its W. An action between the two may be the reason for the
    split."""
    first, second = graph.where("make", "deferred"), graph.where("end", "deferred")
    pairs = np.sort(first[(first >= 0) & (second == first + 1)])
    # That of an overlapped pair is one with the forward beside it.
    pairs = pairs[~graph.columns.shared[pairs]].tolist()
    if pairs:
        places = (at for pair in pairs for at in (pair, pair + 1))
        yield fault(rules.NEEDLESS_SPLIT.at(graph.schedule, *places), extent=len(pairs))


def _group_size(posted: _Posting, each: float) -> Iterator[Faults]:
    """Interleaved 1F1B takes (V · M + P − 1) times as long as `each` microbatch does on a chunk, in
    groups of P microbatches."""
    graph, schedule, makespan = posted.graph, posted.graph.schedule, posted.prompt.max()
    if (graph.where("end", "kept") >= 0).any():
        return  # a recomputation takes longer for another reason
    ranks, microbatches = schedule.ranks, schedule.microbatches
    chunks = schedule.stages // ranks
    looped = schedule.placement == tuple((stage % ranks,) for stage in range(ranks * chunks))
    if not looped or chunks < 2 or ranks < 2 or microbatches % ranks:
        return
    # The group is what the first rank runs of its first chunk before its second.
    group = int((graph.home[0] < graph.home[ranks].min()).sum())
    possible = each * (chunks * microbatches + ranks - 1)
    if group != ranks and makespan > possible:
        yield fault(
            rules.GROUP_SIZE.at(
                schedule,
                graph.home[ranks].min(),
                group=group,
                ranks=ranks,
                makespan=float(makespan),
                possible=float(possible),
                times=posted.clock.times,
            )
        )


def _of_one_chunk(schedule: Schedule, takes: Ints) -> float | None:
    """How long one microbatch computes on one chunk; None if that differs, where compute overlaps
    for one, or if transfers take time."""
    columns = schedule.columns
    if takes[columns.is_kind(*COMMUNICATION)].any():
        return None
    computes = columns.is_kind(*COMPUTE) & (columns.microbatch >= 0) & ~columns.joined
    total = np.zeros((schedule.stages, schedule.microbatches), takes.dtype)
    np.add.at(total, (columns.stage[computes], columns.microbatch[computes]), takes[computes])
    return None if np.ptp(total) else float(total[0, 0])
