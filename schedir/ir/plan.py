"""A complete schedule as the clock runs it, on the `edge` channel model: compute and exchanges."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from schedir.ir.actions import COMPUTE
from schedir.ir.clock import TEXTBOOK, Exchanges, Times, run
from schedir.ir.collectives import collective_turns, sums_of_steps
from schedir.ir.columns import Ints
from schedir.ir.schedule import Schedule


# Not slotted, so that the run at the textbook costs can be kept beside the fields.
@attrs.frozen(eq=False, slots=False)
class Plan:
    """The arguments of `clock.run`, with the textbook's costs as `durations`.

    `compute` holds the places of all compute, `bounds` the number of each rank's first. The
    exchanges are the transfers of the dataflow, then `collectives`, the places of REDUCE_GRADs that
    belong together. `last_before[place]` is the number of the compute before a place, -1 for none.
    """

    compute: Ints
    bounds: Ints
    durations: Ints
    needs: Ints
    posts: list[tuple[int, ...]]
    before: Ints
    collectives: list[tuple[int, ...]]
    last_before: Ints

    def run(self, posts: list[tuple[int, ...]]) -> Times:
        """When all runs at the textbook costs, its exchanges posted so."""
        exchanges = Exchanges(posts, (), [0] * len(posts))
        return run(self.bounds.tolist(), self.durations.tolist(), self.needs.tolist(), exchanges)

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

    collectives = collective_turns(schedule)
    posts += [tuple(last_before[list(places)].tolist()) for places in collectives]
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
    return Plan(
        compute=compute,
        bounds=bounds,
        durations=TEXTBOOK[columns.kind[compute]],
        needs=needs,
        posts=posts,
        before=before,
        collectives=collectives,
        last_before=last_before,
    )
