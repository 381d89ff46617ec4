"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import (
    Add,
    AsSent,
    Change,
    Several,
    additions,
    ahead,
    at_gap,
    back,
    beside,
    in_turn,
    last_of_stage,
    moved_beside,
    removal,
    reorder,
    taken_to,
)
from schedir.checker.diagnostics import locate
from schedir.checker.fixes import Faults, Finding
from schedir.checker.values import Wrong, keys, values, wrong
from schedir.graph.compile import Graph, Transfers, graph_of
from schedir.ir import COMPLETES_GRADIENTS, GROUPS, KINDS, STEPS, Action, Ints, Schedule

_ROWS_AROUND = 2


def communication(schedule: Schedule) -> Iterator[Faults]:
    """What is wrong with the sends and receives. Expects a sound structure."""
    graph = graph_of(schedule)
    transfers = graph.transfers
    yield Faults(
        rule=rules.NO_PEER,
        keys=keys(schedule, graph.lone),
        findings=(_alone(graph, place) for place in graph.lone.tolist()),
    )
    for told in wrong(schedule, of_transfers=True):
        receives = told.rule is rules.MISSING_RECEIVE
        yield _without_receive(graph, told) if receives else values(schedule, told)
    yield from _unmatched(schedule, transfers)
    yield from _mis_paired(schedule, transfers)
    yield from unmatched_reduces(schedule)


def _alone(graph: Graph, place: int) -> Finding:
    schedule, columns = graph.schedule, graph.columns
    peer, action = int(graph.peers[place]), columns.action(place)
    runs = int(graph.runs[action.stage, action.microbatch])
    reason = "end" if peer < 0 else "local" if peer == columns.rank[place] else "elsewhere"
    return Finding(
        rules.NO_PEER.at(schedule, place, reason=reason),
        otherwise=taken_to(
            schedule, place, runs, graph.listed, there=reason == "end" or peer == runs
        ),
    )


def _without_receive(graph: Graph, told: Wrong) -> Faults:
    """A receive stands before the compute that uses it."""
    numbers, channels = graph.arrivals[told.places], _Channels(graph.schedule, graph.transfers)
    findings = (_used_too_early(channels, number) for number in numbers.tolist())
    return Faults(rule=told.rule, keys=numbers, findings=findings)


def _used_too_early(channels: _Channels, number: int) -> Finding:
    schedule, transfers = channels.schedule, channels.transfers
    user, receive = int(transfers.user[number]), int(transfers.receive[number])
    action = _receive(transfers, number)
    if receive < 0:
        adds = channels.receive(number)
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


def _send(transfers: Transfers, number: int) -> Action:
    send = _receive(transfers, number).counterpart
    assert send is not None  # a transfer has two ends
    return send


@attrs.frozen(eq=False, slots=False)
class _Channels:
    """Where an end of a transfer that is missing belongs: in the order of its channel."""

    schedule: Schedule
    transfers: Transfers

    def receive(self, number: int) -> Iterator[Add]:
        """The receive of a transfer added, where its send is among the others."""
        order, _ = self.transfers.by_channel
        ends = self.transfers.send, self.transfers.receive
        action, rank = _receive(self.transfers, number), int(self.transfers.target[number])
        return self._added(number, action, rank, order, self._sent, *ends)

    def send(self, number: int) -> Iterator[Add]:
        """The send of a transfer added, where its receive is among the others."""
        ends = self.transfers.receive, self.transfers.send
        action, rank = _send(self.transfers, number), int(self.transfers.source[number])
        return self._added(number, action, rank, self._received[0], self._received[1], *ends)

    def _added(
        self,
        number: int,
        action: Action,
        rank: int,
        order: Ints,
        keys: Ints,
        known: Ints,
        lacked: Ints,
    ) -> Iterator[Add]:
        least, most = 0, None
        if known[number] >= 0:
            key = self._key(np.array([number]), known)[0]
            at = int(np.searchsorted(keys, key))
            before, after = order[max(0, at - 1) : at], order[at : at + 1]
            if len(before) and self._channel(before[0]) == self._channel(number):
                least = int(lacked[before[0]]) + 1
            if len(after) and self._channel(after[0]) == self._channel(number):
                most = int(lacked[after[0]])
        listed = graph_of(self.schedule).listed
        return additions(self.schedule, action, rank, listed, least, most)

    def _channel(self, number: int) -> tuple[int, int]:
        return int(self.transfers.source[number]), int(self.transfers.target[number])

    def _key(self, numbers: Ints, ends: Ints) -> Ints:
        """By these the transfers are in the order of their channels, and of one end in each."""
        source, target = self.transfers.source[numbers], self.transfers.target[numbers]
        channel = source * self.schedule.ranks + target
        keys: Ints = channel * len(self.schedule.columns) + ends[numbers]
        return keys

    @cached_property
    def _sent(self) -> Ints:
        return self._key(self.transfers.by_channel[0], self.transfers.send)

    @cached_property
    def _received(self) -> tuple[Ints, Ints]:
        """The matched transfers in the order of the receives, and their keys."""
        matched = np.flatnonzero(self.transfers.matched)
        keys = self._key(matched, self.transfers.receive)
        order = np.argsort(keys)
        return matched[order], keys[order]


def _unmatched(schedule: Schedule, transfers: Transfers) -> Iterator[Faults]:
    """Every send has its receive, every receive its send."""
    channels = _Channels(schedule, transfers)
    ends = (
        (transfers.send, transfers.receive, channels.receive),
        (transfers.receive, transfers.send, channels.send),
    )
    for side, (listed, lacked, other_end) in enumerate(ends):
        numbers = np.flatnonzero((listed >= 0) & (lacked < 0))
        numbers = numbers[np.argsort(listed[numbers])]
        yield Faults(
            rule=rules.UNMATCHED,
            keys=2 * numbers + side,
            findings=_without_other_end(schedule, numbers, listed, other_end),
        )


def _without_other_end(
    schedule: Schedule, numbers: Ints, listed: Ints, other_end: Callable[[int], Iterator[Add]]
) -> Iterator[Finding]:
    for number in numbers.tolist():
        adds = other_end(number)
        add = next(adds)
        yield Finding(
            rules.UNMATCHED.at(schedule, listed[number], missing=add.action, peer=add.rank),
            chain((add,), adds),
            add,
        )


def _mis_paired(schedule: Schedule, transfers: Transfers) -> Iterator[Faults]:
    """The sends and receives of a channel stand in the same order.

    What is unmatched would shift all after it, so only what has both ends is compared.
    """
    order, follows = transfers.by_channel
    receives = transfers.receive[order]
    if not (follows[1:] & (receives[1:] < receives[:-1])).any():
        return
    source, target = transfers.source[order], transfers.target[order]
    # The same transfers channel by channel, in the order of the receives.
    received = order[np.lexsort((receives, target, source))]
    wrong = np.flatnonzero(order != received)
    keys, extents = np.unique(source[wrong] * schedule.ranks + target[wrong], return_counts=True)
    yield Faults(
        rule=rules.MIS_PAIRED,
        keys=keys,
        extents=extents,
        findings=(
            _swapped(schedule, transfers, order[own], received[own])
            for own in (np.flatnonzero(source * schedule.ranks + target == key) for key in keys)
        ),
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
    """What may pair a channel rightly: one end moved, or the wrong ones of an end reordered."""
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


def unmatched_reduces(schedule: Schedule) -> Iterator[Faults]:
    """A replicated stage has the same number of collectives on each of its ranks."""
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


def _without_counterpart(
    schedule: Schedule, places: list[int], more: list[int], least: int
) -> Iterator[Finding]:
    """It is taken out, or one of the others on its rank is; or the other rank gets one."""
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
    """A collective after all that a rank has of its stage, or at the end of its list; with a step
    after it, where there are any of the `steps` like which that is."""
    columns = schedule.columns
    kinds = (*COMPLETES_GRADIENTS, *((*GROUPS, *STEPS) if len(steps) else ()))
    last = last_of_stage(columns, action.stage, rank, *kinds)
    place = last + 1 if last >= 0 else int(columns.starts[rank + 1])
    add = at_gap(schedule, action, rank, place, ahead=False)
    if not len(steps):
        return add
    step, index = columns.action(int(steps[0])), 0 if add.target is None else add.target + 1
    return Several((add, Add(step, rank, "after", index)))
