"""Why ranks are idle: by cause, the longest waits, and what the makespan consists of.

rank  idle        warmup    drain    nothing left to do
   0  9 (27.3%)   6 (18.2%)  3 (9.1%)
   1  9 (27.3%)   5 (15.2%)  2 (6.1%)  2 (6.1%)

critical path: compute 33 (100.0%)

stage  rank    compute
    0     0    3 (9.1%)
    3     3  24 (72.7%)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, COMPUTE, COPIES, GROUPS, RECEIVES, Columns
from schedir.render.captions import captions, readable, title, verdict
from schedir.render.palette import CAUSE_WORDS
from schedir.render.text import Block, Piece, Table, fill, number
from schedir.simulator import CAUSES, Cause, Idle, Timeline
from schedir.simulator.timeline import path_times

_MEANS = {
    Cause.WARMUP: "the pipeline fills, until the rank's first backward",
    Cause.SLOWER: "a stage with more work delays what the rank needs",
    Cause.DATA: "another rank still computes what the rank needs",
    Cause.COMMUNICATION: "what the rank needs is still being sent",
    Cause.COLLECTIVE: "replicas sum their gradients",
    Cause.OVERHEAD: "the rank has all that it needs, and has not started yet",
    Cause.DRAIN: "the pipeline empties, after the rank's last forward",
}
_PARTS = {
    "compute": COMPUTE,
    "transfers": COMMUNICATION,
    "copies": COPIES,
    "sums of gradients": GROUPS,
}
_NOTHING = 1e-9  # of the makespan: rounding errors of sums are smaller
_MOST_WAITS = 5
_MOST_STAGES = 12


def why_blocks(timeline: Timeline, width: int | None, against: Timeline | None) -> Iterator[Block]:
    """Why the ranks of one or two timelines are idle."""
    several = readable(timeline, against)
    for turn, (line, name) in enumerate(zip(several, captions(several), strict=True)):
        yield Piece("\n" if turn else "")
        whose = "" if name in ("", line.schedule.name) else f"{name}: "
        yield Piece(fill(whose + title(line.schedule), width) + "\n")
        yield Piece(f"{verdict(line)}\n\n")
        yield from _causes(line, width)
        yield from _waits(line)
        yield from _path(line)


def _number(timeline: Timeline, time: float) -> str:
    """A time, rounded to about a ten thousandth of the makespan."""
    return number(round(time, 4 - math.ceil(math.log10(timeline.makespan))))


def _of(timeline: Timeline, time: float, whole: float) -> str:
    """A time and its share of a whole; empty if the share is nothing."""
    share = f"{time / whole:.1%}"
    return "" if share == "0.0%" else f"{_number(timeline, time)} ({share})"


def _in_unit(what: str, timeline: Timeline) -> str:
    return f"{what} ({timeline.unit})" if timeline.unit else what


def _causes(timeline: Timeline, width: int | None) -> Iterator[Block]:
    """The idle time of each rank by cause, and the slower stages that cause some of it."""
    by_cause, makespan = timeline.idle_columns.by_cause(), timeline.makespan
    shown = [
        cause
        for cause in CAUSE_WORDS
        if by_cause[:, CAUSES.index(cause)].max() > _NOTHING * makespan
    ]
    if not shown:
        yield Piece("No rank is ever idle.\n" if makespan else "Nothing takes any time.\n")
        return
    columns = [CAUSES.index(cause) for cause in shown]
    several = [(str(rank), own, makespan) for rank, own in enumerate(by_cause)]
    if len(several) > 1:
        several.append(("all", by_cause.sum(axis=0), makespan * len(by_cause)))

    rows = [["rank", _in_unit("idle", timeline), *(CAUSE_WORDS[cause] for cause in shown)]]
    for rank, own, whole in several:
        times = [float(own.sum()), *own[columns].tolist()]
        rows.append([rank, *(_of(timeline, time, whole) for time in times)])
    table = Table(rows, ">" * len(rows[0]), header=True)
    if width is not None and table.width > width:
        shares = ([cell.rpartition("(")[2].rstrip(")") for cell in row] for row in rows[1:])
        table = Table([rows[0], *shares], table.align, header=True)
    yield table
    means = [[CAUSE_WORDS[cause], _MEANS[cause]] for cause in shown if cause in _MEANS]
    if means:
        yield Piece("\n")
        yield Table(means)
    yield from _slower(timeline)


def _slower(timeline: Timeline) -> Iterator[Block]:
    """The ranks that have more to compute than the ranks that wait for them, and the cost."""
    idle, schedule = timeline.idle_columns, timeline.schedule
    held_up = idle.root >= 0
    slow = schedule.columns.rank[idle.root[held_up]]
    lost = np.bincount(slow, (idle.end - idle.start)[held_up], schedule.ranks)
    for turn, rank in enumerate(np.argsort(-lost, kind="stable")[:_MOST_WAITS].tolist()):
        share = _of(timeline, float(lost[rank]), timeline.makespan * schedule.ranks)
        if share:
            stages = schedule.stages_of(rank)
            named = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            yield Piece("" if turn else "\n")
            yield Piece(f"slower: rank {rank} ({named}) costs the others {share}\n")


def _waits(timeline: Timeline) -> Iterator[Block]:
    """The longest waits, each with what it waits for."""
    idle = timeline.idle_columns
    for_nothing = [CAUSES.index(cause) for cause in (Cause.DONE, Cause.UNKNOWN)]
    lengths = np.where(np.isin(idle.cause, for_nothing), 0, idle.end - idle.start)
    longest = np.argsort(-lengths, kind="stable")[:_MOST_WAITS]
    rows = [["rank", _in_unit("time", timeline), "long", "why"]]
    for n in longest[lengths[longest] > _NOTHING * timeline.makespan].tolist():
        rank = int(np.searchsorted(idle.bounds, n, side="right")) - 1
        one = idle.at(n)
        times = one.start, one.end, one.end - one.start
        start, end, long = (_number(timeline, time) for time in times)
        rows.append([str(rank), f"{start}..{end}", long, _why(timeline, one)])
    if len(rows) > 1:
        yield Piece("\nthe longest waits\n")
        yield Table(rows, "><><", header=True)


def _named(columns: Columns, place: int) -> str:
    """The token of the entry whose first action is at a place."""
    actions = [str(columns.action(part)) for part in range(place, int(columns.last[place]) + 1)]
    return actions[0] if len(actions) == 1 else f"({';'.join(actions)})"


def _why(timeline: Timeline, idle: Idle) -> str:
    """The reason of a stretch of idle time, in words."""
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
            if columns.is_kind(*COPIES)[idle.blamed]:
                return f"{said}, with which its copy engine is busy"
            if timeline.posting is not None:
                return f"{word}: {entry}waits behind {placed(idle.blamed)} on the same queue"
            said += ", with which its channel is busy"
    return said


def _path(timeline: Timeline) -> Iterator[Block]:
    """What the makespan consists of, by kind and by stage."""
    makespan, columns, takes = timeline.makespan, timeline.schedule.columns, path_times(timeline)
    if not makespan:
        return
    places, of = np.array(timeline.critical_path), partial(_of, timeline, whole=makespan)
    by_kind = {what: takes[columns.is_kind(*kinds)[places]].sum() for what, kinds in _PARTS.items()}
    by_kind["between entries"] = makespan - takes.sum()
    parts = [f"{what} {of(float(time))}" for what, time in by_kind.items() if of(float(time))]
    yield Piece(f"\ncritical path: {', '.join(parts)}\n")
    # The time of the compute of each stage on a rank, and of the transfers that follow it.
    stages: dict[tuple[int, int], list[float]] = {}
    computes, receives = (columns.is_kind(*kinds) for kinds in (COMPUTE, RECEIVES))
    own = [0.0, 0.0]
    for place, time in zip(places.tolist(), takes.tolist(), strict=True):
        if computes[place]:
            key = int(columns.stage[place]), int(columns.rank[place])
            own = stages.setdefault(key, [0.0, 0.0])
            own[0] += time
        elif receives[place]:
            own[1] += time
    rows = [["stage", "rank", _in_unit("compute", timeline), "transfers from it"]]
    longest = sorted((each for each in stages.items() if any(each[1])), key=lambda e: -e[1][0])
    for (stage, rank), times in sorted(longest[:_MOST_STAGES]):
        rows.append([str(stage), str(rank), *map(of, times)])
    rest = [times for _, times in longest[_MOST_STAGES:]]
    if rest:
        rows.append(
            [f"{len(rest)} others", "", *(of(sum(each)) for each in zip(*rest, strict=True))]
        )
    if len(rows) > 1:
        yield Table(rows, ">>>>", header=True)
