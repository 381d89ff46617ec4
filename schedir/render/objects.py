"""How schedir's objects show themselves: a row for each class of `schedir.display`.

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

from schedir.checker import CHANNELS, Report, prove
from schedir.display import rounded
from schedir.errors import ExecutionError, SchedirError
from schedir.finder import Comparison
from schedir.ir import Schedule, dumps, printable
from schedir.render.captions import caption, makespan, title, with_unit
from schedir.render.diagnostics import full, summary
from schedir.render.outputs import outputs_of
from schedir.render.pages import Page
from schedir.render.tables import comparison_blocks, found_text, records
from schedir.render.terminal import page_for, write
from schedir.render.text import Block, Piece, Table, count, plain, rich_of
from schedir.simulator import Band, Timeline, simulate


@attrs.frozen
class View:
    """How a class is shown: the `line` between the brackets of its `repr`, and its `blocks` on a
    page. `drawn` is the timeline whose picture a notebook shows, or None."""

    line: Callable[[Any], str]
    blocks: Callable[[Any, Page], Iterable[Block]]
    drawn: Callable[[Any], Timeline | None] = lambda value: None


def _simulated(schedule: Schedule) -> Timeline:
    """The schedule's timeline at the default costs, as in `schedir show`. Raises SchedirError."""
    return simulate(prove(schedule, CHANNELS[-1]).proved())


def _schedule(schedule: Schedule, page: Page) -> Iterable[Block]:
    try:
        return _timeline(_simulated(schedule), page)
    except SchedirError:
        return [Piece(dumps(schedule))]


def _timeline(timeline: Timeline, page: Page) -> Iterable[Block]:
    whole = page.fit or not page.screen or page.start or page.end is not None
    return outputs_of("show")["full" if whole else "overview"].write(timeline, page).blocks


def _report(report: Report, page: Page) -> Iterable[Block]:
    return full(report, "the schedule" if report.schedule is None else report.schedule.name)


def _comparison(comparison: Comparison) -> str:
    best = comparison.best
    chosen = "none can be chosen" if best is None else f"{printable(best.target)} is the best"
    return f"{count(len(comparison.rows), 'schedule')}, {chosen}"


def _band(band: Band) -> str:
    low, median, high = map(band.quantile, (0.05, 0.5, 0.95))
    runs = count(len(band.makespans), "run")
    least, usual, most = (rounded(value, 5) for value in (low, median, high))
    return f"makespan {usual} (the median of {runs}), {least} to {most} in nine of ten"


def _result(result: Any, page: Page) -> Iterable[Block]:
    """The result of a step with its loss, for which it waits."""
    try:
        loss = f"loss {result.loss:.6g} over {count(result.samples, 'sample')}"
    except ExecutionError as error:
        loss = str(error)
    return [Piece(f"{loss}, {result.elapsed:.4g} s, of them {result.busy:.4g} s in compute")]


VIEWS = {
    "Schedule": View(
        lambda it: f"{title(it)}, {count(len(it.columns), 'action')}", _schedule, _simulated
    ),
    "Timeline": View(
        lambda it: f"{title(it.schedule)}; {caption(it)}, makespan {makespan(it)}",
        _timeline,
        lambda it: it,
    ),
    "Report": View(summary, _report),
    "Comparison": View(_comparison, lambda it, page: comparison_blocks(it, page.width)),
    "Found": View(
        lambda it: (
            f"{it.schedule.name}: {it.objective} {with_unit(it.value, it.timeline.unit)}, "
            f"{it.distance:.2%} above the lower bound"
        ),
        lambda it, page: [Piece(found_text(it))],
    ),
    "Band": View(_band, lambda it, page: [Piece(_band(it))]),
    "StepResult": View(str, _result),
}
"""By the name of the class, because this package must not import the runtime."""


def _view(value: object) -> View:
    return next(VIEWS[each.__name__] for each in type(value).__mro__ if each.__name__ in VIEWS)


def line(value: object) -> str:
    """The object in one line."""
    return f"<{type(value).__name__} {_view(value).line(value)}>"


def text(value: object) -> str:
    """The text that the command prints into a pipe."""
    return plain(_blocks(value, Page())).rstrip("\n")


def _blocks(value: object, page: Page) -> list[Block]:
    """The blocks of an object, or the reason why there are none."""
    try:
        return list(_view(value).blocks(value, page))
    except SchedirError as error:
        return [Piece(f"{line(value)}: {error}")]


def show(value: object, width: int | None, start: float = 0, end: float | None = None) -> None:
    """Print the object as its command does."""
    page = attrs.evolve(page_for(sys.stdout), start=start, end=end)
    if width is not None:
        page = attrs.evolve(page, width=width, fit=True)
    write(_view(value).blocks(value, page), sys.stdout)


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
    with suppress(SchedirError):  # the text says why there is no picture
        if (drawn := _view(value).drawn(value)) is not None:
            return drawn.svg()
    return "".join(
        "".join(map(_table, group)) if kind is Table else f"<pre>{escape(plain(group))}</pre>"
        for kind, group in groupby(_blocks(value, Page()), type)
    )


def _table(table: Any) -> str:
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows)
    return f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"


def exported(
    timeline: Timeline, form: str, width: str | float | None = None, **looks: Any
) -> str | bytes:
    """A timeline as `schedir export --format` writes it."""
    written = outputs_of("export")[form].write(timeline, Page(breadth=width, **looks))
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
