"""The table of outputs: what each command can write, and how.

A renderer is a module with a function, and a row here. Its module is imported where it writes: a
command starts with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import attrs

from schedir.checker import Report
from schedir.ir import COMPUTE, Kind, Schedule, dumps, dumps_torch_csv
from schedir.passes import insert_reductions
from schedir.render.diagnostics import as_json, concise, full, github
from schedir.render.styled import Block, Piece

if TYPE_CHECKING:
    from schedir.finder import Comparison
    from schedir.simulator import Timeline


@attrs.frozen
class Page:
    """What a writer may want to know beside what it writes.

    `subject` is the schedule's name or file, as the user gave it. `width` and `height` are those
    of the terminal, in columns and lines; `width` is None where nothing is to be folded. With
    `fit` the whole of a drawing is to be as narrow.
    `against` is a second timeline, for the same time axis; `memory` asks for curves of it.
    """

    subject: str = ""
    width: int | None = None
    height: int = 24
    fit: bool = False
    against: Timeline | None = None
    memory: bool = False


@attrs.frozen
class Written:
    """What a writer made, and what it had to leave out: a sentence each."""

    blocks: Iterable[Block]
    left_out: Iterable[str] = ()


@attrs.frozen(kw_only=True)
class Output:
    """A form in which a command writes a schedule, a timeline, a report or a comparison.

    `name` is what the user asks for it by, `about` what it is in a few words. `cannot_hold` says
    what it leaves out, with a warning. `extension` is that of the files that it is written to;
    `communication` whether it has the sends and receives, `either` where the user chooses.
    """

    command: Literal["show", "check", "compare", "export"]
    name: str
    of: Literal["schedule", "timeline", "report", "comparison"]
    about: str
    write: Callable[[Any, Page], Written]
    cannot_hold: str = ""
    extension: str = ""
    communication: Literal["with", "without", "either"] = "either"


def _readable(timeline: Timeline, page: Page) -> tuple[Timeline, Timeline | None]:
    """A timeline and what it stands against, both in the unit that they are read in."""
    from schedir.render.clock import readable

    if page.against is None:
        return readable(timeline)[0], None
    first, second = readable(timeline, page.against)
    return first, second


def _overview(timeline: Timeline, page: Page) -> Written:
    from schedir.render.overview import overview_blocks

    first, second = _readable(timeline, page)
    return Written(overview_blocks(first, page.width or 80, page.height, second))


def _timeline(timeline: Timeline, page: Page) -> Written:
    from schedir.render.timeline import timeline_blocks

    first, second = _readable(timeline, page)
    return Written(timeline_blocks(first, page.width, second, page.fit))


def _why(timeline: Timeline, page: Page) -> Written:
    from schedir.render.why import why_blocks

    first, second = _readable(timeline, page)
    return Written(why_blocks(first, page.width, second))


def _timeline_json(timeline: Timeline, page: Page) -> Written:
    from schedir.render.timeline import timeline_json

    return Written([Piece(timeline_json(timeline))])


def _full(report: Report, page: Page) -> Written:
    return Written(full(report, page.subject))


def _concise(report: Report, page: Page) -> Written:
    return Written(concise(report, page.subject))


def _report_json(report: Report, page: Page) -> Written:
    return Written([Piece(as_json(report))])


def _github(report: Report, page: Page) -> Written:
    return Written([Piece(github(report, page.subject))])


def _comparison(comparison: Comparison, page: Page) -> Written:
    from schedir.render.comparison import comparison_blocks

    return Written(comparison_blocks(comparison, page.width))


def _comparison_json(comparison: Comparison, page: Page) -> Written:
    from schedir.render.comparison import comparison_json

    return Written([Piece(comparison_json(comparison))])


def _sched(schedule: Schedule, page: Page) -> Written:
    return Written([Piece(dumps(schedule))])


def _torch_csv(schedule: Schedule, page: Page) -> Written:
    text, left_out = dumps_torch_csv(schedule, compute_only=True)
    return Written([Piece(text)], left_out)


def _torch_csv_comms(schedule: Schedule, page: Page) -> Written:
    # Torch divides a stage's gradients by the number of microbatches where it sums them.
    text, left_out = dumps_torch_csv(insert_reductions(schedule))
    return Written([Piece(text)], left_out)


def _svg(timeline: Timeline, page: Page) -> Written:
    from schedir.render.svg import svg_blocks
    from schedir.render.unknown import left_out

    blocks = svg_blocks(timeline, page.against, page.memory)
    return Written(blocks, left_out((timeline, page.against), COMPUTE))


def _perfetto(timeline: Timeline, page: Page) -> Written:
    from schedir.render.perfetto import trace_events
    from schedir.render.unknown import left_out

    pieces = trace_events(timeline, page.against)
    return Written(pieces, left_out((timeline, page.against), Kind))


def _html(timeline: Timeline, page: Page) -> Written:
    from schedir.render.html import html_page

    return Written([Piece(html_page(timeline, page.against, memory=page.memory))])


_NOT_IN_TORCH = "R, OPTIM_STEP and weight versions"

OUTPUTS = (
    Output(
        command="show",
        name="overview",
        of="timeline",
        about="what it costs and how it runs, on one screen",
        write=_overview,
    ),
    Output(
        command="show",
        name="full",
        of="timeline",
        about="every action of every rank",
        write=_timeline,
    ),
    Output(
        command="show",
        name="json",
        of="timeline",
        about="makespan, bubble and peaks",
        write=_timeline_json,
    ),
    Output(
        command="show",
        name="why",
        of="timeline",
        about="why ranks are idle, and the critical path",
        write=_why,
    ),
    Output(
        command="check",
        name="full",
        of="report",
        about="each finding with its places and what to do",
        write=_full,
    ),
    Output(
        command="check",
        name="concise",
        of="report",
        about="a line for each finding",
        write=_concise,
    ),
    Output(
        command="check",
        name="json",
        of="report",
        about="all findings, for a program",
        write=_report_json,
    ),
    Output(
        command="check",
        name="github",
        of="report",
        about="annotations for a pull request",
        write=_github,
    ),
    Output(
        command="compare",
        name="table",
        of="comparison",
        about="a row for each schedule, the quickest first",
        write=_comparison,
    ),
    Output(
        command="compare",
        name="json",
        of="comparison",
        about="the same for a program",
        write=_comparison_json,
    ),
    Output(
        command="export",
        name="sched",
        of="schedule",
        about="schedir's own text",
        write=_sched,
        extension=".sched",
    ),
    Output(
        command="export",
        name="torch-csv",
        of="schedule",
        about="the CSV of torch.distributed.pipelining, compute only",
        write=_torch_csv,
        cannot_hold=_NOT_IN_TORCH,
        extension=".csv",
        communication="without",
    ),
    Output(
        command="export",
        name="torch-csv-comms",
        of="schedule",
        about="that CSV with its sends, receives and REDUCE_GRADs",
        write=_torch_csv_comms,
        cannot_hold=f"{_NOT_IN_TORCH}, nor batches as such",
        extension=".csv",
        communication="with",
    ),
    Output(
        command="export",
        name="svg",
        of="timeline",
        about="a picture, for papers and READMEs",
        write=_svg,
        cannot_hold="what is not known when",
        extension=".svg",
    ),
    Output(
        command="export",
        name="perfetto",
        of="timeline",
        about="a trace for ui.perfetto.dev and chrome://tracing",
        write=_perfetto,
        cannot_hold="what is not known when",
        extension=".json",
    ),
    Output(
        command="export",
        name="html",
        of="timeline",
        about="one file to look around in with a browser, which needs no network",
        write=_html,
        extension=".html",
    ),
)


def outputs_of(command: str) -> dict[str, Output]:
    """The outputs of a command by name, the default one first."""
    return {output.name: output for output in OUTPUTS if output.command == command}


def described(command: str) -> str:
    """The outputs of a command in words, for its help."""
    return "; ".join(
        f"{output.name}: {output.about}"
        + (f" (cannot hold {output.cannot_hold})" if output.cannot_hold else "")
        for output in outputs_of(command).values()
    )
