"""What a page's script has to know of timelines: their numbers in columns, the rest as JSON.

Data go one way, from the timeline to columns (`packed`) to the page, and nothing is worked out
twice: the script draws, and looks up what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from schedir.ir import COMPUTE, COPIES, KINDS, Kind
from schedir.render import palette
from schedir.render.captions import bubble, captions
from schedir.render.clock import readable, with_unit
from schedir.render.kept import Curve, kept_by, most_of
from schedir.render.lanes import has_copies, has_replicas, labels_of
from schedir.render.packed import Stream, Ticks, put_curve, put_idle, put_timeline, ticks_for
from schedir.render.palette import CAUSE_WORDS, picture_fill
from schedir.simulator import CAUSES, Timeline

_LANES = (Kind.SEND_ACT, Kind.SEND_GRAD, Kind.RECV_ACT, Kind.RECV_GRAD)
"""The lanes of a rank below that of its compute: these can go on at once. Copies, where there are
any, have one more, above them."""
_PAYLOAD_OF = {
    Kind.SEND_ACT: Kind.FORWARD,
    Kind.RECV_ACT: Kind.FORWARD,
    Kind.SEND_GRAD: Kind.BACKWARD,
    Kind.RECV_GRAD: Kind.BACKWARD,
}
"""A transfer has the colour of what makes its payload."""
_NO_COMPUTE = tuple(kind for kind in KINDS if kind not in COMPUTE)


@attrs.frozen
class Part:
    """One of the timelines of a page, in the page's unit of time, and what it is called."""

    timeline: Timeline
    label: str

    @property
    def says(self) -> str:
        """What it costs, in a few words."""
        makespan = with_unit(self.timeline.makespan, self.timeline.unit)
        return f"makespan {makespan}, bubble {bubble(self.timeline)}"


def parts_of(timeline: Timeline, against: Timeline | None) -> list[Part]:
    """The timelines from the top of the page: what was simulated before what was measured."""
    lines = [timeline] if against is None else [timeline, against]
    lines.sort(key=lambda line: line.measured is not None)
    labels = captions(lines[0], lines[1] if len(lines) > 1 else None)
    return [Part(line, label) for line, label in zip(readable(*lines), labels, strict=True)]


def shown_at_first(parts: Sequence[Part], memory: bool) -> dict[str, bool]:
    """What there is to be ticked on a page, and whether it is when the page opens."""
    lines = [part.timeline for part in parts]
    shown = {"dependencies": True, "critical": False, "causes": False, "memory": memory}
    if any(line.schedule.columns.is_kind(*_NO_COMPUTE).any() for line in lines):
        # Transfers that take no time are but marks.
        shown["transfers"] = any(_lasting(line) for line in lines)
    if len(parts) > 1:
        shown["paired"] = False
    return shown


def _lasting(timeline: Timeline) -> bool:
    durations = timeline.ends - timeline.starts
    return bool((durations[timeline.schedule.columns.is_kind(*_NO_COMPUTE)] > 0).any())


def page_data(parts: Sequence[Part], shown: Mapping[str, bool]) -> dict[str, Any]:
    """All that the script needs, for JSON."""
    lines = [part.timeline for part in parts]
    ticks = ticks_for(lines)
    stream, copies = Stream(), any(has_copies(line.schedule) for line in lines)
    several = labels_of(lines).several
    kept = kept_by(lines)
    timelines = [
        _put(stream, part, ticks, several, curves)
        for part, curves in zip(parts, kept.curves, strict=True)
    ]
    return {
        "tick": ticks.size,
        "unit": lines[0].unit,
        "longest": max(1, *(line["ticks"] for line in timelines)),
        "alike": len({line.schedule.columns for line in lines}) == 1,
        "lanes": list(range(1 + copies + len(_LANES))),
        "kinds": [_kind(kind, copies) for kind in KINDS],
        "pair": tuple(palette.PAIR_FILL),
        "causes": [
            {"word": CAUSE_WORDS[cause], "fill": palette.CAUSE_FILLS[cause]} for cause in CAUSES
        ],
        "ink": {
            "paper": palette.PAPER,
            "ink": palette.INK,
            "faint": palette.FAINT_INK,
            "idle": palette.IDLE_FILL,
            "critical": palette.CRITICAL_LINE,
            "memory": palette.MEMORY_LINE,
            "memoryFill": palette.MEMORY_FILL,
        },
        "kept": {"bytes": kept.sized, "most": max(1.0, kept.most)},
        "shown": shown,
        "timelines": timelines,
        "columns": stream.text(),
    }


def _kind(kind: Kind, copies: bool) -> dict[str, Any]:
    fills = [picture_fill(_PAYLOAD_OF.get(kind, kind), chunk) for chunk in range(4)]
    below = _LANES.index(kind) if kind in _LANES else 0
    if kind is Kind.OPTIM_STEP:
        fills = [palette.Fill(palette.STEP_FILL, palette.PAPER)] * 4
    return {
        "token": kind.value,
        "word": kind.meaning.word,
        "lane": 0 if kind in COMPUTE else 1 + (kind not in COPIES and copies + below),
        "fills": [tuple(fill) for fill in fills],
    }


def _put(
    stream: Stream, part: Part, ticks: Ticks, several: bool, curves: Sequence[Curve]
) -> dict[str, Any]:
    """Write a timeline's columns to the stream; what the script reads them by."""
    timeline, schedule = part.timeline, part.timeline.schedule
    put_timeline(stream, timeline, ticks)
    put_idle(stream, timeline.idle_columns, ticks)
    path = np.array(timeline.critical_path, np.int64)
    stream.put(np.diff(path, prepend=0))
    for times, amounts in curves:
        put_curve(stream, times, amounts, ticks)
    sources = schedule.sources
    return {
        "label": part.label,
        "says": part.says,
        "starts": schedule.columns.starts.tolist(),
        "stages": [schedule.stages_of(rank) for rank in range(schedule.ranks)],
        "several": several,
        "replicas": has_replicas(schedule),
        "ticks": int(ticks.of(np.array(timeline.makespan))),
        "sources": [str(line) for line in sources.lines] if sources else [],
        "idle": timeline.idle_columns.bounds.tolist(),
        "path": len(path),
        "memory": {
            "lengths": [len(times) for times, _ in curves],
            "most": [most_of(curve) for curve in curves],
        },
    }
