"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, Finding, fault, locate
from schedir.checker.values import Wrong, keys, values, wrong
from schedir.graph.compile import Graph, Transfers, graph_of
from schedir.ir import KINDS, Action, Ints, Schedule

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
    peer = int(graph.peers[place])
    local = peer == graph.columns.rank[place]
    reason = "end" if peer < 0 else "local" if local else "elsewhere"
    return Finding(rules.NO_PEER.at(graph.schedule, place, reason=reason))


def _without_receive(graph: Graph, told: Wrong) -> Faults:
    """Compute that is listed before its receive, or without one."""
    numbers = graph.arrivals[told.places]
    findings = (_used_too_early(graph, number) for number in numbers.tolist())
    return Faults(rule=told.rule, keys=numbers, findings=findings)


def _used_too_early(graph: Graph, number: int) -> Finding:
    transfers = graph.transfers
    user, receive = int(transfers.user[number]), int(transfers.receive[number])
    kind = KINDS[transfers.kind[number]]
    action = Action(kind, int(transfers.stage[number]), int(transfers.microbatch[number]))
    if receive < 0:
        missing = {"receive": action, "missing": action, "transfer": number}
        return Finding(rules.MISSING_RECEIVE.at(graph.schedule, user, **missing))
    return Finding(rules.MISSING_RECEIVE.at(graph.schedule, user, receive, receive=action))


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
    missing, transfers = graph.columns.action(place).counterpart, graph.transfers
    receives = transfers.receive[number] == place
    peer = int((transfers.source if receives else transfers.target)[number])
    return Finding(
        rules.UNMATCHED.at(graph.schedule, place, missing=missing, peer=peer, transfer=number)
    )


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
            transfer=int(sent[0]),
        )
    )


def _unmatched_collectives(schedule: Schedule) -> Iterator[Faults]:
    """Replicated stages whose ranks have different numbers of collectives."""
    for stage, by_rank in graph_of(schedule).collectives_of.items():
        least = min(by_rank, key=lambda rank: len(by_rank[rank]))
        for rank, places in by_rank.items():
            more = places[len(by_rank[least]) :]
            # Numbered below 0, apart from the transfers.
            key = -1 - schedule.holdings.index((stage, rank))
            yield rules.UNMATCHED.each(
                schedule,
                np.array(more, np.int64),
                keys=np.full(len(more), key),
                missing=[schedule.columns.action(place) for place in more],
                peer=least,
            )


def _in_other_orders(graph: Graph) -> Iterator[Faults]:
    """The first turn of each stage at which its ranks list collectives of different kinds."""
    schedule, kind = graph.schedule, graph.columns.kind
    for stage, by_rank in graph.collectives_of.items():
        for places in zip(*by_rank.values(), strict=True):
            differ = [place for place in places if kind[place] != kind[places[0]]]
            if differ:
                finding = rules.GROUP_ORDER.at(schedule, differ[0], places[0])
                yield fault(finding, key=stage)
                break
