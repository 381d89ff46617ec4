"""S5xx: what is right, but slower than it need be.

Judged at the textbook costs (F = 1, B = 2, I = W = 1, transfers free), as they were simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.checker.changes import back
from schedir.checker.faults import Faults, fault
from schedir.checker.late import late_receives, late_sends, posting
from schedir.checker.rules import lints as rules
from schedir.checker.waits import QUEUED, finish, waits
from schedir.ir import (
    RECEIVES,
    TEXTBOOK,
    Kind,
    Schedule,
    Time,
    plan,
)


def lints(schedule: Schedule, channel: str) -> Iterator[Faults]:
    """What makes a right, complete schedule slower than it need be."""
    posted = posting(schedule, plan(schedule))
    yield from late_sends(schedule, posted)
    yield from late_receives(schedule, posted)
    # Under `host` every early receive holds up compute too; `edge` holds up no other channel.
    if channel in ("rank", "pair"):
        yield from _early_receives(schedule, channel, max(posted.listed.ends, default=0))
    yield from _needless_splits(schedule)
    yield from _group_size(schedule, max(posted.prompt.ends, default=0))


def _early_receives(schedule: Schedule, channel: str, possible: Time) -> Iterator[Faults]:
    """The receive that holds up most, where the step takes longer for what is held up."""
    waiting = waits(schedule, channel)
    done = np.array(finish(waiting, TEXTBOOK[schedule.columns.kind].tolist()), np.int64)
    makespan = float(done.max(initial=0))
    if makespan <= possible:
        return
    # Of all that each node waits for, what is done last, and how much later than all the rest.
    node = waiting.node[waiting.later]
    ends = done[waiting.node[waiting.earlier]]
    order = np.lexsort((ends, node))
    last = np.flatnonzero(np.append(node[order][1:] != node[order][:-1], True))
    rest = np.where(last > 0, last - 1, last)
    rest_ends = np.where(node[order[rest]] == node[order[last]], ends[order[rest]], 0)
    held = np.where(rest == last, 0, ends[order[last]] - rest_ends)
    edge = order[last]
    receives = schedule.columns.is_kind(*RECEIVES)[waiting.earlier[edge]]
    held = np.where(receives & (waiting.why[edge] == QUEUED), held, 0)
    worst = int(held.argmax())
    if held[worst] > 0:
        receive, other = int(waiting.earlier[edge[worst]]), int(waiting.later[edge[worst]])
        yield fault(
            rules.EarlyReceive.at(
                schedule,
                receive,
                other,
                channel=channel,
                held=float(held[worst]),
                makespan=makespan,
                possible=float(possible),
            ),
            back(schedule, receive, other, "post").moves(schedule.columns),
        )


def _needless_splits(schedule: Schedule) -> Iterator[Faults]:
    """An I and its W side by side; what stands between them may be the reason for the split."""
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    first, second = map(schedule.dataflow.of, split)
    pairs = np.sort(first[(first >= 0) & (second == first + 1)]).tolist()
    if pairs:
        yield fault(
            rules.NeedlessSplit.at(schedule, *(at for p in pairs for at in (p, p + 1))),
            extent=len(pairs),
        )


def _group_size(schedule: Schedule, makespan: Time) -> Iterator[Faults]:
    """Interleaved 1F1B takes 3 · (V · M + P − 1) chunks' forwards in groups of P microbatches."""
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
            rules.GroupSize.at(
                schedule,
                forward[ranks].min(),
                group=group,
                ranks=ranks,
                makespan=makespan,
                possible=possible,
            )
        )
