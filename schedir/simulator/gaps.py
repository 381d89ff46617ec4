"""The gaps before compute, each with the points in time at which its cause changes.

source   ...0F3---|0SEND_ACT3                   posted when 0F3 has ended
channel           .......|=============>        begins, arrives
rank     1B0|                          |over|1F3
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.ir import Bools, Ints
from schedir.simulator.needs import Needs
from schedir.simulator.times import Numbers
from schedir.simulator.work import Work


@attrs.frozen(eq=False)
class Gaps:
    """Every gap before an entry of compute. Arrays of shape [gaps].

    `number` is that of the compute in the work, `entry` its place. The gap goes from `start` to
    `end`, its payload is `posted` after the compute at `post`, its transfer `begins` and `arrives`:
    these three are in order, and within the gap. `via` is the receive or REDUCE_GRAD, `busy` the
    send that its channel is busy with first, `sent` that of the transfer itself.
    """

    number: Ints
    entry: Ints
    start: Numbers
    end: Numbers
    posted: Numbers
    begins: Numbers
    arrives: Numbers
    post: Ints
    via: Ints
    busy: Ints
    sent: Ints
    summed: Bools
    unknown: Bools


def gaps_of(work: Work, needs: Needs) -> Gaps:
    """All gaps. Raises UnsoundError where the lists are too wrong to tell what waits for what."""
    number = np.flatnonzero(work.waits)
    entry, start, end = work.place[number], work.before[number], work.start[number]
    transfer = _binding(needs, entry, end)
    moved, transfers = transfer >= 0, needs.transfers
    behind, post, via, sent = (
        np.append(places, -1)[transfer]  # of no transfer (-1): -1
        for places in (
            needs.queued_behind,
            needs.posted_after,
            transfers.receive,
            transfers.send,
        )
    )
    posted = np.where(moved, np.where(post >= 0, needs.ends[post], 0), start)
    begins, arrives = (
        np.where(moved, np.append(times, 0)[transfer], start)
        for times in (needs.begins, needs.arrives)
    )
    is_busy = (behind >= 0) & (np.append(needs.arrives, 0)[behind] >= begins) & (begins > posted)
    busy = np.where(is_busy, np.append(transfers.send, -1)[behind], sent)

    summed = np.zeros(len(number), np.bool_)
    if needs.sums:
        for gap in np.flatnonzero(~moved & np.isin(entry, list(needs.sums))).tolist():
            reduce = needs.sums[int(entry[gap])]
            post[gap] = needs.held_up_by(reduce)
            posted[gap] = begins[gap] = needs.ends[post[gap]] if post[gap] >= 0 else 0
            arrives[gap] = needs.summed(reduce)
            via[gap] = busy[gap] = sent[gap] = reduce
            summed[gap] = True

    unknown = _unknown_before(work, number) | np.isnan(posted) & np.isnan(begins)
    posted = np.where(np.isnan(posted), begins, posted)
    begins = np.where(np.isnan(begins), posted, begins)
    arrives = np.where(np.isnan(arrives), end, arrives)
    posted = np.where(unknown, start, np.clip(posted, start, end))
    begins = np.where(unknown, start, np.clip(begins, posted, end))
    arrives = np.where(unknown, start, np.clip(arrives, begins, end))
    return Gaps(
        number, entry, start, end, posted, begins, arrives, post, via, busy, sent, summed, unknown
    )


def _binding(needs: Needs, entry: Ints, end: Numbers) -> Ints:
    """The transfer that each entry of compute waits for, -1 for none: that of its input, or, where
    it came in a batch, the last of the batch to arrive before the compute starts."""
    transfer = needs.arrivals[entry]
    if not needs.batch_mates:
        return transfer
    receive = needs.transfers.receive
    for gap in np.flatnonzero((transfer >= 0) & (needs.arrives[transfer] < end)).tolist():
        batch = int(needs.columns.entry[receive[transfer[gap]]])
        mates = np.array(needs.batch_mates.get(batch, ()), np.int64)
        there = mates[needs.arrives[mates] <= end[gap]]
        if len(there):
            last = there[needs.arrives[there].argmax()]
            if needs.arrives[last] > needs.arrives[transfer[gap]]:
                transfer[gap] = last
    return transfer


def _unknown_before(work: Work, number: Ints) -> Bools:
    """Where the rank may have computed in the gap before: the times of compute listed between are
    not known."""
    heads, unknown = work.heads, np.ones(len(work.heads) + 1, np.int64)
    listed = np.searchsorted(heads, work.place)
    unknown[0], unknown[1 + listed] = 0, 0
    so_far = np.cumsum(unknown)
    if not so_far[-1]:
        return np.zeros(len(number), np.bool_)
    first = number == work.bounds[work.rank[number]]
    since = np.where(
        first,
        np.searchsorted(heads, work.columns.starts[work.rank[number]]),
        listed[number - 1],
    )
    between: Bools = so_far[listed[number]] > so_far[since]
    return between
