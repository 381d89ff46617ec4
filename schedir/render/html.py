"""A timeline as one HTML page that fetches nothing.

The file holds the table of `lanes`, and the hand-written script and style of `page/`. Data go one
way, from the table to columns of numbers to the page, and nothing is computed twice: the script
only draws and looks up. The browser fills the pixels, so the size of the file is that of its
timeline.

A column is an array of integers, each written as its difference from the one before. All columns
are deflated together. Times are whole ticks. A tick is a unit of time if all times are whole, else
the finest power of ten of which the longest timeline has at most ten million, or a coarser one that
loses nothing.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, GROUPS, KINDS, RECEIVES, VALUES, Ints, Kind, Schedule
from schedir.render import palette
from schedir.render.captions import UNIT_NAMES, captions, costs, named_costs, readable, title
from schedir.render.lanes import SHADES, has_copies, has_replicas, labels_say_stages, lanes_of
from schedir.render.memory import Curve, Kept, kept_by, most_of
from schedir.render.palette import CAUSE_WORDS, picture_fill, swatches
from schedir.render.text import size
from schedir.simulator import CAUSES, Timeline
from schedir.simulator.values import Numbers

SCRIPTS = ("data", "words", "view", "draw", "page")
"""The parts of the script in `page/`, in the order of the page."""
MOST_SCRIPT = 21_000
"""The most bytes of script that a page may have."""
MOST_TICKS = 10**7
"""The most ticks of a timeline whose times are not whole. More would be finer than clocks, and make
the file larger."""
_LARGEST = 2**31 - 1  # signed integer of 32 bits
_NOTHING = 1e-290  # shorter times have no ticks

_TOGGLES = {
    "transfers": "transfers",
    "dependencies": "dependencies",
    "critical": "critical path",
    "causes": "why idle",
    "memory": "memory",
    "paired": "rank by rank",
}
_INKS = {
    "ink": palette.INK,
    "faint": palette.FAINT_INK,
    "paper": palette.PAPER,
    "grid": palette.GRID,
    "idle": palette.IDLE_FILL,
    "critical": palette.CRITICAL_LINE,
    "memory": palette.MEMORY_LINE,
    "memoryFill": palette.MEMORY_FILL,
}
"""The colours of the page beside those of actions, for its style and its script."""
_TRANSFERS = ({Kind.SEND_ACT} | GROUPS, {Kind.SEND_GRAD}, {Kind.RECV_ACT}, {Kind.RECV_GRAD})
"""The tracks of a rank below that of its compute, and of its copies if there are any."""
_PAYLOAD_OF = {
    Kind.SEND_ACT: Kind.FORWARD,
    Kind.RECV_ACT: Kind.FORWARD,
    Kind.SEND_GRAD: Kind.BACKWARD,
    Kind.RECV_GRAD: Kind.BACKWARD,
}
"""A transfer has the colour of the action that makes its payload."""


def html_page(timeline: Timeline, against: Timeline | None = None, *, memory: bool = False) -> str:
    """The timeline as a page, on one time axis with the timeline `against`, if there is one.

    A simulated timeline stands above a measured one. `memory` opens the page with memory curves.
    Raises UnsoundError if the lists are too wrong to tell what waits for what.
    """
    lines = sorted(readable(timeline, against), key=lambda line: line.measured is not None)
    labels = captions(lines)
    shown = _shown_at_first(lines, memory)
    schedules = [line.schedule for line in lines]
    says = map(named_costs, lines, labels)
    data = json.dumps(_page_data(lines, labels, shown), ensure_ascii=False, separators=(",", ":"))
    return _TEMPLATE.format(
        title=html.escape("; ".join(dict.fromkeys(map(title, schedules)))),
        style=_style(),
        says="".join(f"<p>{html.escape(own)}</p>" for own in says),
        legend="".join(_swatch(*each) for each in swatches(schedules)),
        causes="".join(_causes(lines)),
        toggles="".join(
            f'<label><input type="checkbox" data-shows="{key}">{words}</label>'
            for key, words in _TOGGLES.items()
            if key in shown
        ),
        ranks=sum(schedule.ranks for schedule in schedules),
        # No text in a name may end the element.
        data=data.replace("<", "\\u003c"),
        script=script(),
    )


# Keeps strings (a template must not hold another one). Leaves out comments, and white space that
# neither separates two words nor ends a line without a sign.
_PIECE = re.compile(
    r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)"""
    r"""|\s*//[^\n]*|(?<=[;{,])\s*\n\s*|\s*(\n)\s*|(?<=[\w$])([ ])[ ]*(?=[\w$])|[ ]+"""
)


def script() -> str:
    """The script of `page/`, without comments and unnecessary white space."""
    text = "".join(_file(f"{name}.js") for name in SCRIPTS)
    return _PIECE.sub(lambda found: found[1] or found[2] or found[3] or "", text).strip()


def _file(name: str) -> str:
    return (files("schedir.render") / "page" / name).read_text(encoding="utf-8")


def _causes(timelines: Sequence[Timeline]) -> Iterator[str]:
    """A swatch and a word for each cause of idle time that occurs."""
    occurring = {cause for line in timelines for cause in line.idle_columns.cause.tolist()}
    for cause in (CAUSES[number] for number in sorted(occurring)):
        yield _swatch([palette.CAUSE_FILLS[cause]], CAUSE_WORDS[cause])


def _swatch(fills: Sequence[str], word: str) -> str:
    colours = "".join(f'<b style="background:{fill}"></b>' for fill in fills)
    return f"<li><i>{colours}</i>{html.escape(word)}</li>"


def _style() -> str:
    named = "".join(f"--{name}:{colour};" for name, colour in _INKS.items())
    return f":root{{{named}}}\n{_file('page.css')}"


def _shown_at_first(lines: Sequence[Timeline], memory: bool) -> dict[str, bool]:
    """The check boxes of a page, and whether each is ticked when the page opens."""
    shown = {"dependencies": True, "critical": False, "causes": False, "memory": memory}
    moving = [(line.ends - line.starts)[~line.schedule.columns.is_kind(*COMPUTE)] for line in lines]
    if any(map(len, moving)):
        # Transfers that take no time are only marks.
        shown["transfers"] = any((durations > 0).any().item() for durations in moving)
    if len(lines) > 1:
        shown["paired"] = False
    return shown


def _page_data(
    lines: Sequence[Timeline], labels: Sequence[str], shown: Mapping[str, bool]
) -> dict[str, Any]:
    """The data for the script, to be written as JSON."""
    tick, kept, timelines, deflated = tick_for(lines), kept_by(lines), [], zlib.compressobj(9)
    tracks, written = tracks_of(lines), b""
    fills = [_fill(kind, shade) for kind in KINDS for shade in range(SHADES)]
    for line, label, curves in zip(lines, labels, kept.curves, strict=True):
        about, columns = _about(line, curves, tracks, tick)
        several = labels_say_stages(lines)
        about |= {"label": label, "says": costs(line), "several": several, "columns": []}
        for name, column in columns.items():
            wide = name == "keptAmount"  # bytes
            whole = np.rint(column).astype(np.float64 if wide else np.int32)
            written += deflated.compress(np.diff(whole, prepend=whole.dtype.type(0)).tobytes())
            about["columns"].append([name, "Float64Array" if wide else "Int32Array", len(whole)])
        timelines.append(about)
    return {
        "tick": tick,
        "unit": UNIT_NAMES[lines[0].unit],
        "longest": max(tick, *(line.makespan for line in lines)),
        "alike": len({line.schedule.columns for line in lines}) == 1,
        "tracks": len(tracks),
        "kinds": [{"token": k.value, "letter": k.letter, "word": k.meaning.word} for k in KINDS],
        "shades": SHADES,
        "inks": [fill.ink for fill in fills],
        "pixels": {
            "areas": [_pixel(fill.area) for fill in fills],
            "pale": [_pixel(fill.area, 0.25) for fill in fills],
            "causes": [_pixel(palette.CAUSE_FILLS[cause]) for cause in CAUSES],
            "idle": _pixel(palette.IDLE_FILL),
        },
        "causes": [CAUSE_WORDS[cause] for cause in CAUSES],
        "ink": _INKS,
        "kept": _amounts(kept),
        "shown": shown,
        "timelines": timelines,
        "columns": base64.b64encode(written + deflated.flush()).decode("ascii"),
    }


def tracks_of(lines: Iterable[Timeline]) -> list[Iterable[Kind]]:
    """The tracks of every rank in the page's table of lanes."""
    copies = [COPIES] if any(has_copies(line.schedule) for line in lines) else []
    return [COMPUTE, *copies, *_TRANSFERS]


def _fill(kind: Kind, shade: int) -> palette.Fill:
    if kind is Kind.OPTIM_STEP:
        return palette.Fill(palette.STEP_FILL, palette.PAPER)
    return picture_fill(_PAYLOAD_OF.get(kind, kind), shade)


def _pixel(colour: str, strength: float = 1) -> int:
    """The four bytes of a pixel as they lie in memory: red, green, blue, opaque; paler if it has
    less than its full `strength` on paper."""
    mixed = [round(255 + strength * (part - 255)) for part in bytes.fromhex(colour[1:])]
    return int.from_bytes([*mixed, 255], "little")


def _amounts(kept: Kept) -> dict[str, Any]:
    """The unit in which the page tells what is kept, and the most, in bytes or activations."""
    most = max(1.0, kept.most)
    word = size(most).split()[1] if kept.sized else "alive"
    return {"word": word, "size": 1024 ** "BKMGTP".find(word[0]) if kept.sized else 1, "most": most}


def _about(
    line: Timeline, curves: Sequence[Curve], tracks: Sequence[Iterable[Kind]], tick: float
) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """What a page says of a timeline, and its columns: the table of lanes, whose rows the others
    refer to, the idle times, the critical path, and the memory curves."""
    schedule, columns, lanes = line.schedule, line.schedule.columns, lanes_of(line, tracks)
    place, idle, sources = lanes.place, line.idle_columns, line.schedule.sources
    row_of = np.full(len(columns) + 1, -1)  # and -1 of -1
    row_of[place] = np.arange(len(place))
    edges = np.round(np.stack([lanes.top, lanes.top + lanes.height], axis=1), 6)
    boxes, box = np.unique(edges, axis=0, return_inverse=True)
    times, amounts = (np.concatenate(each) for each in zip(*curves, strict=True))
    start, before = np.rint(lanes.start / tick), data_before(schedule)
    path = np.array(line.critical_path, np.int64)
    critical = np.zeros(len(columns), np.bool_)
    critical[path] = True
    # The path has a transfer at its receive.
    received = path[columns.is_kind(*RECEIVES)[path] & (before[path] >= 0)]
    critical[before[received]] = True
    path, ranks = row_of[path], range(schedule.ranks)
    return {
        "stages": [schedule.stages_of(rank) for rank in ranks],
        "replicas": has_replicas(schedule),
        "makespan": line.makespan,
        "boxes": boxes.tolist(),
        "sources": [str(each) for each in sources.lines] if sources else [],
        "most": [most_of(curve) for curve in curves],
    }, {
        "start": start,
        "length": np.rint(lanes.end / tick) - start,
        "lane": lanes.lane,
        "box": box.ravel(),
        "colour": lanes.colour,
        "stage": columns.stage[place],
        "microbatch": columns.microbatch[place],
        "version": columns.version[place],
        "index": (columns.entry - columns.entry[columns.starts[columns.rank]])[place],
        "before": row_of[before[place]],
        "source": sources.line_of[place] if sources else np.full(len(place), -1),
        "idleRank": np.repeat(ranks, np.diff(idle.bounds)),
        "idleStart": idle.start / tick,
        "idleEnd": idle.end / tick,
        "idleTransfer": row_of[idle.transfer],
        "idleBlamed": row_of[idle.blamed],
        "idleCause": idle.cause,
        "path": path[path >= 0],
        "critical": critical[place],
        "keptRank": np.repeat(ranks, [len(times) for times, _ in curves]),
        "keptStart": times / tick,
        "keptAmount": amounts,
    }


def tick_for(timelines: Sequence[Timeline]) -> float:
    """The size of a tick that suits all timelines."""
    times = np.concatenate([times for line in timelines for times in (line.starts, line.ends)])
    times = times[~np.isnan(times)].astype(np.float64)
    longest = float(times.max(initial=0))
    if longest < _NOTHING or (longest <= _LARGEST and (times == np.rint(times)).all()):
        return 1
    exponent = math.ceil(math.log10(longest / MOST_TICKS))
    if longest / 10.0**exponent > MOST_TICKS:
        exponent += 1  # log10 was a hair too low
    # Floats are inexact: 0.1 + 0.2 counts as 0.3.
    while np.allclose(
        times / 10.0 ** (exponent + 1),
        np.rint(times / 10.0 ** (exponent + 1)),
        rtol=0,
        atol=max(1e-15 * longest / 10.0 ** (exponent + 1), 1e-15),
    ):
        exponent += 1
    return 10.0**exponent


def data_before(schedule: Schedule) -> Ints:
    """The place that hands its data over to each place: the receive for its consumer, the send for
    a receive, the maker of the payload for a send; -1 if only the list's order matters."""
    columns, flow = schedule.columns, graph_of(schedule)
    before, transfers = np.full(len(columns), -1), flow.transfers
    for users, makers in (
        (transfers.user, transfers.receive),
        (transfers.receive, transfers.send),
        (transfers.send, transfers.maker),
    ):
        there = (users >= 0) & (makers >= 0)
        before[users[there]] = makers[there]
    # What is left takes what it ends, or else what it reads, from the first that makes it.
    touches = [*flow.touches(*(name for name, v in VALUES.items() if v.per == "microbatch"))]
    maker = np.full(flow.base[""], -1)
    for does in ("make", "end", "read"):
        for touch in touches:
            of, at = (maker, touch.values) if does == "make" else (before, touch.places)
            if touch.use.does == does:
                new = of[at] < 0
                of[at[new]] = (touch.places if does == "make" else maker[touch.values])[new]
    return before


# The policy forbids the page to fetch anything, whatever text it holds.
_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1>{says}</header>
<form onsubmit="return false">
<ul aria-label="Colours">{legend}</ul>
<span class="space"></span>
{toggles}
<span><button type="button" id="s" aria-label="Zoom out">−</button>
<button type="button" id="w" aria-label="Zoom in">+</button>
<button type="button" id="f">fit</button></span>
</form>
<ul id="causes" aria-label="Colours of idle time" hidden><li>idle:</li>{causes}</ul>
<main>
<canvas id="lanes" tabindex="0" role="img" aria-label="{title}: a lane for each of {ranks} ranks, \
time to the right"></canvas>
<canvas id="marks" aria-hidden="true"></canvas>
<div id="box" role="status" hidden></div>
</main>
<footer><kbd>w</kbd> <kbd>s</kbd> or wheel: zoom · <kbd>a</kbd> <kbd>d</kbd> or drag: move · \
<kbd>q</kbd> <kbd>e</kbd> lower, higher lanes · <kbd>PgUp</kbd> <kbd>PgDn</kbd> other ranks · \
<kbd>f</kbd> fit · <kbd>←</kbd> <kbd>→</kbd> <kbd>↑</kbd> <kbd>↓</kbd> from action to action · \
<kbd>Esc</kbd> let go</footer>
<noscript><p>The timeline is drawn by a script that this page holds.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>
"use strict";
{script}
</script>
</body>
</html>
"""
