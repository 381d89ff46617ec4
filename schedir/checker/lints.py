"""S5xx: what is right, but slower than it need be.

Judged at the textbook costs (F = 1, B = 2, I = W = 1, transfers free), as they were simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import back
from schedir.checker.fixes import Faults, fault
from schedir.checker.late import Posting, late_receives, late_sends, posting
from schedir.graph.compile import graph_of
from schedir.graph.paths import QUEUED, Waits, finish, previous_of_queue, waits
from schedir.ir import (
    RECEIVES,
    TEXTBOOK,
    Ints,
    Kind,
    Schedule,
    Time,
    plan,
)
from schedir.passes import split_batches


def lints(schedule: Schedule, channel: str) -> Iterator[Faults]:
    """What makes a right, complete schedule slower than it need be."""
    # Where posts never block, a batch is its parts; it may not run as the clock runs one.
    planned = plan(split_batches(schedule) if channel == "async" else schedule)
    posted = posting(schedule, planned)
    yield from late_sends(schedule, posted)
    # Under `host` every early receive holds up compute too; `edge` holds up no other channel.
    if channel in ("rank", "pair"):
        queued = _queued(schedule, channel, posted)
        yield from late_receives(schedule, posted, queued.late)
        yield from _early_receives(schedule, queued, max(posted.listed.ends, default=0))
    else:
        yield from late_receives(schedule, posted)
    yield from _needless_splits(schedule)
    yield from _group_size(schedule, max(posted.prompt.ends, default=0))


@attrs.frozen(eq=False)
class _Queued:
    """How a schedule runs under a channel model that orders more than each channel.

    `late` says, by transfer, how much later its receive is posted than its send could go; `held`
    what waits for what, and when each node is done. There is none where nothing is held up.
    """

    channel: str
    late: Ints
    held: tuple[Waits, Ints] | None


def _queued(schedule: Schedule, channel: str, posted: Posting) -> _Queued:
    """Run the schedule under a channel model; that takes long only where it holds something up."""
    columns, planned, transfers = schedule.columns, posted.planned, schedule.dataflow.transfers
    previous = previous_of_queue(graph_of(schedule), channel)
    later = np.flatnonzero(previous >= 0)
    done = _as_listed(schedule, posted)
    held = None
    # What a batch holds up is only known of the whole.
    if columns.together or (done[previous[later]] > done[later]).any():
        waiting = waits(schedule, channel)
        takes = waiting.summed(TEXTBOOK[columns.kind])
        held = waiting, finish(waiting, takes) + takes
        done = held[1][waiting.node]
    if columns.together:  # what waits for a part waits for all of its entry
        done = np.maximum.reduceat(done, columns.heads)[columns.entry]
    # A last entry for the -1 of what comes before all compute, or first in its queue.
    done = np.append(done, 0)
    compute = np.append(planned.compute, -1)
    before_send, before_receive = (
        compute[planned.last_before[ends]] for ends in (transfers.send, transfers.receive)
    )
    ready = np.maximum(done[before_send], done[previous[transfers.send]])
    return _Queued(channel, done[before_receive] - ready, held)


def _as_listed(schedule: Schedule, posted: Posting) -> Ints:
    """When each place is done where nothing but its own channel holds it up."""
    planned, transfers = posted.planned, schedule.dataflow.transfers
    begins = np.array(posted.listed.begins, np.int64)
    done = np.zeros(len(schedule.columns), np.int64)
    done[planned.compute] = np.array(posted.listed.ends, np.int64)[planned.last]
    done[transfers.send] = done[transfers.receive] = begins[: len(transfers)]
    for places, begin in zip(planned.collectives, begins[len(transfers) :].tolist(), strict=False):
        done[list(places)] = begin
    return done


def _early_receives(schedule: Schedule, queued: _Queued, possible: Time) -> Iterator[Faults]:
    """The receive that holds up most, where the step takes longer for what is held up."""
    if queued.held is None:
        return
    waiting, done = queued.held
    makespan = float(done.max(initial=0))
    if makespan <= possible:
        return
    # Of all that each node waits for, what is done last, and how much later than all the rest.
    node, ends = waiting.waiter, done[waiting.awaited]
    order = np.lexsort((ends, node))
    last = np.flatnonzero(np.append(node[order][1:] != node[order][:-1], True))
    rest = np.where(last > 0, last - 1, last)
    rest_ends = np.where(node[order[rest]] == node[order[last]], ends[order[rest]], 0)
    held = np.where(rest == last, 0, ends[order[last]] - rest_ends)
    edge = order[last]
    blamed = schedule.columns.is_kind(*RECEIVES)[waiting.earlier[edge]]
    blamed &= ~schedule.columns.shared[waiting.earlier[edge]] & (waiting.why[edge] == QUEUED)
    held = np.where(blamed, held, 0)
    worst = int(held.argmax())
    if held[worst] > 0:
        receive, other = int(waiting.earlier[edge[worst]]), int(waiting.later[edge[worst]])
        yield fault(
            rules.EARLY_RECEIVE.at(
                schedule,
                receive,
                other,
                channel=queued.channel,
                held=float(held[worst]),
                makespan=makespan,
                possible=float(possible),
            ),
            back(schedule, receive, other, "post").moves(),
        )


def _needless_splits(schedule: Schedule) -> Iterator[Faults]:
    """An I and its W side by side; what stands between them may be the reason for the split."""
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    first, second = map(schedule.dataflow.of, split)
    pairs = np.sort(first[(first >= 0) & (second == first + 1)])
    # That of an overlapped pair is one with the forward beside it.
    pairs = pairs[~schedule.columns.shared[pairs]].tolist()
    if pairs:
        yield fault(
            rules.NEEDLESS_SPLIT.at(schedule, *(at for p in pairs for at in (p, p + 1))),
            extent=len(pairs),
        )


def _group_size(schedule: Schedule, makespan: Time) -> Iterator[Faults]:
    """Interleaved 1F1B takes 3 · (V · M + P − 1) chunks' forwards in groups of P microbatches."""
    if schedule.columns.is_kind(Kind.RECOMPUTE).any():
        return  # which takes longer for another reason
    ranks, microbatches = schedule.ranks, schedule.microbatches
    chunks = schedule.stages // ranks
    looped = schedule.placement == tuple((stage % ranks,) for stage in range(ranks * chunks))
    if not looped or chunks < 2 or ranks < 2 or microbatches % ranks:
        return
    # The group is what the first rank runs of its first chunk before its second.
    forward = schedule.dataflow.of(Kind.FORWARD)
    group = int((forward[0] < forward[ranks].min()).sum())
    possible = 3 * (chunks * microbatches + ranks - 1)
    if group != ranks and makespan > possible:
        yield fault(
            rules.GROUP_SIZE.at(
                schedule,
                forward[ranks].min(),
                group=group,
                ranks=ranks,
                makespan=makespan,
                possible=possible,
            )
        )
