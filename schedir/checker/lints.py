"""S5xx: correct schedules that are slower than necessary.

They are judged at the costs given, by default the textbook's (F = 1, B = 2, I = W = 1, transfers
free), as simulated.

Communication is listed well if the step takes no longer under the channel model than with prompt
posting: every send goes as soon as its payload is made and the send before it on its channel is
posted, and nothing else holds it up. A part of a batch is posted with the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol, runtime_checkable

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.deadlock import runs
from schedir.checker.diagnostics import Faults, LeaveOut, Move, Side, fault
from schedir.checker.repairs import changed, in_turn, slide, windows
from schedir.graph.compile import Graph, graph_of
from schedir.graph.paths import (
    NEEDS,
    Prices,
    Waits,
    compute_before,
    finish,
    lengths,
    textbook,
    textbook_prices,
    waits,
)
from schedir.ir import COMMUNICATION, COMPUTE, Ints, Schedule, Ties
from schedir.passes import insert_communication, split_batches, strip_communication
from schedir.passes.communication import as_inserted

# The list is run again for moves of its communication while these many actions last, where each
# run costs as much as some more.
_MOST_RUN = 500_000
_OVERHEAD = 2500
# A time that is not shorter than this times another is the same, but for rounding.
_SHORTER = 1 - 1e-9


@runtime_checkable
class Pricing(Protocol):
    """What prices the actions of a list: a `CostModel`."""

    def prices(self, schedule: Schedule) -> Prices:
        """What every action of a complete schedule costs."""


def lints(
    given: Schedule, schedule: Schedule, channel: str, ties: Ties, costs: Pricing | None
) -> Iterator[Faults]:
    """Why a correct schedule, as it was `given` and as it is when complete, is slower than
    necessary, by default at the textbook costs. Places are counted as given."""
    times = "times are in forwards of one stage; a backward takes two"
    if costs is not None:
        times = "times are at the costs given"
    if not schedule.memo.get(as_inserted):
        yield from _exposed_communication(schedule, channel, ties, costs, times)
    inserted = schedule.columns.is_kind(*COMMUNICATION) & (given is not schedule)
    own = np.cumsum(~inserted) - 1
    yield from _needless_splits(given, graph_of(schedule), own)
    yield from _group_size(given, schedule, own, channel, costs, times)


@attrs.frozen(eq=False)
class _Run:
    """When each node of a schedule begins under a channel model, at the prices of its actions."""

    schedule: Schedule
    channel: str
    prices: Prices
    begins: Ints

    @property
    def ends(self) -> Ints:
        """When each place is over."""
        takes = self.prices.takes
        ends: Ints = self.begins[: len(takes)] + takes
        return ends

    @property
    def makespan(self) -> float:
        """When everything is over."""
        return float(self.ends.max(initial=0))


def _run(
    schedule: Schedule, channel: str, costs: Pricing | None, posted: Ints | None = None
) -> _Run:
    """The run of a schedule, its communication as it is listed, or after the compute `posted`."""
    if channel == "async":
        # Posts never block, so a batch is its parts; it may not run as one does.
        schedule, channel = split_batches(schedule), "edge"
    if costs is None:
        prices = textbook_prices(schedule.columns)
        if posted is None:
            return _Run(schedule, channel, prices, textbook(schedule, channel))
    else:
        prices = costs.prices(schedule)
    begins = finish(_waits(schedule, channel, posted), prices.takes, prices.holds)
    return _Run(schedule, channel, prices, begins)


def _waits(schedule: Schedule, channel: str, posted: Ints | None = None) -> Waits:
    """What waits for what: `edge` as without a channel model, as what could be."""
    return waits(schedule, channel, posted=posted, by_ends=channel != "edge")


def _prompt(schedule: Schedule, channel: str, costs: Pricing | None) -> _Run:
    """The run of a schedule in which every send waits for its payload and its channel alone."""
    without = channel if channel in ("async", "direction") else "edge"
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    posted = compute_before(columns)
    after, single = posted[transfers.send], ~columns.shared[transfers.send]
    later, earlier = transfers.in_turn
    maker = columns.last[transfers.maker]
    late = single & (after != maker)
    late[later] &= after[later] != after[earlier]
    if not late.any():
        return _run(schedule, without, costs)
    posted[transfers.send[single]] = maker[single]
    return _run(schedule, without, costs, posted)


def _exposed_communication(
    schedule: Schedule, channel: str, ties: Ties, costs: Pricing | None, times: str
) -> Iterator[Faults]:
    """The entry whose move alone saves the most time, if the step takes longer than with prompt
    posting; if no move saves any, an entry that holds up or is held up.

    Nothing if schedir's own communication would not save anything either.
    """
    run, possible = _run(schedule, channel, costs), _prompt(schedule, channel, costs).makespan
    makespan = shortest = run.makespan
    if possible >= _SHORTER * makespan:
        return
    inserted = insert_communication(strip_communication(schedule))
    if inserted == schedule:
        return
    columns, waited = schedule.columns, _critical(run)
    places = [place for place in waited[0] if columns.is_kind(*COMMUNICATION)[place]][:1]
    posted, change = "and others are posted late", None
    many = _MOST_RUN // (len(columns) + _OVERHEAD) + 1
    for move in islice(_moves(schedule, waited[:many]), many):
        moved = changed(schedule, move)
        takes = _run(moved, channel, costs).makespan
        if takes < _SHORTER * shortest and runs(moved, channel, ties):
            shortest, change = takes, move
            places = [columns.place(move.rank, at) for at in (move.index, move.target)]
            posted = f"is posted {'late' if move.target < move.index else 'early'}"
    if change is None:
        takes = _run(inserted, channel, costs).makespan
        if takes < _SHORTER * shortest and runs(inserted, channel, ties):
            shortest = takes
    if shortest < makespan:
        finding = rules.EXPOSED_COMMUNICATION.at(
            schedule,
            *places,
            makespan=makespan,
            shortest=shortest,
            posted=posted,
            possible=possible,
            times=times,
        )
        yield fault(attrs.evolve(finding, change=change or LeaveOut(), tried=True))


def _critical(run: _Run) -> list[tuple[int, int]]:
    """The waits on a critical path in which communication waits or is waited for, as places, those
    first that lengthen the path most; a wait for a payload only if nothing else ends with it."""
    waiting, begins, prices = _waits(run.schedule, run.channel), run.begins, run.prices
    communicates = run.schedule.columns.is_kind(*COMMUNICATION)
    ends = begins[waiting.awaited] + lengths(waiting, prices.takes, prices.holds)
    listed = (communicates[waiting.later] | communicates[waiting.earlier]) & (waiting.why != NEEDS)
    # The last wait of each node: for what is over last, and if possible one that no move ends.
    order = np.lexsort((~listed, ends, waiting.waiter))
    waiters = waiting.waiter[order]
    node, found = int(waiting.node[run.ends.argmax()]), {}
    while begins[node] > 0:
        at = int(np.searchsorted(waiters, node, side="right")) - 1
        wait = int(order[at])
        if listed[wait]:
            others = ends[order[at - 1]] if at and waiters[at - 1] == node else 0
            pair = int(waiting.later[wait]), int(waiting.earlier[wait])
            found[pair] = float(ends[wait] - others)
        node = int(waiting.awaited[wait])
    return sorted(found, key=lambda pair: -found[pair])


def _moves(schedule: Schedule, waited: Iterable[tuple[int, int]]) -> Iterable[Move]:
    """The moves of single sends and receives that end one of these waits, likely ones first."""
    limits = windows(graph_of(schedule))
    moves = schedule.columns.is_kind(*COMMUNICATION) & ~schedule.columns.shared
    ways: list[tuple[int, Side, int]] = []
    for later, earlier in waited:
        ways += (later, "before", earlier), (earlier, "after", later)
    slides = [slide(schedule, *way, int(limits[way[1]][way[0]])) for way in ways if moves[way[0]]]
    return dict.fromkeys(in_turn(slides))


def _needless_splits(given: Schedule, graph: Graph, own: Ints) -> Iterator[Faults]:
    """An I directly followed by its W. An action between the two may be the reason for the
    split."""
    first, second = graph.where("make", "deferred"), graph.where("end", "deferred")
    pairs = np.sort(first[(first >= 0) & (second == first + 1)])
    # That of an overlapped pair is one with the forward beside it.
    pairs = own[pairs[~graph.columns.shared[pairs]]]
    if len(pairs):
        places = np.column_stack((pairs, pairs + 1)).ravel()
        case = "several" if len(pairs) > 1 else "one"
        finding = rules.NEEDLESS_SPLIT.at(given, *places, case=case, pairs=len(pairs))
        yield fault(finding, extent=len(pairs))


def _group_size(
    given: Schedule,
    schedule: Schedule,
    own: Ints,
    channel: str,
    costs: Pricing | None,
    times: str,
) -> Iterator[Faults]:
    """Interleaved 1F1B takes (V · M + P − 1) times as long as one microbatch does on a chunk, in
    groups of P microbatches."""
    graph = graph_of(schedule)
    ranks, microbatches = schedule.ranks, schedule.microbatches
    chunks = schedule.stages // ranks
    looped = schedule.placement == tuple((stage % ranks,) for stage in range(ranks * chunks))
    if not looped or chunks < 2 or ranks < 2 or microbatches % ranks:
        return
    # The group is what the first rank runs of its first chunk before its second.
    group = int((graph.home[0] < graph.home[ranks].min()).sum())
    # A recomputation takes longer for another reason.
    if group == ranks or (graph.where("end", "kept") >= 0).any():
        return
    prompt = _prompt(schedule, channel, costs)
    each = 3 if costs is None else _of_one_chunk(schedule, prompt.prices.takes)
    if each is None:
        return
    possible = each * (chunks * microbatches + ranks - 1)
    if prompt.makespan > possible:
        yield fault(
            rules.GROUP_SIZE.at(
                given,
                own[graph.home[ranks].min()],
                group=group,
                ranks=ranks,
                makespan=prompt.makespan,
                possible=float(possible),
                times=times,
            )
        )


def _of_one_chunk(schedule: Schedule, takes: Ints) -> float | None:
    """How long one microbatch computes on one chunk; None if that differs, where compute overlaps
    for one, or if transfers take time."""
    columns = schedule.columns
    if takes[columns.is_kind(*COMMUNICATION)].any():
        return None
    computes = columns.is_kind(*COMPUTE) & (columns.microbatch >= 0) & ~columns.joined
    total = np.zeros((schedule.stages, schedule.microbatches), takes.dtype)
    np.add.at(total, (columns.stage[computes], columns.microbatch[computes]), takes[computes])
    return None if np.ptp(total) else float(total[0, 0])
