"""A complete schedule as the clock runs it, on the `edge` channel model: compute and exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from schedir.ir.actions import COMMUNICATION, COMPUTE
from schedir.ir.clock import TEXTBOOK, Exchanges, Time, Times, run
from schedir.ir.collectives import collective_turns, sums_of_steps
from schedir.ir.columns import Ints, summed_at_last
from schedir.ir.dataflow import Transfers
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
    `last_before[place]` is the number of the compute before a place, -1 for none. `posts` are as
    listed, `ahead` those of receives that are posted from the beginning on, but for those in a
    batch: they are posted with that.
    """

    compute: Ints
    bounds: Ints
    last: Ints
    durations: Ints
    needs: Ints
    posts: list[tuple[int, ...]]
    ahead: list[tuple[int, ...]]
    before: Ints
    also: dict[int, list[int]]
    batches: int
    transfers: int
    collectives: list[tuple[int, ...]]
    exchanged: tuple[Ints, Ints]
    last_before: Ints

    def run(self, posts: list[tuple[int, ...]]) -> Times:
        """When all runs at the textbook costs, its exchanges posted so."""
        return self.priced(self.durations.tolist(), posts=posts)

    def priced(
        self,
        durations: Sequence[Time],
        takes: Sequence[Time] = (),
        holds: Sequence[Time] = (),
        *,
        posts: list[tuple[int, ...]],
    ) -> Times:
        """When all runs at other costs: each compute takes its `durations`, of an overlapped pair
        the last part that of both and the other one none.

        What a transfer or collective brings has arrived after it `takes` so long, and it `holds` up
        what follows on its channel; both are empty where they all take no time.
        """
        # What takes no time never holds up the next one of its channel or stage.
        before = self.before.tolist() if any(holds) or self.also else ()
        points = [0] * (2 * self.batches if takes else len(posts))
        exchanges = Exchanges(
            posts,
            before,
            [*takes, *points],
            [*holds, *points],
            self.also,
            len(posts) - self.batches,
        )
        return run(self.bounds.tolist(), durations, self.needs.tolist(), exchanges)

    @cached_property
    def textbook(self) -> Times:
        """When all runs at the textbook costs, as it is listed."""
        return self.run(self.posts)


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
    sent, received = last_before[transfers.send], last_before[transfers.receive]
    posts: list[tuple[int, ...]] = list(zip(sent.tolist(), received.tolist(), strict=True))
    received = np.where(columns.shared[transfers.receive], received, -1)
    ahead: list[tuple[int, ...]] = list(zip(sent.tolist(), received.tolist(), strict=True))

    collectives = collective_turns(schedule)
    sums = [tuple(last_before[list(places)].tolist()) for places in collectives]
    turns = {p: turn for turn, places in enumerate(collectives, len(transfers)) for p in places}
    for step, reduce in sums_of_steps(schedule):
        needs[number[step]] = turns[reduce]
    # Those of one stage follow each other.
    stages = [int(columns.stage[places[0]]) for places in collectives]
    turn_before = [
        len(transfers) + turn - 1 if turn and stages[turn - 1] == stage else -1
        for turn, stage in enumerate(stages)
    ]
    before = np.concatenate((before, np.array(turn_before, np.int64)))
    planned = Plan(
        compute=compute,
        bounds=bounds,
        last=number[columns.last[compute]],
        durations=summed_at_last(columns, TEXTBOOK[columns.kind])[compute],
        needs=needs,
        posts=posts + sums,
        ahead=ahead + sums,
        before=before,
        also={},
        batches=0,
        transfers=len(transfers),
        collectives=collectives,
        exchanged=_exchanged(transfers, collectives),
        last_before=last_before,
    )
    return _with_batches(schedule, planned) if columns.together else planned


def _exchanged(transfers: Transfers, collectives: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    numbers = np.arange(len(transfers) + len(collectives))
    sums = np.array([place for places in collectives for place in places], np.int64)
    each = np.repeat(numbers[len(transfers) :], [len(places) for places in collectives])
    pairs = numbers[: len(transfers)]
    return (
        np.concatenate((transfers.send, transfers.receive, sums)),
        np.concatenate((pairs, pairs, each)),
    )


def _with_batches(schedule: Schedule, planned: Plan) -> Plan:
    """The plan with two exchanges for each batch: its start waits for what its queues hold before
    it, and each of its transfers for that; its end until all of them have arrived, and what is
    queued behind a part of it, and compute that consumes one, for that."""
    columns, transfers = schedule.columns, schedule.dataflow.transfers
    batched = columns.joined & columns.is_kind(*COMMUNICATION)
    batches = np.unique(columns.entry[batched])
    start_of = np.full(int(columns.entry[-1]) + 1, -1)  # of an entry: the exchange
    start_of[batches] = len(planned.posts) + np.arange(len(batches))
    end_of = np.where(start_of < 0, -1, start_of + len(batches))
    sent, received = columns.entry[transfers.send], columns.entry[transfers.receive]

    exchanges = np.concatenate((start_of[batches], end_of[batches]))
    also: dict[int, list[int]] = {number: [] for number in exchanges.tolist()}
    for entries in (sent, received):
        queued, starts = _queued_behind(transfers, entries, end_of), start_of[entries]
        for transfer in np.flatnonzero(starts >= 0).tolist():
            also[int(end_of[entries[transfer]])].append(transfer)
            if queued[transfer] >= 0:
                also[int(starts[transfer])].append(int(queued[transfer]))
        point = np.where(starts < 0, queued, starts)
        for transfer in np.flatnonzero(point >= len(planned.posts)).tolist():
            also.setdefault(transfer, []).append(int(point[transfer]))

    needs = planned.needs.copy()
    received_in = end_of[received]
    consumed = np.flatnonzero(received_in >= 0)
    needs[np.searchsorted(planned.compute, transfers.user[consumed])] = received_in[consumed]
    points: list[tuple[int, ...]] = [()] * (2 * len(batches))
    return attrs.evolve(
        planned,
        needs=needs,
        posts=planned.posts + points,
        ahead=planned.ahead + points,
        before=np.concatenate((planned.before, np.full(len(points), -1))),
        also=also,
        batches=len(batches),
    )


def _queued_behind(transfers: Transfers, entries: Ints, end_of: Ints) -> Ints:
    """For each transfer, the exchange before it in the queue of one of its ends, -1 for none.

    `entries` are those of that end; `end_of` the exchange that ends each entry, -1 for no batch.
    """
    order, follows = transfers.by_channel
    own = entries[order]
    turns = np.arange(len(order))
    # Parts of one batch don't wait for each other: for what is queued before the first of them.
    goes_on = follows.copy()
    goes_on[1:] &= own[1:] == own[:-1]
    first = np.maximum.accumulate(np.where(goes_on, 0, turns))
    last = np.where(follows[first], first - 1, -1)
    end = end_of[own[last]]
    found = np.full(len(transfers), -1)
    found[order] = np.where(last < 0, -1, np.where(end < 0, order[last], end))
    return found
