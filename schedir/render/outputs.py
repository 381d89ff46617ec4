"""The table of outputs: the forms that each command can write, and the function for each.

A renderer is a module with a function, and a row here. A renderer's module is imported when it
writes, so that commands start fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import COMPUTE, Kind, dumps, dumps_torch_csv
from schedir.passes import insert_reductions
from schedir.render.diagnostics import concise, full, github, report_data
from schedir.render.pages import Page, window_of
from schedir.render.text import Block, Piece, as_json, plain

if TYPE_CHECKING:
    from schedir.finder import Comparison
    from schedir.simulator import Timeline


@attrs.frozen
class Written:
    """The output of a writer, text or `data`, and a sentence for each thing that it left out."""

    blocks: Iterable[Block]
    left_out: Iterable[str] = ()
    data: bytes | None = None


@attrs.frozen
class Output:
    """A form in which a command writes a schedule, a timeline, a report or a comparison.

    `name` is the word that the user types, and `about` describes it in a few words. `cannot_hold`
    says what it leaves out, with a warning. `extension` is the extension of its files.
    `communication` says if it has sends and receives; with "either" the user chooses. With `looks`
    it is a picture: drawn from `Page.start` to `Page.end`, with a title, a width and colours.
    `memory` says if a timeline's memory is written only if the user asks for it.
    """

    command: Literal["show", "check", "compare", "export"]
    name: str
    of: Literal["schedule", "timeline", "report", "comparison"]
    about: str
    write: Callable[[Any, Page], Written]
    extension: str = ""
    cannot_hold: str = ""
    communication: Literal["with", "without", "either"] = "either"
    looks: bool = False
    memory: Literal["asked", "always"] = "asked"


def _text(text: str, left_out: Iterable[str] = ()) -> Written:
    return Written([Piece(text)], left_out)


def _readable(timeline: Timeline, page: Page) -> tuple[Timeline, Timeline | None]:
    """A timeline and the one that it is compared with, in a readable unit of time."""
    from schedir.render.captions import readable

    if page.against is None:
        return readable([timeline])[0], None
    first, second = readable([timeline, page.against])
    return first, second


def _overview(timeline: Timeline, page: Page) -> Written:
    from schedir.render.terminal_timeline import overview_blocks

    first, second = _readable(timeline, page)
    return Written(overview_blocks(first, page.width or 80, page.height, second))


def _timeline(timeline: Timeline, page: Page) -> Written:
    from schedir.render.terminal_timeline import timeline_blocks

    first, second = _readable(timeline, page)
    return Written(
        timeline_blocks(first, page.width, second, page.fit, window_of(page, first, second))
    )


def _why(timeline: Timeline, page: Page) -> Written:
    from schedir.render.why import why_blocks

    first, second = _readable(timeline, page)
    return Written(why_blocks(first, page.width, second))


def _steady(timeline: Timeline, page: Page) -> Written:
    from schedir.render.terminal_timeline import steady_blocks

    if page.steady is None or page.full is None:
        raise ValueError("a page has no steady state to draw")
    return Written(steady_blocks(timeline, page.full, page.steady, page.width))


def _timeline_json(timeline: Timeline, page: Page) -> Written:
    from schedir.render.terminal_timeline import timeline_json

    return _text(timeline_json(timeline, page.steady))


def _comparison(comparison: Comparison, page: Page) -> Written:
    from schedir.render.tables import comparison_blocks

    return Written(comparison_blocks(comparison, page.width))


def _comparison_text(form: str) -> Callable[[Comparison, Page], Written]:
    """A writer of a comparison as text of any width, such as `tables.comparison_csv`."""

    def write(comparison: Comparison, page: Page) -> Written:
        from schedir.render import tables

        return _text(getattr(tables, f"comparison_{form}")(comparison))

    return write


def _svg(timeline: Timeline, page: Page) -> Written:
    from schedir.render.svg import svg_blocks

    blocks = svg_blocks(timeline, page)
    return Written(blocks, _left_out(timeline, page, COMPUTE))


_SIDE = re.compile(r'(?<=dth="|ght=")[.0-9]+')


def _converted(form: str, scale: float) -> Callable[[Timeline, Page], Written]:
    """A writer of the SVG picture in another format, with `scale` of its units to a pixel."""

    def write(timeline: Timeline, page: Page) -> Written:
        try:
            convert = getattr(import_module("vl_convert"), f"svg_to_{form}")
        except ImportError:
            raise SchedirError(
                f"{form} needs vl-convert-python: pip install 'schedir[pictures]'"
            ) from None
        written = _svg(timeline, page)
        svg = _SIDE.sub(lambda side: str(float(side[0]) * scale), plain(written.blocks), 2)
        return Written((), written.left_out, convert(svg))

    return write


def _perfetto(timeline: Timeline, page: Page) -> Written:
    from schedir.render.perfetto import trace_events

    pieces = trace_events(timeline, page.against)
    return Written(pieces, _left_out(timeline, page, Kind))


def _html(timeline: Timeline, page: Page) -> Written:
    from schedir.render.html import html_page

    return _text(html_page(timeline, page.against, memory=page.memory))


def _left_out(timeline: Timeline, page: Page, kinds: Iterable[Kind]) -> Iterator[str]:
    """A sentence for each timeline with actions of these kinds whose times are unknown: pictures
    leave them out."""
    for line in filter(None, (timeline, page.against)):
        columns = line.schedule.columns
        asked = columns.is_kind(*kinds)
        without = np.flatnonzero(asked & ~line.known)
        if len(without):
            rank, index = columns.position(int(without[0]))
            yield (
                f"{len(without)} of {asked.sum()} actions are left out because their times are "
                f"unknown: rank {rank} #{index} {columns.action(int(without[0]))}"
                + (" is the first" if len(without) > 1 else "")
            )


_NOT_IN_TORCH = "R, OPTIM_STEP and weight versions"
_NOT_IN_PICTURES = "actions whose times are unknown"

OUTPUTS = (
    Output(
        "show", "overview", "timeline", "the timeline and its figures, on one screen", _overview
    ),
    Output("show", "full", "timeline", "every action of every rank", _timeline),
    Output("show", "json", "timeline", "makespan, bubble and peaks", _timeline_json),
    Output("show", "steady", "timeline", "the timeline with a full pipeline", _steady),
    Output("show", "why", "timeline", "why ranks are idle, and the critical path", _why),
    Output(
        "check",
        "full",
        "report",
        "each finding with its places and how to fix it",
        lambda report, page: Written(full(report, page.subject)),
    ),
    Output(
        "check",
        "concise",
        "report",
        "a line for each finding",
        lambda report, page: Written(concise(report, page.subject)),
    ),
    Output(
        "check",
        "json",
        "report",
        "all findings, for a program",
        lambda report, page: _text(as_json(report_data(report))),
    ),
    Output(
        "check",
        "github",
        "report",
        "annotations for a pull request",
        lambda report, page: _text(github(report, page.subject)),
    ),
    Output(
        "compare",
        "table",
        "comparison",
        "a row for each schedule, the quickest first",
        _comparison,
    ),
    *(
        Output("compare", form, "comparison", about, _comparison_text(form))
        for form, about in (
            ("json", "the same for a program"),
            ("markdown", "the table for a README or an issue"),
            ("latex", "a tabular for a paper"),
            ("csv", "the numbers for a spreadsheet"),
        )
    ),
    Output(
        "export",
        "sched",
        "schedule",
        "schedir's own text",
        lambda schedule, page: _text(dumps(schedule)),
        ".sched",
    ),
    Output(
        "export",
        "torch-csv",
        "schedule",
        "the CSV of torch.distributed.pipelining, compute only",
        lambda schedule, page: _text(*dumps_torch_csv(schedule, compute_only=True)),
        ".csv",
        _NOT_IN_TORCH,
        communication="without",
    ),
    Output(
        "export",
        "torch-csv-comms",
        "schedule",
        "that CSV with its sends, receives and REDUCE_GRADs",
        # Torch divides a stage's gradients by the number of microbatches where it sums them.
        lambda schedule, page: _text(*dumps_torch_csv(insert_reductions(schedule))),
        ".csv",
        "R, OPTIM_STEP, weight versions and batches",
        communication="with",
    ),
    *(
        Output("export", form, "timeline", about, write, f".{form}", _NOT_IN_PICTURES, looks=True)
        for form, about, write in (
            ("svg", "a picture, for papers and READMEs", _svg),
            ("png", "that picture in pixels", _converted("png", 2)),
            ("pdf", "that picture as a page", _converted("pdf", 0.75)),
        )
    ),
    Output(
        "export",
        "perfetto",
        "timeline",
        "a trace for ui.perfetto.dev and chrome://tracing",
        _perfetto,
        ".json",
        _NOT_IN_PICTURES,
        memory="always",
    ),
    Output(
        "export",
        "html",
        "timeline",
        "a page to zoom and click in, in one file that needs no network",
        _html,
        ".html",
    ),
)


def outputs_of(command: str) -> dict[str, Output]:
    """The outputs of a command by name, the default one first."""
    return {output.name: output for output in OUTPUTS if output.command == command}


def described(command: str) -> str:
    """The outputs of a command, for its help."""
    return "; ".join(
        f"{output.name}: {output.about}"
        + (f" (cannot hold {output.cannot_hold})" if output.cannot_hold else "")
        for output in outputs_of(command).values()
    )
