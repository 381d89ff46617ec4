"""What must happen before what under a channel model, when everything happens, and what never does.

Each send and its receive are merged into one node, and so are the parts of an overlapped pair, and
the collectives and tied updates that happen together. The orders that a channel model enforces are
edges. A list deadlocks exactly if these edges have a cycle, whatever the interleaving of the ranks:
every channel has one writer and one reader, and control flow is fixed (Siegel and Avrunin 2003;
Liao et al., arXiv 0709.3693).

Under each model except `host` a batch is two more nodes, because it is posted as one and waited for
as one:

    before  <-  posted  <-  each of its transfers  <-  over  <-  after
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.graph.compile import Graph, Transfers, graph_of
from schedir.ir import (
    CARRIES_GRADIENTS,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    GROUPS,
    KINDS,
    RECEIVES,
    Bools,
    Columns,
    Ints,
    Kind,
    Schedule,
    Ties,
    channel_model,
)
from schedir.ir.kinds import STEPS
from schedir.ir.schedule import shared_steps, tied_steps

REASONS = ("comes after", "needs", "queued behind", "runs with")
AFTER, NEEDS, QUEUED, PART, POSTED = range(5)
"""The last two lead from a batch that is over to its parts, and from the parts to the node at which
the batch is posted. These steps are within an entry, and only a PART is a reason for them."""

TEXTBOOK_BEGINS = "begins at the textbook costs"
"""The first part of the keys under which a schedule remembers what `textbook` finds; the channel
model, and whether receives are posted ahead, are the others."""
HAPPENS = "happens"
"""The key under which a schedule remembers one order of all its nodes, as a number for each place:
the order of the pass that inserted its communication, or the first one found."""


@attrs.frozen(eq=False, slots=False)
class Waits:
    """What must happen before what: place `later[i]` waits for place `earlier[i]`.

    `why` indexes REASONS. The places stand for the nodes `waiter[i]` and `awaited[i]`.
    `node[place]` is the node that a place belongs to, itself a place: the first end of its transfer
    or collective, the first part of its pair, or the first of the OPTIM_STEPs tied to it. The nodes
    of batches have the numbers after all places, up to `nodes`.

    With `by_ends`, each end of a transfer holds up what comes after it on its own rank for a time
    of its own.
    """

    schedule: Schedule
    later: Ints
    earlier: Ints
    why: NDArray[np.int8]
    waiter: Ints
    awaited: Ints
    node: Ints
    nodes: int
    by_ends: bool = False

    @property
    def exists(self) -> Bools:
        """Which numbers are those of a node."""
        own = self.node == np.arange(len(self.node))
        return np.append(own, np.ones(self.nodes - len(own), np.bool_))

    @cached_property
    def _known(self) -> Ints | None:
        """The order in which the schedule's places are known to happen, if all waits lead back in
        that, which proves that there is no cycle."""
        happens = self.schedule.memo.get(HAPPENS)
        if not isinstance(happens, np.ndarray) or self.nodes != len(happens):
            return None
        return happens if (happens[self.waiter] > happens[self.awaited]).all() else None

    @cached_property
    def order(self) -> Ints:
        """All nodes that ever happen, each after all that it waits for: as they are known to
        happen, else as Kahn (1962) finds them."""
        if self._known is not None:
            known: Ints = np.argsort(self._known, kind="stable")
            return known[self.exists[known]]
        by_awaited = np.argsort(self.awaited, kind="stable")
        bounds = np.searchsorted(self.awaited[by_awaited], np.arange(self.nodes + 1)).tolist()
        waiters = self.waiter[by_awaited].tolist()
        left = np.bincount(self.waiter, minlength=self.nodes)
        order = np.flatnonzero((left == 0) & self.exists).tolist()
        missing = left.tolist()
        for node in order:
            for waiter in waiters[bounds[node] : bounds[node + 1]]:
                missing[waiter] -= 1
                if not missing[waiter]:
                    order.append(waiter)
        return np.array(order, np.int64)

    @cached_property
    def turn(self) -> Ints:
        """By node, its number in `order`, -1 for what never happens. Shape [nodes]. Where all nodes
        happen, the schedule remembers their order."""
        turn = np.full(self.nodes, -1)
        turn[self.order] = np.arange(len(self.order))
        happens = turn[self.node]
        if self.nodes == len(happens) and happens.min(initial=0) == 0:
            self.schedule.memo.setdefault(HAPPENS, happens)
        return turn

    @cached_property
    def in_twos(self) -> tuple[list[list[int]], Ints, Ints]:
        """The waits two at a time: what waits for more goes on from its step before.

        node 3 waits for 0, 1 and 2         step 3: after 0 and 1        step 4: after 3 and 2

        First the two earlier steps that each step comes after, then the two waits that say so
        (where there is none, the number of all waits), both of shape [2, steps]; then the last step
        of every node. Step 0 is the beginning, where what never happens is as well.
        """
        order, turns = self.order, self.turn[self.waiter]
        edges = np.argsort(turns, kind="stable")
        edges = edges[np.searchsorted(turns[edges], 0) :]
        many = np.bincount(self.waiter, minlength=self.nodes)[order]
        steps = np.maximum(many - 1, 1)
        last = np.cumsum(steps)
        first = last - steps + 1
        of_node = np.zeros(self.nodes, np.int64)
        of_node[order] = last
        of_node[: len(self.node)] = of_node[self.node]
        after = np.zeros((2, 1 + int(steps.sum())), np.int64)
        after[0] = np.arange(-1, after.shape[1] - 1)
        after[0, first] = 0
        waits = np.full_like(after, len(self.waiter))
        turn = np.arange(len(edges)) - np.repeat(np.cumsum(many) - many, many)
        which = np.minimum(turn, 1), np.repeat(first, many) + np.maximum(turn - 1, 0)
        after[which], waits[which] = of_node[self.awaited[edges]], edges
        return after[:, 1:].tolist(), waits[:, 1:], of_node

    @property
    def stuck(self) -> Bools:
        """True for nodes that never happen: the nodes on a cycle, and the nodes that wait for
        one."""
        return self.exists & (self.turn < 0)

    @property
    def blocks(self) -> bool:
        """Whether there are any."""
        return self._known is None and bool(self.stuck.any())


def lengths(waiting: Waits, takes: Ints, holds: Ints | None = None) -> Ints:
    """The length of each wait, from the beginning of what is awaited; shape [waits].

    The result of a node is there after it `takes` its time. A node queued behind it may begin when
    it no longer `holds` its queue, by default when it is over; `holds` is by place. If the waits
    are `by_ends`, all but what needs the result waits for that alone, where a receive holds its
    queue until its payload has arrived.
    """
    awaited = waiting.awaited
    delay = np.append(takes, np.zeros(waiting.nodes - len(takes), takes.dtype))[awaited]
    if holds is None:
        return delay
    held = waiting.why == QUEUED
    if waiting.by_ends:
        receives = waiting.schedule.columns.is_kind(*RECEIVES)[waiting.earlier]
        held = (waiting.why != NEEDS) & ~receives
    free = np.where(awaited < len(waiting.node), holds[waiting.earlier], holds.dtype.type(0))
    return np.where(held, free, delay)


def finish(waiting: Waits, takes: Ints, holds: Ints | None = None) -> Ints:
    """When each node begins, and all its places with it: the longest path to it, -1 if it never
    happens. Shape [nodes].

    `takes` and `holds` are those of `lengths`. Times are integers if all of these are, and if an
    int64 can hold them.
    """
    earlier, why, last = waiting.in_twos
    delay = lengths(waiting, takes, holds)
    delay = np.append(delay, delay.dtype.type(0))
    begins: list[float] = [0]
    for one, other, after, later in zip(*earlier, *delay[why].tolist(), strict=True):
        begin, least = begins[one] + after, begins[other] + later
        begins.append(begin if begin > least else least)
    try:
        times = np.array(begins, delay.dtype)
    except OverflowError:
        times = np.array(begins, np.float64)
    times[0] = -1
    return times[last]


@attrs.frozen(eq=False)
class Prices:
    """How long every action takes, those that are one together; and for how long it `holds` what is
    queued behind it: a transfer its channel. Shape [actions]."""

    takes: NDArray[Any]
    holds: NDArray[Any]


TEXTBOOK = np.array([kind.meaning.cost for kind in KINDS])
"""What each kind costs in the textbook, by its index in KINDS: a backward is two forwards."""


def textbook_prices(columns: Columns) -> Prices:
    """What every action costs in the textbook; an overlapped pair takes the sum of its parts."""
    takes = TEXTBOOK[columns.kind]
    if columns.together:
        takes = np.add.reduceat(takes, columns.heads)[columns.entry]
    return Prices(takes, takes)


def textbook(schedule: Schedule, channel: str = "edge", *, ahead: bool = False) -> Ints:
    """When each node of `waits` begins at the textbook costs, with free transfers; stored with the
    schedule."""

    def found() -> Ints:
        columns = schedule.columns
        batches = columns.joined & columns.is_kind(*COMMUNICATION)
        if channel in ("rank", "pair") and not ahead and not batches.any():
            # Queued communication takes no time, so that the queues may hold up nothing.
            begins, before = textbook(schedule), previous_of_queue(graph_of(schedule), channel)
            later = np.flatnonzero(before >= 0)
            if (begins[before[later]] <= begins[later]).all():
                return begins
        waiting = waits(schedule, channel, ahead=ahead)
        return finish(waiting, textbook_prices(columns).takes)

    return schedule.once((TEXTBOOK_BEGINS, channel, ahead), found)


def waits(
    schedule: Schedule,
    channel: str,
    ties: Ties = (),
    *,
    ahead: bool = False,
    posted: Ints | None = None,
    by_ends: bool = False,
    meet: bool = True,
) -> Waits:
    """Every wait under a channel model. A compute-only schedule has only the waits of its compute.

    With `ahead`, receives are posted from the beginning on, and a receive in a batch with the
    batch. `posted` gives, by place, the compute that it comes after instead of the one listed
    before it, -1 for none; under `host` it changes nothing. With `by_ends`, each end of a transfer
    holds its own queue, and the link between the ranks carries one transfer at a time under every
    model. If collectives do not `meet`, each rank's wait for no other rank. Raises ValueError for
    an unknown model.
    """
    channel = channel_model(channel)
    graph = graph_of(schedule)
    node = _nodes(graph, ties, meet)
    begins, over, nodes = _points(graph, channel, node)

    # No name keeps the parts in memory.
    listed = (
        (later[known], earlier[known], np.full(len(known), why, np.int8)[known])
        for later, earlier, why in _order(graph, channel, ties, ahead, posted, by_ends)
        for known in [earlier >= 0]
    )
    later, earlier, reasons = map(np.concatenate, zip(*listed, strict=True))
    waiter, awaited, every = begins[later], over[earlier], by_ends and channel == "async"
    if nodes > len(node) or every:
        whole, single = np.flatnonzero(over != node), np.flatnonzero(begins != node)
        # The link between two ranks carries the sends of one batch in turn, or `every` one.
        transfers, entry = transfers_of(graph, channel), graph.columns.entry
        send, receive = transfers.send, transfers.receive
        behind, first = transfers.in_turn
        one = entry[send[behind]] == entry[send[first]]
        one &= entry[receive[behind]] == entry[receive[first]]
        behind, first = (send[each[one | every]] for each in (behind, first))
        later = np.concatenate((later, whole, single, behind))
        earlier = np.concatenate((earlier, whole, single, first))
        within = np.repeat((PART, POSTED, QUEUED), (len(whole), len(single), len(behind)))
        reasons = np.append(reasons, within.astype(np.int8))
        waiter = np.concatenate((waiter, over[whole], node[single], node[behind]))
        awaited = np.concatenate((awaited, node[whole], begins[single], node[first]))
    return Waits(schedule, later, earlier, reasons, waiter, awaited, node, nodes, by_ends)


def _points(graph: Graph, channel: str, node: Ints) -> tuple[Ints, Ints, int]:
    """By place, the nodes that wait for everything before its entry, and the nodes that everything
    after it waits for; and the number of nodes."""
    columns = graph.columns
    batch = columns.shared & columns.is_kind(*COMMUNICATION)
    if channel == "host" or not batch.any():
        return node, node, len(node)
    number = np.cumsum(batch & ~columns.joined)
    over = np.where(batch, len(columns) + 2 * number - 1, node)
    begins = node if channel == "async" else np.where(batch, over - 1, node)
    return begins, over, len(columns) + 2 * int(number[-1])


def _nodes(graph: Graph, ties: Ties, meet: bool) -> Ints:
    columns = graph.columns
    # The parts of a pair are one node: that of the first.
    node = np.arange(len(columns)) - (columns.joined & columns.is_kind(*COMPUTE))
    transfers = graph.transfers
    send, receive = transfers.send[transfers.matched], transfers.receive[transfers.matched]
    node[send] = node[receive] = np.minimum(send, receive)
    collectives = graph.collectives if meet else []
    for places in (*collectives, *tied_steps(graph.schedule, ties)):
        node[list(places)] = min(places)
    return node


def _order(
    graph: Graph, channel: str, ties: Ties, ahead: bool, posted: Ints | None, by_ends: bool
) -> Iterator[tuple[Ints, Ints, int | Ints]]:
    """By place, the waits within each list, for the compute before and for what is queued before,
    and the waits for inputs; -1 where nothing is awaited."""
    columns, tied, (user, made) = graph.columns, bool(ties), graph.needs
    if channel == "host":
        computes = columns.is_kind(*COMPUTE)
        # The whole list is one queue, which says all that compute's order could.
        later, earlier = _holders(columns, frozenset(Kind), tied)
        after = computes[later] | computes[earlier]
        yield later, earlier, np.where(after, AFTER, QUEUED)
        # Nor does it need to have a step wait for its sum.
        inputs = ~columns.is_kind(*GROUPS)[made]
        yield user[inputs], made[inputs], NEEDS
        return
    later, earlier = _holders(columns, COMPUTE, tied)
    if posted is not None:
        earlier = posted[later]
    places, before = np.arange(len(columns)), previous_of_queue(graph, channel)
    if ahead or (by_ends and not tied):
        # Receives wait for no compute, or not for what they stand behind in their queue waits for.
        says = columns.shared[later] if ahead else (before < 0) | (earlier[before] != earlier)
        keep = ~columns.is_kind(*RECEIVES)[later] | says
        later, earlier = later[keep], earlier[keep]
    yield later, earlier, AFTER
    if channel == "edge" and not (columns.together or by_ends):
        # The receives of a channel stand in the order of its sends.
        places = places[~columns.is_kind(*RECEIVES)]
    yield places, before[places], QUEUED
    if channel == "rank" and tied:
        steps = np.array(shared_steps(graph.schedule, ties), np.int64)
        yield steps, last_before(columns, COMMUNICATION | GROUPS)[steps], QUEUED
    yield user, made, NEEDS


def last_before(columns: Columns, kinds: Iterable[Kind]) -> Ints:
    """For every place, the last place of these kinds before it on its rank, -1 for none. The parts
    of a pair have the same before them."""
    places = np.arange(len(columns))
    last = np.maximum.accumulate(np.append(-1, np.where(columns.is_kind(*kinds), places, -1)))
    before = last[places - (columns.joined & columns.is_kind(*COMPUTE))]
    return np.where(before < columns.starts[columns.rank], -1, before)


def compute_before(columns: Columns) -> Ints:
    """For every place, the last compute listed before its entry on its rank; -1 for none."""
    return last_before(columns, COMPUTE)


def _holders(columns: Columns, kinds: frozenset[Kind], tied: bool) -> tuple[Ints, Ints]:
    """Every place, and the last one of these kinds before it on its rank; -1 for none.

    Where stages are `tied`, OPTIM_STEPs don't hold each other, and all since that last one hold
    what comes after them.
    """
    places = np.arange(len(columns))
    if not tied:
        return places, last_before(columns, kinds)
    before, steps = last_before(columns, kinds - STEPS), columns.is_kind(*STEPS)
    # How many OPTIM_STEPs stand before each place, and how many of those hold it.
    number: Ints = np.cumsum(steps) - steps
    first: Ints = number[np.maximum(before, columns.starts[columns.rank])]
    many = np.where(steps, 0, number - first)
    within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    held = np.flatnonzero(steps)[np.repeat(first, many) + within]
    free = many == 0
    return (
        np.concatenate((places[free], np.repeat(places, many))),
        np.concatenate((before[free], held)),
    )


def transfers_of(graph: Graph, channel: str) -> Transfers:
    """The transfers, on the channels that a channel model has."""
    return graph.transfers_apart if channel == "direction" else graph.transfers


def queues(graph: Graph, channel: str) -> Ints:
    """For every place, the number of its queue; -1 if it blocks nothing.

    The entries of one queue happen in list order. A collective has no peer: it has the queue of its
    stage, except under the models that order all communication. Copies to and from the host are one
    queue of their rank under every model except `host`. Raises ValueError for an unknown model.
    """
    channel = channel_model(channel)
    columns, ranks = graph.columns, graph.columns.ranks
    if channel == "host":
        return columns.rank
    communicates, groups = columns.is_kind(*COMMUNICATION), columns.is_kind(*GROUPS)
    # Numbered apart on each rank: one number per peer and direction, then one per stage.
    number = np.where(columns.is_kind(*COPIES), 2 * ranks + graph.schedule.stages, -1)
    if channel == "rank":
        number[communicates | groups] = 0
    elif channel != "async":
        queue: Ints | Bools = columns.is_kind(*CARRIES_GRADIENTS)
        if channel != "direction":
            queue = 2 * graph.peers + (columns.is_kind(*RECEIVES) & (channel == "edge"))
        number = np.where(communicates, queue, number)
        number = np.where(groups, 2 * ranks + columns.stage, number)
    return np.where(number < 0, -1, number * ranks + columns.rank)


def previous_of_queue(graph: Graph, channel: str) -> Ints:
    """For every place, the place before it in its queue that it waits for, -1 for none.

    Only the first part of a batch waits, except under `host`, under which each part waits for the
    one before.
    """
    columns, queue = graph.columns, queues(graph, channel)
    order = np.flatnonzero(queue >= 0)
    order = order[np.argsort(queue[order], kind="stable")]
    previous = np.full(len(queue), -1)
    same = queue[order[1:]] == queue[order[:-1]]
    if columns.together and channel != "host":
        same &= columns.entry[order[1:]] != columns.entry[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous
