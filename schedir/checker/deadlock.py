"""S301: deadlock, and its shortest explanation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np

from schedir.checker.diagnostics import Change, Excerpt, Faults, Finding, Side, in_short
from schedir.checker.repairs import in_turn, reorder, slide, windows
from schedir.checker.rules import MEETS, WAIT_CYCLE
from schedir.graph.compile import graph_of
from schedir.graph.cycles import Wait, shortest_cycle
from schedir.graph.paths import AFTER, PART, QUEUED, REASONS, Waits, waits
from schedir.ir import (
    CHANNELS,
    COMMUNICATION,
    COMPUTE,
    GROUPS,
    RECEIVES,
    Columns,
    Ints,
    Schedule,
    Ties,
    enforces,
)

_AROUND = 2
_ENDS = 4  # rows of a long way that are shown of each end


def clean_channels(schedule: Schedule, ties: Ties = ()) -> tuple[str, ...]:
    """The channel models under which the schedule runs to its end, strictest first.

    Expects matched communication, which is paired rightly under some model.
    """
    # What is paired rightly under one model only is so where the fewest transfers share a channel.
    alone = len(graph_of(schedule).transfers.swapped) > 0
    # Without ties and batches, two models block as the stricter one before them does. What `host`
    # has compute wait for, `rank` has the communication after it wait for, and compute only matters
    # to that. What `edge` has a transfer wait for, the one before it on its channel, waits for
    # nothing that it doesn't wait for itself. But the parts of a batch run apart under `host`, and
    # its receives delay whoever needs another part.
    columns = schedule.columns
    batched = columns.joined & columns.is_kind(*COMMUNICATION)
    known = () if ties or batched.any() else ("rank", "async")
    clean: list[str] = []
    for channel in ("direction",) if alone else CHANNELS:
        if any(enforces(stricter, channel) for stricter in clean) or (
            channel not in known and runs(schedule, channel, ties)
        ):
            clean.append(channel)
    return tuple(clean)


def runs(schedule: Schedule, channel: str, ties: Ties = ()) -> bool:
    """True if the schedule runs to its end under a channel model."""
    return not waits(schedule, channel, ties).blocks


def blocked(schedule: Schedule, channel: str, ties: Ties = ()) -> int:
    """How many entries and exchanges can never run under a channel model."""
    return int(waits(schedule, channel, ties).stuck.sum())


def deadlock(
    schedule: Schedule,
    channel: str,
    clean: tuple[str, ...],
    ties: Ties = (),
    *,
    given: Schedule | None = None,
) -> Iterator[Faults]:
    """A deadlock under `channel`, if there is one; `clean` are the models that are clean.

    A compute-only schedule is judged by its compute, collectives and ties: a cycle of these exists
    under every model. `given` is the schedule as its author gave it, if communication was inserted
    since.
    """
    # What blocks under every model does so for the reasons that the weakest has, too: these are the
    # ones to see to first.
    for model in (channel,) if clean else dict.fromkeys((CHANNELS[-1], channel)):
        waiting = waits(schedule, model, ties)
        if waiting.blocks:
            yield Faults(
                rule=WAIT_CYCLE,
                keys=np.zeros(1, np.int64),
                findings=_shortest(schedule, waiting, (channel, clean), ties, given),
            )
            return


def _shortest(
    schedule: Schedule,
    waiting: Waits,
    judged: tuple[str, tuple[str, ...]],
    ties: Ties,
    given: Schedule | None,
) -> Iterator[Finding]:
    """The shortest wait cycle."""
    cycle = shortest_cycle(waiting)
    rows = _shortened(_rows(schedule.columns, cycle))
    channel, clean = judged
    yield Finding(
        WAIT_CYCLE.at(
            schedule,
            *(place for place, _, _ in rows),
            reasons=tuple(why for _, why, _ in rows),
            channel=channel,
            clean=clean,
            complete=schedule.is_complete,
            inserted=given is not None,
            excerpts=tuple(_excerpts(schedule, [place for place, _, _ in rows])),
        ),
        extent=1,
        changes=(None, _breaking(schedule, given or schedule, cycle, bool(ties))),
    )


def _rows(columns: Columns, cycle: list[Wait]) -> list[tuple[int, str, int]]:
    """The cycle with both kinds of edge: within a list, and between the ends of a transfer.

    It starts at the place that comes first in the lists.
    """
    rows = []
    for (_, before, _), (later, earlier, why) in zip([cycle[-1], *cycle], cycle, strict=False):
        if before != later:
            one_entry = columns.entry[before] == columns.entry[later]
            rows.append((before, REASONS[PART] if one_entry else MEETS, later))
        rows.append((later, REASONS[why], earlier))
    first = min(range(len(rows)), key=lambda row: (rows[row][0], rows[row][1] != MEETS))
    return rows[first:] + rows[:first]


def _shortened(rows: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """The rows without the middle of a long way through one list: an entry that is queued behind
    another is also queued behind all entries before that one."""
    kept = []
    for why, way in groupby(rows, key=itemgetter(1)):
        own = list(way)
        if why in (REASONS[QUEUED], REASONS[AFTER]) and len(own) > 2 * _ENDS:
            own = own[:_ENDS] + own[-_ENDS:]
        kept += own
    return kept


def _breaking(
    schedule: Schedule, given: Schedule, cycle: list[Wait], tied: bool
) -> Iterator[Change]:
    """The changes that may break the cycle, in the list as it was given.

    If the cycle leads through a list from one entry to an earlier one, that wait ends only if the
    first entry moves ahead of the other, or the other after it. The entries between them hold up no
    more than these two do, except with ties, where they keep OPTIM_STEPs from happening together.
    """
    columns = schedule.columns
    computes, receives = columns.is_kind(*COMPUTE), columns.is_kind(*RECEIVES)
    inserted = columns.is_kind(*COMMUNICATION) & (given is not schedule)
    kept: Ints = np.cumsum(~inserted) - ~inserted  # before each place, and so its own there
    limits = windows(graph_of(schedule))
    passages = _passages(cycle)
    # A receive can always be posted earlier as far as data goes, so those are tried first.
    passages.sort(key=lambda passage: not receives[passage[0]])
    ways: list[tuple[int, Side, int]] = []
    for later, *inner, earlier in passages:
        ways += [(place, "before", int(kept[earlier])) for place in (later, *inner * tied)]
    for later, *inner, earlier in passages:
        last = int(kept[later] - inserted[later])
        ways += [(place, "after", last) for place in (earlier, *inner * tied)]
    # To move compute is to change the schedule, and not how it is posted.
    for compute in (False, True):
        yield from in_turn(
            [
                slide(given, int(kept[place]), side, to, int(limits[side][place]))
                for place, side, to in ways
                if computes[place] == compute and not inserted[place]
            ]
        )
    sums = columns.is_kind(*GROUPS)
    for later, *_, earlier in passages:
        if sums[later] and sums[earlier]:
            yield from reorder(given, kept[[later, earlier]])


def _passages(cycle: list[Wait]) -> list[list[int]]:
    """The places that the cycle visits on one rank, each waiting for the next only by the order of
    the list."""
    passages: list[list[int]] = []
    for at, (later, earlier, why) in enumerate(cycle):
        before = cycle[at - 1]
        if why not in (QUEUED, AFTER):
            continue
        if at and before[1] == later and before[2] in (QUEUED, AFTER):
            passages[-1].append(earlier)
        else:
            passages.append([later, earlier])
    # The last may lead on to the first.
    if len(passages) > 1 and passages[-1][-1] == passages[0][0]:
        passages[0] = passages.pop() + passages[0][1:]
    return passages


def _excerpts(schedule: Schedule, places: list[int]) -> Iterator[Excerpt]:
    """The pieces of the ranks' lists that hold the cycle, a few entries around each part of it."""
    columns = schedule.columns
    own, rank = columns.entry[places], columns.rank[columns.heads]
    around = own + np.arange(-_AROUND, _AROUND + 1)[:, None]
    around = around.clip(0, len(rank) - 1)
    shown = np.unique(around[rank[around] == rank[own]])
    apart = (np.diff(shown) > 1) | (np.diff(rank[shown]) > 0)
    for piece in np.split(shown, apart.nonzero()[0] + 1):
        heads = columns.heads[piece].tolist()
        of, first = columns.position(heads[0])
        yield Excerpt(
            of,
            first,
            tuple(in_short(columns, head) for head in heads),
            frozenset((np.intersect1d(piece, own) - piece[0] + first).tolist()),
            int((rank == of).sum()),
        )
