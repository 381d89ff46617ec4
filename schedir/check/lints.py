"""S5xx: what is right, but slower than it need be.

Judged at the textbook costs (F = 1, B = 2, I = W = 1, transfers free), as they were simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.check.changes import ahead, back
from schedir.check.diagnostics import locate, locations
from schedir.check.faults import Faults, fault
from schedir.check.rules import lints as rules
from schedir.check.waits import QUEUED, finish, waits
from schedir.ir import (
    RECEIVES,
    TEXTBOOK,
    Ints,
    Kind,
    Meetings,
    Plan,
    Schedule,
    plan,
    run,
)


def lints(schedule: Schedule, channel: str) -> Iterator[Faults]:
    """What makes a right, complete schedule slower than it need be."""
    planned = plan(schedule)
    ends = _ends(schedule, planned)
    makespan = float(ends.max(initial=0))
    yield from _late_receives(schedule, planned, ends)
    # Under `host` every early receive holds up compute too; `edge` holds up no other channel.
    if channel in ("rank", "pair"):
        yield from _early_receives(schedule, channel, makespan)
    yield from _needless_splits(schedule)
    yield from _group_size(schedule, makespan)


def _ends(schedule: Schedule, planned: Plan) -> Ints:
    """When each compute action ends, and a last entry 0 for the -1 of what comes before all."""
    durations = TEXTBOOK[schedule.columns.kind[planned.compute]].tolist()
    meetings = Meetings(planned.posts, (), [0] * len(planned.posts))
    times = run(planned.bounds.tolist(), durations, planned.needs.tolist(), meetings)
    return np.array([*times.ends, 0], np.int64)


def _late_receives(schedule: Schedule, planned: Plan, ends: Ints) -> Iterator[Faults]:
    """One finding for all, at the receive that is posted the latest after its send."""
    transfers, before = schedule.dataflow.transfers, planned.last_before
    posted = ends[before[transfers.receive]]
    late = posted - ends[before[transfers.send]]
    at_once = before[transfers.receive] == before[transfers.user]
    found = np.flatnonzero((late > 0) & at_once)
    if len(found):
        worst = int(found[np.argmax(late[found])])
        receive, user = int(transfers.receive[worst]), int(transfers.user[worst])
        compute = int(planned.compute[before[receive]])
        yield fault(
            rules.LateReceive(
                locations=locations(schedule, (receive, user)),
                late=float(late[worst]),
                many=len(found),
            ),
            ahead(schedule, receive, compute, "post").moves(schedule.columns),
        )


def _early_receives(schedule: Schedule, channel: str, possible: float) -> Iterator[Faults]:
    """The receive that holds up most, where the step takes longer for what is held up."""
    waiting = waits(schedule, channel)
    done = np.array(finish(waiting, TEXTBOOK[schedule.columns.kind].tolist()), np.int64)
    makespan = float(done.max(initial=0))
    if makespan <= possible:
        return
    # Of all that each node waits for, what is done last, and how much later than all the rest.
    node = waiting.node[waiting.later]
    over = done[waiting.node[waiting.earlier]]
    order = np.lexsort((over, node))
    last = np.flatnonzero(np.append(node[order][1:] != node[order][:-1], True))
    rest = np.where(last > 0, last - 1, last)
    rest_over = np.where(node[order[rest]] == node[order[last]], over[order[rest]], 0)
    held = np.where(rest == last, 0, over[order[last]] - rest_over)
    edge = order[last]
    receives = schedule.columns.is_kind(*RECEIVES)[waiting.earlier[edge]]
    held = np.where(receives & (waiting.why[edge] == QUEUED), held, 0)
    worst = int(held.argmax())
    if held[worst] > 0:
        receive, other = int(waiting.earlier[edge[worst]]), int(waiting.later[edge[worst]])
        yield fault(
            rules.EarlyReceive(
                locations=locations(schedule, (receive, other)),
                channel=channel,
                held=float(held[worst]),
                makespan=makespan,
                possible=possible,
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
            rules.NeedlessSplit(
                locations=locations(schedule, (at for p in pairs for at in (p, p + 1)))
            ),
            extent=len(pairs),
        )


def _group_size(schedule: Schedule, makespan: float) -> Iterator[Faults]:
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
            rules.GroupSize(
                locations=(locate(schedule, int(forward[ranks].min())),),
                group=group,
                ranks=ranks,
                makespan=makespan,
                possible=possible,
            )
        )
