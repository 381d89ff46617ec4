"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, locations
from schedir.checker.ordering import values
from schedir.graph.compile import Transfers, graph_of
from schedir.graph.paths import transfers_of
from schedir.ir import Schedule

_ROWS_AROUND = 2


def communication(schedule: Schedule, channel: str) -> Iterator[Faults]:
    """The faults of sends and receives, paired as under a channel model. Expects a sound
    structure."""
    graph = graph_of(schedule)
    lone, columns = graph.lone, schedule.columns
    if len(lone):
        peers = graph.peers[lone]
        yield rules.NO_PEER.each(
            schedule,
            lone,
            case=np.where(
                peers < 0, "end", np.where(peers == columns.rank[lone], "local", "elsewhere")
            ),
        )
    yield from values(schedule, of_transfers=True)
    yield from _unmatched(schedule, graph.transfers)
    yield mis_paired(schedule, channel)
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
    yield rules.UNMATCHED.each(schedule, places, case="collective", peer=least)
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
    return rules.GROUP_ORDER.each(schedule, [*found.values()], keys=np.array([*found], np.int64))


def _unmatched(schedule: Schedule, transfers: Transfers) -> Iterator[Faults]:
    """Sends without a receive, and receives without a send."""
    ends = transfers.send, transfers.receive
    for case, listed, lacked in (("send", *ends), ("receive", *ends[::-1])):
        alone = np.sort(listed[(listed >= 0) & (lacked < 0)])
        yield rules.UNMATCHED.each(schedule, alone, case=case)


def mis_paired(schedule: Schedule, channel: str) -> Faults:
    """Channels whose sends and receives are listed in different orders, under a channel model.

    An unmatched end would shift all ends after it, so only transfers with both ends are compared.
    """
    transfers = transfers_of(graph_of(schedule), channel)
    early = transfers.swapped
    keys, first = np.unique(transfers.channel[early], return_index=True)
    rows, wrong, many, pairs = [], [], [], []
    for number in early[first].tolist():
        sent, received, swapped = transfers.orders(number)
        sends, receives, turn = transfers.send[sent], transfers.receive[received], int(swapped[0])
        rows.append((receives[turn], sends[turn], transfers.send[received[turn]]))
        wrong.append(len(swapped))
        many.append(len(sent))
        shown = slice(max(0, turn - _ROWS_AROUND), turn + _ROWS_AROUND + 2)
        ends = (locations(schedule, places[shown]) for places in (sends, receives))
        pairs.append([*zip(count(shown.start), *ends, strict=False)])
    return rules.MIS_PAIRED.each(
        schedule,
        rows,
        keys=keys,
        extents=np.array(wrong),
        wrong=wrong,
        transfers=many,
        pairs=pairs,
    )
