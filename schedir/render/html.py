"""A timeline as one HTML file to look around in: nothing is fetched from anywhere.

The file holds the timeline's numbers (`page_data`), and the script and the style of `page/`, which
are written by hand. Pixels are filled in the browser, so the file is as large as its timeline is.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

import numpy as np

from schedir.ir import COMPUTE, KINDS, Kind, Schedule
from schedir.render import palette
from schedir.render.lanes import has_replicas
from schedir.render.page_data import Part, page_data, parts_of, shown_at_first
from schedir.render.palette import CAUSE_WORDS, WORDS, letter, picture_fill
from schedir.render.timeline import title
from schedir.simulator import CAUSES, Timeline

SCRIPTS = ("data", "words", "view", "layout", "raster", "draw", "hover", "start")
"""The parts of the script in `page/`, in the order in which the page has them."""
MOST_SCRIPT = 30_000
"""The most bytes of script that a page has."""

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


def html_page(timeline: Timeline, against: Timeline | None = None, *, memory: bool = False) -> str:
    """The timeline as a page, on one time axis with the one that it is held `against`.

    What was simulated stands above what was measured. `memory` opens the page with its curves.
    Raises UnsoundError where the lists are too wrong to tell what waits for what.
    """
    parts = parts_of(timeline, against)
    shown = shown_at_first(parts, memory)
    schedules = [part.timeline.schedule for part in parts]
    data = json.dumps(page_data(parts, shown), ensure_ascii=False, separators=(",", ":"))
    return _TEMPLATE.format(
        title=html.escape("; ".join(dict.fromkeys(map(title, schedules)))),
        style=_style(),
        says="".join(f"<p>{html.escape(_says(part, len(parts)))}</p>" for part in parts),
        legend="".join(_legend(schedules)),
        causes="".join(_causes([part.timeline for part in parts])),
        toggles="".join(
            f'<label><input type="checkbox" data-shows="{key}">{words}</label>'
            for key, words in _TOGGLES.items()
            if key in shown
        ),
        help=" · ".join(f"{_keys(keys)} {html.escape(words)}" for keys, words in _HELP),
        ranks=sum(schedule.ranks for schedule in schedules),
        # Nothing that a name holds may end the element.
        data=data.replace("<", "\\u003c"),
        script=script(),
    )


def _says(part: Part, parts: int) -> str:
    named = parts > 1 or part.timeline.measured is not None
    return f"{part.label}: {part.says}" if named else part.says


# Strings are kept as they are (a template must not hold another one), comments are left out, and
# of white space what does not part two words, or two lines that no sign parts.
_PIECE = re.compile(
    r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)"""
    r"""|\s*//[^\n]*|(?<=[;{,])\s*\n\s*|\s*(\n)\s*|(?<=[\w$])([ ])[ ]*(?=[\w$])|[ ]+"""
)


def script() -> str:
    """The script of every page: that of `page/`, without comments and needless white space."""
    text = "".join(_file(f"{name}.js") for name in SCRIPTS)
    return _PIECE.sub(lambda found: found[1] or found[2] or found[3] or "", text).strip()


def _file(name: str) -> str:
    return (files("schedir.render") / "page" / name).read_text(encoding="utf-8")


def _legend(schedules: Sequence[Schedule]) -> Iterator[str]:
    """A swatch and a word for each kind that occurs, a shade for each of a rank's stages."""
    occurring = {kind for s in schedules for kind in s.columns.kind.tolist()}
    chunks = max(len(s.stages_of(rank)) for s in schedules for rank in range(s.ranks))
    for kind in (KINDS[number] for number in sorted(occurring)):
        if kind in WORDS:
            shades = [picture_fill(kind, chunk).area for chunk in range(min(chunks, 4))]
            yield _swatch(shades, f"{letter(kind)} {WORDS[kind]}")
    if any(KINDS[number] is Kind.OPTIM_STEP for number in occurring):
        yield _swatch([palette.STEP_FILL], Kind.OPTIM_STEP.meaning.word)
    if any(_draws_pairs(s) for s in schedules):
        yield _swatch([palette.PAIR_FILL.area], "two as one")


def _draws_pairs(schedule: Schedule) -> bool:
    """Whether there are overlapped pairs in one lane."""
    columns = schedule.columns
    pairs = columns.joined & columns.is_kind(*COMPUTE)
    if has_replicas(schedule):
        pairs &= columns.stage == np.roll(columns.stage, 1)
    return bool(pairs.any())


def _causes(timelines: Sequence[Timeline]) -> Iterator[str]:
    """A swatch and a word for each cause of idle time that there is."""
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


# The policy lets the page fetch nothing, whatever stands in it.
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
