"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Add,
    AsSent,
    Change,
    Several,
    additions,
    after_stage,
    ahead,
    back,
    beside,
    in_turn,
    moved_beside,
    removal,
    reorder,
    taken_to,
)
from schedir.checker.diagnostics import Faults, Finding, locate
from schedir.checker.values import Wrong, keys, values, wrong
from schedir.graph.compile import Graph, Transfers, graph_of
from schedir.ir import COMPLETES_GRADIENTS, GROUPS, KINDS, RECEIVES, STEPS, Action, Ints, Schedule

_ROWS_AROUND = 2


def communication(schedule: Schedule) -> Iterator[Faults]:
    """The faults of sends and receives. Expects a sound structure."""
    graph = graph_of(schedule)
    yield Faults(
        rule=rules.NO_PEER,
        keys=keys(schedule, graph.lone),
        findings=(_lone(graph, place) for place in graph.lone.tolist()),
    )
    for told in wrong(schedule, of_transfers=True):
        receives = told.rule is rules.MISSING_RECEIVE
        yield _without_receive(graph, told) if receives else values(schedule, told)
    yield from _unmatched(graph)
    yield from _mis_paired(graph)
    yield from collectives(schedule)


def collectives(schedule: Schedule) -> Iterator[Faults]:
    """The faults of collectives: the ranks of a stage list the same ones, in the same order."""
    unmatched = [*_unmatched_collectives(schedule)]
    yield from unmatched
    if not any(faults.many for faults in unmatched):
        yield from _in_other_orders(graph_of(schedule))


def _lone(graph: Graph, place: int) -> Finding:
    schedule, columns = graph.schedule, graph.columns
    peer, action = int(graph.peers[place]), columns.action(place)
    runs = int(graph.runs[action.stage, action.microbatch])
    reason = "end" if peer < 0 else "local" if peer == columns.rank[place] else "elsewhere"
    return Finding(
        rules.NO_PEER.at(schedule, place, reason=reason),
        otherwise=taken_to(schedule, place, runs, there=reason == "end" or peer == runs),
    )


def _without_receive(graph: Graph, told: Wrong) -> Faults:
    """Compute that is listed before its receive, or without one."""
    numbers = graph.arrivals[told.places]
    findings = (_used_too_early(graph, number) for number in numbers.tolist())
    return Faults(rule=told.rule, keys=numbers, findings=findings)


def _used_too_early(graph: Graph, number: int) -> Finding:
    schedule, transfers = graph.schedule, graph.transfers
    user, receive = int(transfers.user[number]), int(transfers.receive[number])
    action = _receive(transfers, number)
    if receive < 0:
        adds = _other_end(graph, number, action)
        likely = next(adds)
        finding = rules.MISSING_RECEIVE.at(schedule, user, receive=action)
        return Finding(finding, chain((likely,), adds), likely)
    slides = (ahead(schedule, receive, user), back(schedule, user, receive))
    return Finding(
        rules.MISSING_RECEIVE.at(schedule, user, receive, receive=action),
        in_turn(slides),
        moved_beside(schedule, receive, "before", user),
        of_communication=True,
    )


def _receive(transfers: Transfers, number: int) -> Action:
    kind = KINDS[transfers.kind[number]]
    return Action(kind, int(transfers.stage[number]), int(transfers.microbatch[number]))


def _other_end(graph: Graph, number: int, action: Action) -> Iterator[Add]:
    """The change that adds one end of a transfer, in the order of its channel if the other end is
    known."""
    transfers, least, most = graph.transfers, 0, None
    known, lacked, rank = transfers.receive, transfers.send, transfers.source[number]
    if action.kind in RECEIVES:
        known, lacked, rank = lacked, known, transfers.target[number]
    if known[number] >= 0:
        beside = transfers.beside(number)
        beside = beside[np.argsort(known[beside])]
        at = int(np.searchsorted(known[beside], known[number]))
        least = int(lacked[beside[at - 1]]) + 1 if at else 0
        most = int(lacked[beside[at]]) if at < len(beside) else None
    return additions(graph.schedule, action, int(rank), least, most)


def _unmatched(graph: Graph) -> Iterator[Faults]:
    """Sends without a receive, and receives without a send."""
    ends = graph.transfers.send, graph.transfers.receive
    for side, (listed, lacked) in enumerate((ends, ends[::-1])):
        numbers = np.flatnonzero((listed >= 0) & (lacked < 0))
        numbers = numbers[np.argsort(listed[numbers])]
        yield Faults(
            rule=rules.UNMATCHED,
            keys=2 * numbers + side,
            findings=map(partial(_alone, graph), numbers.tolist(), listed[numbers].tolist()),
        )


def _alone(graph: Graph, number: int, place: int) -> Finding:
    missing = graph.columns.action(place).counterpart
    assert missing is not None  # a transfer has two ends
    adds = _other_end(graph, number, missing)
    add = next(adds)
    finding = rules.UNMATCHED.at(graph.schedule, place, missing=missing, peer=add.rank)
    return Finding(finding, chain((add,), adds), add)


def _mis_paired(graph: Graph) -> Iterator[Faults]:
    """Channels whose sends and receives are listed in different orders.

    An unmatched end would shift all ends after it, so only transfers with both ends are compared.
    """
    transfers, (order, follows) = graph.transfers, graph.transfers.by_channel
    early = np.flatnonzero(follows[1:] & (np.diff(transfers.receive[order]) < 0))
    channels = {}
    for number in order[early].tolist():
        key = int(transfers.source[number] * graph.schedule.ranks + transfers.target[number])
        if key not in channels:
            sent = transfers.beside(number)
            channels[key] = sent, sent[np.argsort(transfers.receive[sent])]
    yield Faults(
        rule=rules.MIS_PAIRED,
        keys=np.array([*channels], np.int64),
        extents=np.array([(one != other).sum() for one, other in channels.values()], np.int64),
        findings=(_swapped(graph.schedule, transfers, *ends) for ends in channels.values()),
    )


def _swapped(schedule: Schedule, transfers: Transfers, sent: Ints, received: Ints) -> Finding:
    """The finding for a channel, given its transfers in the order of each end."""
    sends, receives = transfers.send[sent], transfers.receive[received]
    wrong = np.flatnonzero(sent != received)
    turn = int(wrong[0])
    rows = range(max(0, turn - _ROWS_AROUND), min(len(sent), turn + _ROWS_AROUND + 2))
    pairs = tuple(
        rules.Pair(
            row,
            locate(schedule, int(sends[row])),
            locate(schedule, int(receives[row])),
            bool(sent[row] == received[row]),
        )
        for row in rows
    )
    return Finding(
        rules.MIS_PAIRED.at(
            schedule,
            receives[turn],
            sends[turn],
            transfers.send[received[turn]],
            wrong=len(wrong),
            transfers=len(sent),
            pairs=pairs,
        ),
        _pairing(schedule, transfers, sent, received),
        AsSent(int(transfers.source[sent[0]]), int(transfers.target[sent[0]])),
        of_communication=True,
    )


def _pairing(
    schedule: Schedule, transfers: Transfers, sent: Ints, received: Ints
) -> Iterator[Change]:
    """The changes that may pair a channel correctly: one end moved, or the wrong ends reordered."""
    wrong = np.flatnonzero(sent != received)
    first, last = int(wrong[0]), int(wrong[-1])
    sends, receives = transfers.send[sent].tolist(), transfers.receive[received].tolist()
    slides = []

    # Between these an end can be moved without passing another one of its channel.
    def begin(places: list[int]) -> int | None:
        return places[first - 1] + 1 if first else None

    def end(places: list[int]) -> int | None:
        return places[last + 1] - 1 if last + 1 < len(places) else None

    if (received[first:last] == sent[first + 1 : last + 1]).all():
        slides += [
            ahead(schedule, receives[last], receives[first], "post", begin(receives)),
            back(schedule, sends[first], sends[last], "post", end(sends)),
        ]
    if (received[first + 1 : last + 1] == sent[first:last]).all():
        slides += [
            back(schedule, receives[first], receives[last], "post", end(receives)),
            ahead(schedule, sends[last], sends[first], "post", begin(sends)),
        ]
    yield from in_turn(slides)
    yield from reorder(schedule, transfers.receive[sent[wrong]])
    yield from reorder(schedule, transfers.send[received[wrong]])


def _unmatched_collectives(schedule: Schedule) -> Iterator[Faults]:
    """Replicated stages whose ranks have different numbers of collectives."""
    for stage, by_rank in graph_of(schedule).collectives_of.items():
        least = min(by_rank, key=lambda rank: len(by_rank[rank]))
        for rank, places in by_rank.items():
            more = places[len(by_rank[least]) :]
            # Numbered below 0, apart from the transfers.
            key = -1 - schedule.holdings.index((stage, rank))
            yield Faults(
                rule=rules.UNMATCHED,
                keys=np.full(len(more), key),
                findings=_without_counterpart(schedule, places, more, least),
            )


def _in_other_orders(graph: Graph) -> Iterator[Faults]:
    """The first turn of each stage at which its ranks list collectives of different kinds."""
    schedule, kind = graph.schedule, graph.columns.kind
    for stage, by_rank in graph.collectives_of.items():
        for places in zip(*by_rank.values(), strict=True):
            differ = [place for place in places if kind[place] != kind[places[0]]]
            if differ:
                finding = rules.GROUP_ORDER.at(schedule, differ[0], places[0])
                (own,) = (own for own in by_rank.values() if differ[0] in own)
                later = [n for n in own if n > differ[0] and kind[n] == kind[places[0]]]
                swaps = _beside(schedule, differ[0], later)
                yield Faults(
                    rule=rules.GROUP_ORDER,
                    keys=np.array([stage]),
                    findings=iter([Finding(finding, swaps)]),
                )
                break


def _beside(schedule: Schedule, place: int, others: Sequence[int]) -> Iterator[Change]:
    """The changes that move an action next to one of others."""
    for other in others:
        for side in ("after", "before"):
            yield moved_beside(schedule, place, side, other)


def _without_counterpart(
    schedule: Schedule, places: list[int], more: list[int], least: int
) -> Iterator[Finding]:
    """The changes that remove this collective, or another one on its rank, or add one on the other
    rank."""
    columns, turns = schedule.columns, graph_of(schedule).turn
    is_step = columns.is_kind(*STEPS)
    for place in more:
        action, rank = columns.action(place), columns.rank[place]
        of_round = (columns.stage == action.stage) & (turns == turns[place])
        own = of_round & (columns.rank == rank)
        likes = int((own & columns.is_kind(action.kind)).sum())
        there = np.flatnonzero(of_round & is_step & (columns.rank == least))
        out = (removal(schedule, each) for each in (place, *places))
        otherwise: Change
        if len(there):
            otherwise = beside(schedule, action, "before", int(there[0]))
        elif is_step.any() and (likes > 1 or not (own & is_step).any()):
            otherwise = removal(schedule, place)
        else:  # all that a step has, which the other rank lacks as well
            otherwise = _at_the_end(schedule, least, action, (own & is_step).nonzero()[0])
        yield Finding(
            rules.UNMATCHED.at(schedule, place, missing=action, peer=least),
            chain((otherwise,), out),
            otherwise,
        )


def _at_the_end(schedule: Schedule, rank: int, action: Action, steps: Ints) -> Change:
    """The change that adds a collective after all entries of its stage on a rank, or at the end of
    the list, with a step after it if there are any of the `steps` that it resembles."""
    kinds = (*COMPLETES_GRADIENTS, *((*GROUPS, *STEPS) if len(steps) else ()))
    add = after_stage(schedule, action, rank, *kinds)
    if not len(steps):
        return add
    index = 0 if add.target is None else add.target + 1
    return Several((add, Add(schedule.columns.action(int(steps[0])), rank, "after", index)))
