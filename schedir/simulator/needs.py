"""What compute and transfers wait for, in the list and in time."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from schedir.graph.paths import waits
from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    Columns,
    Ints,
    Schedule,
    Transfers,
    collective_turns,
    sums_of_steps,
)
from schedir.passes import split_batches
from schedir.simulator.times import Numbers

CHANNEL = "edge"
"""The channel model that schedules are simulated on."""


def as_run(schedule: Schedule) -> Schedule:
    """A complete schedule as it is simulated: its batches split where they block."""
    columns = schedule.columns
    if not (columns.joined & columns.is_kind(*COMMUNICATION)).any():
        return schedule
    known = schedule.memo.get(as_run)
    if not isinstance(known, Schedule):
        blocks = waits(schedule, CHANNEL).stuck.any()
        known = schedule.memo[as_run] = split_batches(schedule) if blocks else schedule
    return known


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Needs:
    """What every place of a schedule waits for, with the times of a timeline, as floats."""

    schedule: Schedule
    starts: Numbers
    ends: Numbers

    @property
    def columns(self) -> Columns:
        """The lists."""
        return self.schedule.columns

    @cached_property
    def transfers(self) -> Transfers:
        """What crosses ranks. Raises UnsoundError where the lists are too wrong to tell."""
        return self.schedule.dataflow.transfers

    @cached_property
    def begins(self) -> Numbers:
        """When each transfer starts, NaN where that is not known."""
        return self._of_transfers(self.starts)

    @cached_property
    def arrives(self) -> Numbers:
        """When each transfer has arrived, NaN where that is not known.

        Where its start alone is known, nobody waited for its end: as if it had arrived at once.
        """
        arrives = self._of_transfers(self.ends)
        return np.where(np.isnan(arrives), self.begins, arrives)

    def _of_transfers(self, times: Numbers) -> Numbers:
        sent, received = (
            np.where(places >= 0, times[places], np.nan)
            for places in (self.transfers.send, self.transfers.receive)
        )
        return np.where(np.isnan(received), sent, received)

    @cached_property
    def compute_before(self) -> Ints:
        """For every place, that of the last compute before its entry on its rank, -1 for none."""
        columns = self.columns
        computes = np.where(columns.is_kind(*COMPUTE), np.arange(len(columns)), -1)
        before = np.maximum.accumulate(np.append(-1, computes))[:-1]
        if columns.together:
            before = before[columns.heads][columns.entry]
        return np.where(before < columns.starts[columns.rank], -1, before)

    @cached_property
    def posted_after(self) -> Ints:
        """For every transfer, the compute on its source after which it is posted, -1 for none:
        what makes its payload, or what else stands between that and its send."""
        transfers, entry = self.transfers, self.columns.entry
        last = self.compute_before[transfers.send]
        maker = transfers.maker
        is_makers = (last >= 0) & (maker >= 0) & (entry[last] == entry[maker])
        return np.where((transfers.send < 0) | is_makers, maker, last)

    @cached_property
    def queued_behind(self) -> Ints:
        """For every transfer, the one before it on its channel, -1 for none."""
        order, follows = self.transfers.by_channel
        before = np.full(len(self.transfers), -1)
        before[order[1:][follows[1:]]] = order[:-1][follows[1:]]
        return before

    @cached_property
    def arrivals(self) -> Ints:
        """For the first place of every entry of compute, the transfer that brings its input, and of
        the two of a pair that which arrives last; -1 for none."""
        arrivals = self.schedule.dataflow.arrivals
        seconds = np.flatnonzero(self.columns.joined & self.columns.is_kind(*COMPUTE))
        if not len(seconds):
            return arrivals
        arrivals = arrivals.copy()
        one, other = arrivals[seconds - 1], arrivals[seconds]
        arrives = np.append(self.arrives, -np.inf)  # of no transfer (-1)
        later = (other >= 0) & ((one < 0) | (arrives[other] > arrives[one]))
        arrivals[seconds - 1] = np.where(later, other, one)
        return arrivals

    @cached_property
    def batch_mates(self) -> dict[int, list[int]]:
        """By the number of a batch's entry, the transfers that it is part of."""
        columns, transfers = self.columns, self.transfers
        if not columns.together:
            return {}
        shared = columns.shared & columns.is_kind(*COMMUNICATION)
        mates: dict[int, list[int]] = {}
        for places in (transfers.send, transfers.receive):
            inside = np.flatnonzero((places >= 0) & shared[places])
            for transfer, entry in zip(
                inside.tolist(), columns.entry[places[inside]].tolist(), strict=True
            ):
                mates.setdefault(entry, []).append(transfer)
        return mates

    @cached_property
    def sums(self) -> dict[int, int]:
        """For each OPTIM_STEP that waits for a REDUCE_GRAD, the place of that."""
        return dict(sums_of_steps(self.schedule))

    @cached_property
    def turns(self) -> dict[int, tuple[int, ...]]:
        """For each REDUCE_GRAD, the places of those that it is one with."""
        return {place: turn for turn in collective_turns(self.schedule) for place in turn}

    def summed(self, reduce: int) -> float:
        """When a REDUCE_GRAD is over: at once, where its start alone is known, as for a transfer;
        NaN where nothing is."""
        end = float(self.ends[reduce])
        return end if end == end else float(self.starts[reduce])

    def held_up_by(self, reduce: int) -> int:
        """The compute after which the last of the ranks came to a collective, -1 for none."""
        before = [int(self.compute_before[place]) for place in self.turns.get(reduce, (reduce,))]
        known = [place for place in before if place >= 0 and self.ends[place] == self.ends[place]]
        return max(known, key=lambda place: float(self.ends[place]), default=-1)
