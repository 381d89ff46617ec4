"""A complete schedule as the clock runs it, on the `edge` channel model: compute and exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from schedir.ir.batch_points import points_of_batches
from schedir.ir.clock import TEXTBOOK, Exchanges, Time, Times, posted_after, run
from schedir.ir.collectives import collective_turns, sums_of_steps
from schedir.ir.columns import Bools, Ints, summed_at_last
from schedir.ir.dataflow import Transfers
from schedir.ir.kinds import COMMUNICATION, COMPUTE
from schedir.ir.schedule import Schedule


# Not slotted, so that the run at the textbook costs can be kept beside the fields.
@attrs.frozen(eq=False, slots=False)
class Plan:
    """What the clock runs, with the textbook's costs as `durations`.

    `compute` holds the places of all compute, `bounds` the number of each rank's first, `last` the
    number of the last part of each one's entry: a part of an overlapped pair starts and ends when
    that does, and the time of both is the last one's. The exchanges are the `transfers` of the
    dataflow; then the `collectives`, the places of REDUCE_GRADs that belong together; then the
    start and the end of each batch, of which there are `batches`, which nobody posts. `exchanged`
    has the places of those that stand in the lists, and their numbers.
    `last_before[place]` is the number of the compute before a place, -1 for none: so a transfer is
    posted after the compute `sent` at one end, and `received` at the other; `in_batch` says where
    that is part of a batch, and `before` is the one before it on its channel, -1 for none. `queue`
    is, by exchange, the number of its channel, or that of its stage's sums. Where there are
    batches, `also` has all the exchanges that each one waits for.
    """

    compute: Ints
    bounds: Ints
    last: Ints
    durations: Ints
    needs: Ints
    sent: Ints
    received: Ints
    in_batch: Bools
    queue: Ints
    before: Ints
    also: dict[int, list[int]]
    batches: int
    transfers: int
    collectives: list[tuple[int, ...]]
    exchanged: tuple[Ints, Ints]
    last_before: Ints

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = self.bounds.tolist()
        return bounds

    @cached_property
    def _needs(self) -> list[int]:
        needs: list[int] = self.needs.tolist()
        return needs

    @cached_property
    def listed(self) -> Exchanges:
        """The exchanges, posted where they are listed."""
        return self._posted(self.sent, self.received)

    @cached_property
    def ahead(self) -> Exchanges:
        """The same, with receives posted from the beginning on; those of a batch with that."""
        return self._posted(self.sent, np.where(self.in_batch, self.received, -1))

    def _posted(self, sent: Ints, received: Ints) -> Exchanges:
        """The exchanges, their sends and receives posted after these."""
        places, numbers = self.exchanged
        after = np.concatenate((sent, received, self.last_before[places[2 * self.transfers :]]))
        order = np.argsort(places)
        posted = posted_after(after[order], numbers[order], len(self.compute), self.queue)
        if not self.also:
            return posted
        followers: list[list[int]] = [[] for _ in posted.queue]
        for exchange, others in self.also.items():
            for other in others:
                followers[other].append(exchange)
        followed = [len(self.also.get(exchange, ())) for exchange in range(len(followers))]
        closing = len(followers) - self.batches
        return attrs.evolve(posted, followers=followers, followed=followed, closing=closing)

    def posts(self, exchange: int) -> list[int]:
        """The compute after which each end of an exchange is listed, -1 for none before it."""
        if exchange < self.transfers:
            return [int(self.sent[exchange]), int(self.received[exchange])]
        turn = exchange - self.transfers
        places = self.collectives[turn] if turn < len(self.collectives) else ()
        return [int(self.last_before[place]) for place in places]

    def run(self, sent: Ints) -> Times:
        """When all runs at the textbook costs, its sends posted after these."""
        posts = self._posted(sent, self.received)
        return self.priced(self.durations.tolist(), posts=posts)

    def priced(
        self,
        durations: Sequence[Time],
        takes: Sequence[Time] = (),
        holds: Sequence[Time] = (),
        *,
        posts: Exchanges,
    ) -> Times:
        """When all runs at other costs: each compute takes its `durations`, of an overlapped pair
        the last part that of both and the other one none.

        What a transfer or collective brings has arrived after it `takes` so long, and it `holds` up
        what follows it; both are empty where they all take no time. `posts` are those of the plan,
        `listed` or `ahead`.
        """
        # The starts and ends of batches take none.
        points = [0] * (2 * self.batches if takes else 0)
        return run(
            self._bounds, durations, self._needs, posts, [*takes, *points], [*holds, *points]
        )

    @cached_property
    def textbook(self) -> Times:
        """When all runs at the textbook costs, as it is listed."""
        return self.priced(self.durations.tolist(), posts=self.listed)


def plan(schedule: Schedule) -> Plan:
    """Number what the clock runs, once for each Schedule object, which has to be proved."""
    known = schedule.memo.get(Plan)
    if not isinstance(known, Plan):
        known = schedule.memo[Plan] = _plan(schedule)
    return known


def _plan(schedule: Schedule) -> Plan:
    columns, transfers = schedule.columns, schedule.dataflow.transfers
    is_compute = columns.is_kind(*COMPUTE)
    so_far: Ints = np.cumsum(is_compute)
    compute = np.flatnonzero(is_compute)
    bounds = np.searchsorted(compute, columns.starts)
    last_before = so_far - is_compute - 1
    last_before[last_before < bounds[columns.rank]] = -1
    number = so_far - 1  # of a place that computes

    needs = np.full(len(compute), -1)
    needs[number[transfers.user]] = np.arange(len(transfers))
    order, follows = transfers.by_channel
    before = np.full(len(transfers), -1)
    before[order[1:][follows[1:]]] = order[:-1][follows[1:]]

    collectives = collective_turns(schedule)
    turns = {p: turn for turn, places in enumerate(collectives, len(transfers)) for p in places}
    for step, reduce in sums_of_steps(schedule):
        needs[number[step]] = turns[reduce]
    # A queue for each channel, and one for the sums of each stage.
    queue = np.zeros(len(transfers) + len(collectives), np.int64)
    queue[order] = np.cumsum(~follows)
    summed = [int(columns.stage[places[0]]) for places in collectives]
    queue[len(transfers) :] = 1 + len(transfers) + np.array(summed, np.int64)
    planned = Plan(
        compute=compute,
        bounds=bounds,
        last=number[columns.last[compute]],
        durations=summed_at_last(columns, TEXTBOOK[columns.kind])[compute],
        needs=needs,
        sent=last_before[transfers.send],
        received=last_before[transfers.receive],
        in_batch=columns.shared[transfers.receive],
        queue=queue,
        before=before,
        also={},
        batches=0,
        transfers=len(transfers),
        collectives=collectives,
        exchanged=_exchanged(transfers, collectives),
        last_before=last_before,
    )
    batched = columns.joined & columns.is_kind(*COMMUNICATION)
    if not batched.any():
        return planned
    batches = np.unique(columns.entry[batched])
    also, end_of = points_of_batches(columns, transfers, batches, before, len(queue))
    received_in = end_of[columns.entry[transfers.receive]]
    consumed = np.flatnonzero(received_in >= 0)
    needs[number[transfers.user[consumed]]] = received_in[consumed]
    points = queue.max(initial=0) + 1 + np.arange(2 * len(batches))
    return attrs.evolve(planned, queue=np.append(queue, points), also=also, batches=len(batches))


def _exchanged(transfers: Transfers, collectives: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    numbers = np.arange(len(transfers) + len(collectives))
    sums = np.array([place for places in collectives for place in places], np.int64)
    each = np.repeat(numbers[len(transfers) :], [len(places) for places in collectives])
    pairs = numbers[: len(transfers)]
    return (
        np.concatenate((transfers.send, transfers.receive, sums)),
        np.concatenate((pairs, pairs, each)),
    )
