"""Why ranks are idle: by cause, the longest waits, and what the makespan consists of.

rank  idle        warm-up    drain    nothing left to do
   0  9 (27.3%)   6 (18.2%)  3 (9.1%)
   1  9 (27.3%)   5 (15.2%)  2 (6.1%)  2 (6.1%)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COPIES, Columns
from schedir.render.palette import CAUSE_WORDS, LEFT_OUT
from schedir.render.path import CriticalPath, Stretch
from schedir.render.styled import Block, Piece, Table, count, fill, number
from schedir.render.timeline import names, title, verdict
from schedir.simulator import CAUSES, Cause, Idle, Timeline

_ORDER = (
    Cause.WARMUP,
    Cause.SLOWER,
    Cause.DATA,
    Cause.COMMUNICATION,
    Cause.COLLECTIVE,
    Cause.OVERHEAD,
    Cause.DRAIN,
    Cause.UNKNOWN,
    Cause.DONE,
)
"""The causes, in the order of the columns: about that in which a rank meets them."""
_MEANS = {
    Cause.WARMUP: "the pipeline fills, until the rank's first backward",
    Cause.SLOWER: "what it needs is held up by a stage that has more to compute",
    Cause.DATA: "another rank still computes what it needs",
    Cause.COMMUNICATION: "what it needs is under way",
    Cause.COLLECTIVE: "replicas add up their gradients",
    Cause.OVERHEAD: "it has all that it needs, and does not start yet",
    Cause.DRAIN: "the pipeline empties, after the rank's last forward",
}
_NOTHING = 1e-9  # of the makespan: sums of floats leave such rests
_MOST_WAITS = 5
_MOST_STAGES = 12
_MOST_STRETCHES = 20


def why_blocks(timeline: Timeline, width: int | None, against: Timeline | None) -> Iterator[Block]:
    """Why the ranks of a timeline are idle, and of a second one after it."""
    several = [timeline] if against is None else [timeline, against]
    for turn, (line, name) in enumerate(zip(several, names(*several), strict=True)):
        yield Piece("\n" if turn else "")
        whose = "" if name in ("", line.schedule.name) else f"{name}: "
        yield Piece(fill(whose + title(line.schedule), width) + "\n")
        yield Piece(f"{verdict(line)}\n\n")
        yield from _causes(line, width)
        yield from _waits(line)
        yield from _path(line)


def _number(timeline: Timeline, time: float) -> str:
    """A time, to about a ten thousandth of the makespan."""
    return number(round(time, 4 - math.ceil(math.log10(timeline.makespan))))


def _of(timeline: Timeline, time: float, whole: float) -> str:
    """A time and its share of a whole; nothing where that is none."""
    share = f"{time / whole:.1%}"
    return "" if share == "0.0%" else f"{_number(timeline, time)} ({share})"


def _share(timeline: Timeline, time: float, whole: float) -> str:
    """The share alone."""
    return _of(timeline, time, whole) and f"{time / whole:.1%}"


def _in_unit(what: str, timeline: Timeline) -> str:
    return f"{what} ({timeline.unit})" if timeline.unit else what


def _causes(timeline: Timeline, width: int | None) -> Iterator[Block]:
    """The idle time of each rank by cause, and which stages are to blame as slower ones."""
    by_cause, makespan = timeline.idle_columns.by_cause(), timeline.makespan
    least = _NOTHING * makespan
    shown = [cause for cause in _ORDER if by_cause[:, CAUSES.index(cause)].max() > least]
    if not shown:
        yield Piece("No rank is ever idle.\n" if makespan else "Nothing takes any time.\n")
        return
    columns = [CAUSES.index(cause) for cause in shown]
    several = [(str(rank), own, makespan) for rank, own in enumerate(by_cause)]
    if len(several) > 1:
        several.append(("all", by_cause.sum(axis=0), makespan * len(by_cause)))

    def table(of: Callable[[Timeline, float, float], str]) -> Table:
        rows = [["rank", _in_unit("idle", timeline), *(CAUSE_WORDS[cause] for cause in shown)]]
        for rank, own, whole in several:
            times = [float(own.sum()), *own[columns].tolist()]
            rows.append([rank, *(of(timeline, time, whole) for time in times)])
        return Table(rows, ">" * len(rows[0]), header=True)

    whole = table(_of)
    yield whole if width is None or whole.width <= width else table(_share)
    means = [[CAUSE_WORDS[cause], _MEANS[cause]] for cause in shown if cause in _MEANS]
    if means:
        yield Piece("\n")
        yield Table(means)
    yield from _slower(timeline)


def _slower(timeline: Timeline) -> Iterator[Block]:
    """Which ranks have more to compute than those that wait for them, and what that costs."""
    idle, schedule = timeline.idle_columns, timeline.schedule
    held_up = idle.root >= 0
    slow = schedule.columns.rank[idle.root[held_up]]
    lost = np.bincount(slow, (idle.end - idle.start)[held_up], schedule.ranks)
    for turn, rank in enumerate(np.argsort(-lost, kind="stable")[:_MOST_WAITS].tolist()):
        share = _of(timeline, float(lost[rank]), timeline.makespan * schedule.ranks)
        if share:
            stages = ", ".join(map(str, schedule.stages_of(rank)))
            plural = "s" if len(schedule.stages_of(rank)) > 1 else ""
            yield Piece("" if turn else "\n")
            yield Piece(f"slower: rank {rank} (stage{plural} {stages}) costs the others {share}\n")


def _waits(timeline: Timeline) -> Iterator[Block]:
    """The longest single waits, with what they are for."""
    idle = timeline.idle_columns
    for_nothing = (Cause.DONE, Cause.UNKNOWN)
    lengths = np.where(
        np.isin(idle.cause, [CAUSES.index(cause) for cause in for_nothing]),
        0,
        idle.end - idle.start,
    )
    longest = np.argsort(-lengths, kind="stable")[:_MOST_WAITS]
    found = [n for n in longest.tolist() if lengths[n] > _NOTHING * timeline.makespan]
    if not found:
        return
    yield Piece("\nthe longest waits\n")
    rows = [["rank", _in_unit("time", timeline), "long", "why"]]
    for n in found:
        rank = int(np.searchsorted(idle.bounds, n, side="right")) - 1
        one = idle.at(n)
        span, long = _span(timeline, one.start, one.end), _number(timeline, one.end - one.start)
        rows.append([str(rank), span, long, _why(timeline, one)])
    yield Table(rows, "><><", header=True)


def _span(timeline: Timeline, start: float, end: float) -> str:
    return f"{_number(timeline, start)}..{_number(timeline, end)}"


def _named(columns: Columns, place: int) -> str:
    """The entry whose first action is at a place."""
    actions = [str(columns.action(part)) for part in range(place, int(columns.last[place]) + 1)]
    return actions[0] if len(actions) == 1 else f"({';'.join(actions)})"


def _why(timeline: Timeline, idle: Idle) -> str:
    """What a stretch of idle time is for, in words."""
    columns = timeline.schedule.columns

    def placed(place: int) -> str:
        return f"{columns.action(place)} on rank {columns.rank[place]}"

    entry = "" if idle.entry is None else f"{_named(columns, idle.entry)} "
    word = CAUSE_WORDS[idle.cause]
    if idle.blamed is None:
        return f"{word}: {entry}has all that it needs"
    if idle.cause is Cause.COLLECTIVE:
        return f"{word}: {entry or 'the end '}waits for {columns.action(idle.blamed)}"
    said = f"{word}: {entry}waits for {placed(idle.blamed)}"
    if idle.root is not None and idle.root != idle.blamed:
        said += f", held up by {placed(idle.root)}"
    transfers = graph_of(timeline.schedule).transfers
    if idle.cause is Cause.COMMUNICATION and idle.transfer is not None:
        own = transfers.send[transfers.receive == idle.transfer]
        if idle.blamed not in (*own.tolist(), idle.transfer):
            copies = columns.is_kind(*COPIES)[idle.blamed]
            said += f", with which its {'copy engine' if copies else 'channel'} is busy"
    return said


def _path(timeline: Timeline) -> Iterator[Block]:
    """What the makespan consists of, by stage, and the path from beginning to end."""
    path, makespan = CriticalPath.of(timeline), timeline.makespan
    if not makespan:
        return
    of = partial(_of, timeline, whole=makespan)
    parts = [f"{what} {of(time)}" for what, time in path.by_kind().items() if of(time)]
    yield Piece(f"\ncritical path: {', '.join(parts)}\n")
    rows = [["stage", "rank", _in_unit("compute", timeline), "transfers from it"]]
    stages = sorted((row for row in path.by_stage() if any(row[2:])), key=lambda row: -row[2])
    for stage, rank, compute, transfers in sorted(stages[:_MOST_STAGES]):
        rows.append([str(stage), str(rank), of(compute), of(transfers)])
    if len(stages) > _MOST_STAGES:
        rest = stages[_MOST_STAGES:]
        computes, moves = (sum(row[column] for row in rest) for column in (2, 3))
        rows.append([f"{len(rest)} others", "", of(computes), of(moves)])
    if len(rows) > 1:
        yield Table(rows, ">>>>", header=True)
        yield Piece("\n")
        yield Table([_HEADER, *_stretches(timeline, path)], "<>><", header=True)


_HEADER = ["time", "long", "compute", "critical path"]


def _stretches(timeline: Timeline, path: CriticalPath) -> Iterator[list[str]]:
    least = _NOTHING * timeline.makespan
    stretches = [one for one in path.stretches() if one.end - one.start > least]
    half = _MOST_STRETCHES // 2
    for turn, stretch in enumerate(stretches):
        if len(stretches) <= _MOST_STRETCHES or not half <= turn < len(stretches) - half:
            span = _span(timeline, stretch.start, stretch.end)
            lengths = (stretch.end - stretch.start, stretch.compute)
            yield [span, *(_number(timeline, time) for time in lengths), _said(timeline, stretch)]
        elif turn == half:
            yield [LEFT_OUT, "", "", f"{len(stretches) - 2 * half} more stretches"]


def _said(timeline: Timeline, stretch: Stretch) -> str:
    """A stretch of the path in words: through which ranks, and what runs there."""
    columns = timeline.schedule.columns
    compute = [_named(columns, place) for place in stretch.places]
    ranks = [int(columns.rank[place]) for place in (stretch.places[0], stretch.places[-1])]
    if stretch.along:
        where = f"ranks {ranks[0]} to {ranks[1]}"
        shown = compute if len(compute) <= 4 else [*compute[:2], LEFT_OUT, compute[-1]]
        said = f"{where}: {' → '.join(shown)}"
    else:
        shown = compute if len(compute) <= 6 else [*compute[:3], LEFT_OUT, *compute[-2:]]
        said = f"rank {ranks[0]}: {' '.join(shown)}"
    if LEFT_OUT in shown:
        said += f" ({count(len(compute), 'entr', 'ies')})"
    return said
