"""A timeline as one HTML page that fetches nothing.

The file holds the timeline's numbers, and the hand-written script and style of `page/`. Data go one
way, from the timeline to columns (`packed`) to the page, and nothing is computed twice: the script
only draws and looks up. The browser fills the pixels, so the size of the file is that of its
timeline.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from schedir.ir import COMPUTE, COPIES, KINDS, Kind, Schedule
from schedir.render import palette
from schedir.render.captions import captions, costs, readable, title
from schedir.render.lanes import has_copies, has_replicas, labels_say_stages
from schedir.render.memory import Curve, kept_by, most_of
from schedir.render.packed import Stream, Ticks, put_curve, put_idle, put_timeline, ticks_for
from schedir.render.palette import CAUSE_WORDS, picture_fill, swatches
from schedir.simulator import CAUSES, Timeline

SCRIPTS = ("data", "words", "view", "layout", "raster", "draw", "hover", "start")
"""The parts of the script in `page/`, in the order of the page."""
MOST_SCRIPT = 30_000
"""The most bytes of script that a page may have."""

_TOGGLES = {
    "transfers": "transfers",
    "dependencies": "dependencies",
    "critical": "critical path",
    "causes": "why idle",
    "memory": "memory",
    "paired": "rank by rank",
}
_HELP = (
    ("w s", "or wheel: zoom"),
    ("a d", "or drag: move"),
    ("q e", "lower, higher lanes"),
    ("PgUp PgDn", "other ranks"),
    ("f", "fit"),
    ("← → ↑ ↓", "from action to action"),
    ("Esc", "let go"),
)
_LANES = (Kind.SEND_ACT, Kind.SEND_GRAD, Kind.RECV_ACT, Kind.RECV_GRAD)
"""The lanes of a rank below the lane of its compute, which run at the same time. Copies, if there
are any, have one more lane above them."""
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
    lines = [timeline] if against is None else [timeline, against]
    lines.sort(key=lambda line: line.measured is not None)
    labels = captions(lines)
    lines = readable(lines)
    shown = _shown_at_first(lines, memory)
    schedules = [line.schedule for line in lines]
    says = [costs(line) for line in lines]
    if len(lines) > 1 or timeline.measured is not None:
        says = [f"{label}: {own}" for label, own in zip(labels, says, strict=True)]
    data = json.dumps(_page_data(lines, labels, shown), ensure_ascii=False, separators=(",", ":"))
    return _TEMPLATE.format(
        title=html.escape("; ".join(dict.fromkeys(map(title, schedules)))),
        style=_style(),
        says="".join(f"<p>{html.escape(own)}</p>" for own in says),
        legend="".join(_legend(schedules)),
        causes="".join(_causes(lines)),
        toggles="".join(
            f'<label><input type="checkbox" data-shows="{key}">{words}</label>'
            for key, words in _TOGGLES.items()
            if key in shown
        ),
        help=" · ".join(f"{_keys(keys)} {html.escape(words)}" for keys, words in _HELP),
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


def _legend(schedules: Sequence[Schedule]) -> Iterator[str]:
    """A swatch and a word for each kind that occurs, with a shade for each stage of a rank."""
    for fills, word in swatches(schedules):
        yield _swatch(fills, word)
    if any(map(_draws_pairs, schedules)):
        yield _swatch([palette.PAIR_FILL.area], "two as one")


def _draws_pairs(schedule: Schedule) -> bool:
    """Whether there are overlapped pairs in one lane."""
    columns = schedule.columns
    pairs = columns.joined & columns.is_kind(*COMPUTE)
    if has_replicas(schedule):
        pairs &= columns.stage == np.roll(columns.stage, 1)
    return bool(pairs.any())


def _causes(timelines: Sequence[Timeline]) -> Iterator[str]:
    """A swatch and a word for each cause of idle time that occurs."""
    occurring = {cause for line in timelines for cause in line.idle_columns.cause.tolist()}
    for cause in (CAUSES[number] for number in sorted(occurring)):
        yield _swatch([palette.CAUSE_FILLS[cause]], CAUSE_WORDS[cause])


def _swatch(fills: Sequence[str], word: str) -> str:
    colours = "".join(f'<b style="background:{fill}"></b>' for fill in fills)
    return f"<li><i>{colours}</i>{html.escape(word)}</li>"


def _keys(keys: str) -> str:
    return " ".join(f"<kbd>{key}</kbd>" for key in keys.split())


def _style() -> str:
    colours = {
        "ink": palette.INK,
        "faint": palette.FAINT_INK,
        "paper": palette.PAPER,
        "grid": palette.GRID,
        "idle": palette.IDLE_FILL,
        "memory": palette.MEMORY_LINE,
    }
    named = "".join(f"--{name}:{colour};" for name, colour in colours.items())
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
    ticks, kept, stream = ticks_for(lines), kept_by(lines), Stream()
    copies, several = any(has_copies(line.schedule) for line in lines), labels_say_stages(lines)
    timelines = [
        {"label": label, "says": costs(line), **_put(stream, line, ticks, several, curves)}
        for line, label, curves in zip(lines, labels, kept.curves, strict=True)
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
    stream: Stream, timeline: Timeline, ticks: Ticks, several: bool, curves: Sequence[Curve]
) -> dict[str, Any]:
    """Write a timeline's columns to the stream; returns what the script needs to read them."""
    schedule = timeline.schedule
    put_timeline(stream, timeline, ticks)
    put_idle(stream, timeline.idle_columns, ticks)
    path = np.array(timeline.critical_path, np.int64)
    stream.put(np.diff(path, prepend=0))
    for curve in curves:
        put_curve(stream, *curve, ticks)
    sources = schedule.sources
    return {
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
<canvas id="over" aria-hidden="true"></canvas>
<div id="box" hidden></div>
<div id="said" role="status"></div>
</main>
<footer>{help}</footer>
<noscript><p>The timeline is drawn by a script that this page holds.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>
"use strict";
{script}
</script>
</body>
</html>
"""
