"""S501 and S505: sends and receives that are posted later than they could be.

Judged by the clock, at the textbook costs. A send may stand right after the compute that makes its
payload, and after the send before it on its channel: what is computed in between, the rank at the
other end may have to wait for. Which send costs most is found by running the list with each moved.
What is part of a batch is posted with that, and neither late nor early by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import Move, ahead
from schedir.checker.fixes import Faults, Finding
from schedir.ir import Ints, Plan, Schedule, Time, Times

# The list is run again for each late send that may cost something, while this many actions last.
_MOST_RUN = 1_000_000
_OVERHEAD = 2500


@attrs.frozen(eq=False)
class Posting:
    """When a complete schedule runs: as it is listed, and where no send is late.

    By transfer, the number of the compute after which its send is posted: as `sent`, or at best,
    on its own (`alone`: it stands after the place `after` then) or with all others (`together`).
    """

    planned: Plan
    sent: Ints
    after: Ints
    alone: Ints
    together: Ints
    listed: Times
    prompt: Times


def posting(schedule: Schedule, planned: Plan) -> Posting:
    """Run the schedule, and once more if sends are late."""
    transfers = schedule.dataflow.transfers
    order, follows = transfers.by_channel
    sent = planned.sent
    maker = planned.last[np.searchsorted(planned.compute, transfers.maker)]
    maker = np.where(schedule.columns.shared[transfers.send], sent, maker)
    after = transfers.maker.copy()
    second = np.flatnonzero(follows)
    previous = order[second - 1]
    after[order[second]] = np.maximum(after[order[second]], transfers.send[previous])
    alone = maker.copy()
    alone[order[second]] = np.maximum(alone[order[second]], sent[previous])
    # No send passes another one of its channel: the latest maker so far, channel by channel.
    ahead_of = np.cumsum(~follows) * (len(planned.compute) + 1)
    together = maker.copy()
    together[order] = np.maximum.accumulate(ahead_of + maker[order]) - ahead_of
    listed = planned.textbook
    prompt = planned.run(together) if (sent > together).any() else listed
    return Posting(planned, sent, after, alone, together, listed, prompt)


def late_receives(
    schedule: Schedule, posted: Posting, most: Ints | None = None
) -> Iterator[Faults]:
    """One finding for all, at the receive that is posted the latest after its send.

    Where sends are late, a receive in step with them may come before its send or long after it:
    so they are judged as if no send were. `most` says, by transfer, how late a receive is at most
    where a channel model holds up sends: it is not late for what could not go yet.
    """
    columns, transfers = schedule.columns, schedule.dataflow.transfers
    before = posted.planned.last_before
    # A last entry for the -1 of what comes before all compute.
    ends = np.array([*posted.prompt.ends, 0], np.int64)
    late = ends[before[transfers.receive]] - ends[posted.together]
    if most is not None:
        late = np.minimum(late, most)
    user_entry = transfers.user - columns.joined[transfers.user]
    at_once = before[transfers.receive] == before[user_entry]
    found = np.flatnonzero((late > 0) & at_once & ~columns.shared[transfers.receive])
    if len(found):
        found = found[np.argsort(-late[found], kind="stable")]
        receive, user = int(transfers.receive[found[0]]), int(transfers.user[found[0]])
        compute = int(posted.planned.compute[before[receive]])
        finding = rules.LATE_RECEIVE.at(
            schedule, receive, user, late=float(late[found[0]]), receives=len(found)
        )
        moves = ahead(schedule, receive, compute, "post").moves()
        yield Faults(
            rule=rules.LATE_RECEIVE, keys=found, findings=[Finding(finding, moves)], many=1
        )


def late_sends(schedule: Schedule, posted: Posting) -> Iterator[Faults]:
    """One finding for all, at the send whose move regains the most."""
    makespan, possible = max(posted.listed.ends, default=0), max(posted.prompt.ends, default=0)
    if makespan <= possible:
        return
    critical = _critical(posted)
    many = max(1, _MOST_RUN // (len(schedule.columns) + _OVERHEAD))
    regained = dict.fromkeys(critical, 0.0)
    for transfer in critical[:many]:
        sent = posted.sent.copy()
        sent[transfer] = posted.alone[transfer]
        regained[transfer] = makespan - max(posted.planned.run(sent).ends)
    worst = max(regained, key=lambda transfer: regained[transfer])
    transfers = schedule.dataflow.transfers
    others = np.flatnonzero(posted.sent > posted.together)
    finding = rules.LATE_SEND.at(
        schedule,
        transfers.send[worst],
        posted.after[worst],
        sends=len(others),
        makespan=float(makespan),
        alone=float(makespan - regained[worst]),
        possible=float(possible),
    )
    yield Faults(
        rule=rules.LATE_SEND,
        keys=np.concatenate(([worst], others[others != worst])),
        findings=[Finding(finding, _sooner(schedule, posted, worst) if regained[worst] else ())],
        many=1,
    )


def _critical(posted: Posting) -> list[int]:
    """The late sends on a critical path, those that come latest first: one at least, where sends
    that are late make the step longer. A move regains something only if it is that of one of
    them."""
    planned, times = posted.planned, posted.listed
    needs, firsts = planned.needs.tolist(), set(planned.bounds.tolist())
    late = posted.sent > posted.together
    ends = [*times.ends, 0]
    found: dict[int, Time] = {}
    at = int(np.argmax(times.ends))
    while at >= 0:
        start = times.starts[at]
        if at not in firsts and times.ends[at - 1] == start:
            at -= 1
            continue
        need = needs[at]
        if need < 0 or not start:
            break
        need, at = _last_to_arrive(planned, times, need)
        if need < len(late) and planned.sent[need] == at and late[need]:
            while posted.sent[need] == posted.alone[need]:  # late for the one before on its channel
                need = int(planned.before[need])
            found.setdefault(need, start - ends[int(posted.alone[need])])
    return sorted(found, key=lambda transfer: -found[transfer])


def _last_to_arrive(planned: Plan, times: Times, exchange: int) -> tuple[int, int]:
    """Of what an exchange waits for, that or the exchange whose post comes last, and the compute
    that this comes after."""
    begin = times.begins[exchange]
    while True:
        for post in planned.posts(exchange):
            if post >= 0 and times.ends[post] == begin:
                return exchange, post
        others = planned.also[exchange]
        exchange = next(other for other in others if times.begins[other] == begin)


def _sooner(schedule: Schedule, posted: Posting, transfer: int) -> Iterator[Move]:
    """To right after what it has to follow, or after other communication there."""
    columns, after = schedule.columns, int(posted.after[transfer])
    send = int(schedule.dataflow.transfers.send[transfer])
    rank, index = columns.position(send)
    # The compute after the last one that it has to follow.
    until = int(posted.planned.compute[posted.alone[transfer] + 1])
    targets = dict.fromkeys(
        columns.position(target)[1] for target in range(after, min(until, send))
    )
    for target in targets:
        yield Move(rank, index, "after", target, "post")
