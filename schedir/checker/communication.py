"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Add,
    AsSent,
    Change,
    Several,
    Side,
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
from schedir.checker.diagnostics import Diagnostic, Faults, Finding, locate
from schedir.checker.values import mended, values
from schedir.graph.compile import Graph, Transfers, graph_of
from schedir.ir import COMPLETES_GRADIENTS, GROUPS, KINDS, RECEIVES, STEPS, Action, Ints, Schedule

_ROWS_AROUND = 2


def communication(schedule: Schedule) -> Iterator[Faults]:
    """The faults of sends and receives. Expects a sound structure."""
    graph = graph_of(schedule)
    lone, columns = graph.lone, schedule.columns
    peers = graph.peers[lone]
    yield rules.NO_PEER.each(
        schedule,
        lone,
        _removed,
        reason=np.where(
            peers < 0, "end", np.where(peers == columns.rank[lone], "local", "elsewhere")
        ),
    )
    yield from values(schedule, _in_time, of_transfers=True)
    yield from _unmatched(schedule, graph.transfers)
    yield from _mis_paired(graph)
    yield from collectives(schedule)


def collectives(schedule: Schedule) -> Iterator[Faults]:
    """The faults of collectives: the ranks of a stage list the same ones, in the same order."""
    more: list[int] = []
    least: list[int] = []
    for by_rank in graph_of(schedule).collectives_of.values():
        fewest = min(by_rank, key=lambda rank: len(by_rank[rank]))
        for own in by_rank.values():
            more += own[len(by_rank[fewest]) :]
            least += [fewest] * (len(more) - len(least))
    places = np.array(more, np.int64)
    yield rules.UNMATCHED.each(schedule, places, _without_counterpart, peer=least)
    if not more:
        yield _in_other_orders(schedule)


def _in_other_orders(schedule: Schedule) -> Faults:
    """The first turn of each stage at which its ranks list collectives of different kinds."""
    kind, found = schedule.columns.kind, {}
    for stage, by_rank in graph_of(schedule).collectives_of.items():
        for first, *others in zip(*by_rank.values(), strict=True):
            differ = [place for place in others if kind[place] != kind[first]]
            if differ:
                found[stage] = differ[0], first
                break
    return rules.GROUP_ORDER.each(
        schedule, [*found.values()], _beside, keys=np.array([*found], np.int64)
    )


def _removed(schedule: Schedule, found: Diagnostic, place: int) -> Finding:
    """The change that removes what has no other end, or takes it to the rank that does the work."""
    graph, action = graph_of(schedule), found.action
    runs = int(graph.runs[action.stage, action.microbatch])
    there = found.facts["reason"] == "end" or graph.peers[place] == runs
    return Finding(found, otherwise=taken_to(schedule, place, runs, there=there))


def _in_time(schedule: Schedule, found: Diagnostic, place: int, receive: int = -1) -> Finding:
    """The changes that bring compute after its receive, or add that."""
    if found.rule is not rules.MISSING_RECEIVE:
        return mended(schedule, found, place, receive)
    if receive < 0:
        graph = graph_of(schedule)
        number = int(graph.arrivals[place])
        adds = _other_end(graph, number, _receive(graph.transfers, number))
        likely = next(adds)
        return Finding(found, chain((likely,), adds), likely)
    slides = (ahead(schedule, receive, place), back(schedule, place, receive))
    moved = moved_beside(schedule, receive, "before", place)
    return Finding(found, in_turn(slides), moved, of_communication=True)


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


def _unmatched(schedule: Schedule, transfers: Transfers) -> Iterator[Faults]:
    """Sends without a receive, and receives without a send."""
    ends = transfers.send, transfers.receive
    for listed, lacked in (ends, ends[::-1]):
        alone = np.sort(listed[(listed >= 0) & (lacked < 0)])
        yield rules.UNMATCHED.each(schedule, alone, _met)


def _met(schedule: Schedule, found: Diagnostic, place: int) -> Finding:
    """The changes that add the other end."""
    graph, missing = graph_of(schedule), found.action.counterpart
    assert missing is not None  # a transfer has two ends
    ends = (graph.transfers.send == place) | (graph.transfers.receive == place)
    adds = _other_end(graph, int(ends.argmax()), missing)
    add = next(adds)
    return Finding(found, chain((add,), adds), add)


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


def _beside(schedule: Schedule, found: Diagnostic, place: int, first: int) -> Finding:
    """The changes that move a collective next to a later one of the kind that it meets."""
    columns, kind = schedule.columns, schedule.columns.kind
    by_rank = graph_of(schedule).collectives_of[found.action.stage]
    own = by_rank[int(columns.rank[place])]
    others = [other for other in own if other > place and kind[other] == kind[first]]
    sides: tuple[Side, Side] = "after", "before"
    moves = (moved_beside(schedule, place, side, other) for other in others for side in sides)
    return Finding(found, moves)


def _without_counterpart(schedule: Schedule, found: Diagnostic, place: int) -> Finding:
    """The changes that remove this collective, or another one on its rank, or add one on the other
    rank."""
    columns, graph, least = schedule.columns, graph_of(schedule), found.facts["peer"]
    action, rank, is_step = found.action, columns.rank[place], columns.is_kind(*STEPS)
    of_round = (columns.stage == action.stage) & (graph.turn == graph.turn[place])
    own = of_round & (columns.rank == rank)
    likes = int((own & columns.is_kind(action.kind)).sum())
    there = np.flatnonzero(of_round & is_step & (columns.rank == least))
    places = graph.collectives_of[action.stage][int(rank)]
    out = (removal(schedule, each) for each in (place, *places))
    otherwise: Change
    if len(there):
        otherwise = beside(schedule, action, "before", int(there[0]))
    elif is_step.any() and (likes > 1 or not (own & is_step).any()):
        otherwise = removal(schedule, place)
    else:  # all that a step has, which the other rank lacks as well
        otherwise = _at_the_end(schedule, least, action, (own & is_step).nonzero()[0])
    return Finding(found, chain((otherwise,), out), otherwise)


def _at_the_end(schedule: Schedule, rank: int, action: Action, steps: Ints) -> Change:
    """The change that adds a collective after all entries of its stage on a rank, or at the end of
    the list, with a step after it if there are any of the `steps` that it resembles."""
    kinds = (*COMPLETES_GRADIENTS, *((*GROUPS, *STEPS) if len(steps) else ()))
    add = after_stage(schedule, action, rank, *kinds)
    if not len(steps):
        return add
    index = 0 if add.target is None else add.target + 1
    return Several((add, Add(schedule.columns.action(int(steps[0])), rank, "after", index)))
