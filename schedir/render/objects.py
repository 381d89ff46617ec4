"""What schedir's objects show of themselves: a row for each class of `schedir.display`.

repr        <Schedule 1f1b: 4 ranks, 4 stages, 8 microbatches, 68 actions>
str         what the command prints into a pipe
notebook    the picture where there is one, else that text and its tables as HTML
rich        the text as it is on a terminal
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from html import escape
from importlib import import_module
from itertools import groupby
from typing import Any

import attrs
from rich.console import Console, ConsoleOptions, RenderableType
from rich.style import Style

from schedir.checker import CHANNELS, Report, prove
from schedir.errors import ExecutionError, SchedirError
from schedir.finder import Comparison, Found
from schedir.ir import Schedule, dumps
from schedir.render.captions import caption, title, with_unit
from schedir.render.outputs import outputs_of
from schedir.render.pages import Page, Picture
from schedir.render.tables import found_text, records
from schedir.render.terminal import page_for, write
from schedir.render.text import Block, Piece, Table, count, number, plain, rich_of
from schedir.simulator import Band, Timeline, simulate


@attrs.frozen
class View:
    """What is shown of a class: the `line` between the brackets of its `repr`, and its `blocks` on
    a page. `drawn` is the timeline whose picture a notebook shows, None where there is none."""

    blocks: Callable[[Any, Page], Iterable[Block]]
    line: Callable[[Any], str] = str
    drawn: Callable[[Any], Timeline | None] = lambda value: None


def _simulated(schedule: Schedule) -> Timeline | None:
    """Its run at the textbook's costs, as `schedir show` draws it; None where it has errors."""
    try:
        return simulate(prove(schedule, CHANNELS[-1]).proved())
    except SchedirError:
        return None


def _schedule(schedule: Schedule, page: Page) -> Iterable[Block]:
    timeline = _simulated(schedule)
    return [Piece(dumps(schedule))] if timeline is None else _timeline(timeline, page)


def _shape(schedule: Schedule) -> str:
    return f"{title(schedule)}, {count(len(schedule.columns), 'action')}"


def _timeline(timeline: Timeline, page: Page) -> Iterable[Block]:
    whole = not page.screen or page.fit
    return outputs_of("show")["full" if whole else "overview"].write(timeline, page).blocks


def _time(timeline: Timeline) -> str:
    took = with_unit(timeline.makespan, timeline.unit)
    return f"{title(timeline.schedule)}; {caption(timeline)}, makespan {took}"


def _report(report: Report, page: Page) -> Iterable[Block]:
    subject = "the schedule" if report.schedule is None else report.schedule.name
    page = attrs.evolve(page, subject=subject)
    return outputs_of("check")["full"].write(report, page).blocks


def _findings(report: Report) -> str:
    several = [each.severity for each in report.diagnostics for _ in range(1 + each.more)]
    found = [count(several.count(s), s) for s in dict.fromkeys(several)]
    return f"{', '.join(found) or 'nothing is wrong'}, under {report.channel}"


def _comparison(comparison: Comparison, page: Page) -> Iterable[Block]:
    return outputs_of("compare")["table"].write(comparison, page).blocks


def _best(comparison: Comparison) -> str:
    best = comparison.best
    chosen = "none can be chosen" if best is None else f"{best.target} is the best"
    return f"{count(len(comparison.rows), 'schedule')}, {chosen}"


def _found(found: Found, page: Page) -> Iterable[Block]:
    return [Piece(f"{found_text(found)}\n")]


def _distance(found: Found) -> str:
    took = with_unit(found.value, found.timeline.unit)
    return f"{found.schedule.name}: {found.objective} {took}, {found.distance:.1%} above the bound"


def _band(band: Band) -> str:
    low, high = (number(float(f"{band.quantile(q):.4g}")) for q in (0.05, 0.95))
    runs = count(len(band.makespans), "run")
    median = number(float(f"{band.median:.4g}"))
    return f"makespan {median} (median of {runs}), {low} to {high} in nine of ten"


def _band_blocks(band: Band, page: Page) -> Iterable[Block]:
    derived = f"no run has shown {', '.join(band.unmeasured)}\n" if band.unmeasured else ""
    return [Piece(f"{_band(band)}\n{derived}")]


def _result(result: Any, page: Page) -> Iterable[Block]:
    """What a step has come to, the loss included, which is waited for."""
    said = []
    try:
        said.append(f"loss {result.loss:.6g} over {count(result.samples, 'sample')}")
    except ExecutionError as error:
        said.append(str(error))
    if result.grad_norm is not None:
        said.append(f"norm of the gradients {result.grad_norm:.4g}")
    said.append(f"{result.elapsed:.4g} s, of them {result.busy:.4g} s in compute")
    said += [f"stage {stage} skipped its update {turn}" for stage, turn in result.skipped]
    return [Piece(", ".join(said) + "\n")]


VIEWS = {
    "Schedule": View(_schedule, _shape, _simulated),
    "Timeline": View(_timeline, _time, lambda timeline: timeline),
    "Report": View(_report, _findings),
    "Comparison": View(_comparison, _best),
    "Found": View(_found, _distance),
    "Band": View(_band_blocks, _band),
    "StepResult": View(_result),
}
"""By the name of the class: those of the runtime lie above."""


def _view(value: object) -> tuple[str, View]:
    name = next(each.__name__ for each in type(value).__mro__ if each.__name__ in VIEWS)
    return name, VIEWS[name]


def line(value: object) -> str:
    """The object in a line."""
    name, view = _view(value)
    return f"<{name} {view.line(value)}>"


def text(value: object) -> str:
    """The object as its command prints it into a pipe."""
    return plain(_blocks(value, Page())).rstrip("\n")


def _blocks(value: object, page: Page) -> list[Block]:
    """The blocks of an object; of one that makes no sense, why."""
    try:
        return list(_view(value)[1].blocks(value, page))
    except SchedirError as error:
        return [Piece(f"{line(value)}: {error}\n")]


def show(
    value: object, width: int | None = None, start: float = 0, end: float | None = None
) -> None:
    """Print the object as its command does."""
    page = attrs.evolve(page_for(sys.stdout), start=start, end=end)
    if start or end is not None:
        page = attrs.evolve(page, fit=page.width is not None)
    if width is not None:
        page = attrs.evolve(page, width=width, fit=True)
    write(_view(value)[1].blocks(value, page), sys.stdout)


@attrs.frozen
class Renderable:
    """The object for rich, as wide as the console."""

    value: object

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        page = Page(width=options.max_width, height=console.height, screen=True)
        return rich_of(_blocks(self.value, page))


def html(value: object) -> str:
    """The object for a notebook."""
    _, view = _view(value)
    with suppress(SchedirError):  # of what makes no sense the text says why
        if (drawn := view.drawn(value)) is not None:
            return str(exported(drawn, "svg"))
    blocks = _blocks(value, Page())
    return "".join("".join(_as_html(group)) for _, group in groupby(blocks, type))


def _as_html(blocks: Iterable[Block]) -> Iterator[str]:
    """Blocks of one class."""
    text = ""
    for block in blocks:
        if isinstance(block, Table):
            yield _table(block)
            continue
        style = Style.parse(block.style).get_html_style() if isinstance(block, Piece) else ""
        said = escape(plain([block]))
        text += f'<span style="{style}">{said}</span>' if style else said
    yield f"<pre>{text}</pre>" if text else ""


def _table(table: Table) -> str:
    ways = ["right" if way == ">" else "left" for way in table.align.ljust(len(table.rows[0]))]
    rows = []
    for turn, row in enumerate(table.rows):
        cell = "td" if turn or not table.header else "th"
        cells = (
            f'<{cell} style="text-align: {way}">{escape(each)}</{cell}>'
            for way, each in zip(ways, row, strict=True)
        )
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return f"<table>\n{''.join(rows)}</table>\n"


def exported(
    timeline: Timeline,
    form: str,
    against: Timeline | None = None,
    memory: bool = False,
    start: float = 0,
    end: float | None = None,
    **looks: Any,
) -> str | bytes:
    """A timeline as `schedir export --format` writes it."""
    page = Page(against=against, memory=memory, start=start, end=end, picture=Picture(**looks))
    written = outputs_of("export")[form].write(timeline, page)
    return plain(written.blocks) if written.data is None else written.data


def compared(comparison: Comparison, form: str) -> str:
    """A comparison as `schedir compare --format` writes it."""
    forms = outputs_of("compare")
    if form not in forms:
        raise ValueError(f"form must be {', '.join(forms)}, not {form!r}")
    return plain(forms[form].write(comparison, Page()).blocks)


def frame(comparison: Comparison) -> Any:
    """A comparison as a DataFrame."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise SchedirError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame(records(comparison))
