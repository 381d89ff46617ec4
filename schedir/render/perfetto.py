"""Chrome's trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process, with a thread for each of its tracks and for why it is idle, an arrow from each
send to its receive, and counters of what it holds:

    rank 0   compute      0F0--  0F1--
             to rank 1         0SEND_ACT0-
    rank 1   idle         warmup----------
             compute           │          1F0--
             from rank 0       1RECV_ACT0-
             activations                  1----

The format is Google's Trace Event Format. Its times are microseconds, which readers add as floats:
in eighths of one that is exact, so that no slice seems to reach into the next one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, count, islice

from schedir.render.captions import captions
from schedir.render.styled import Piece
from schedir.render.trace_view import TraceView
from schedir.simulator import Timeline

_EVENTS_AT_ONCE = 4096


def trace_events(timeline: Timeline, against: Timeline | None = None) -> Iterator[Piece]:
    """The trace, piece by piece; what is not known when is left out.

    A second timeline has processes of its own, each beside that of the same rank. A timeline whose
    unit of time may be any is written as if it were seconds.

    Raises SchedirError where a timeline takes longer than the format's times can hold.
    """
    both = [timeline] if against is None else [timeline, against]
    names = [""] if against is None else captions(timeline, against)
    apart = int("1" + "0" * len(str(max(line.schedule.ranks for line in both))))
    views = [
        TraceView.of(line, name, turn, len(both), turn * apart)
        for turn, (line, name) in enumerate(zip(both, names, strict=True))
    ]
    return _pieces(views)


def _pieces(views: list[TraceView]) -> Iterator[Piece]:
    about = {
        view.caption or "timeline": {
            "schedule": view.timeline.schedule.name,
            "unit of time": view.timeline.unit or "any, written as if it were seconds",
        }
        for view in views
    }
    yield Piece(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    # No thread has the number of a process: it would be taken for its main one.
    threads = count(1 + max(view.process(view.timeline.schedule.ranks) for view in views))
    events = chain.from_iterable(view.events(threads) for view in views)
    some = list(islice(events, _EVENTS_AT_ONCE))
    while some:
        following = list(islice(events, _EVENTS_AT_ONCE))
        yield Piece(",\n".join(some) + (",\n" if following else "\n"))
        some = following
    yield Piece("]}\n")
