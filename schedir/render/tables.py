"""A comparison of schedules as a table or JSON, and the lines that `search` prints.

schedule                makespan  ratio  bubble  peak activations  delay
interleaved-1f1b  best      28.5  1.000   15.8%          11 × 1/2      0
1f1b                          33  1.158   27.3%                 4      0
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from schedir.display import rounded
from schedir.errors import SchedirError
from schedir.finder import Comparison, Found, Row
from schedir.ir import printable
from schedir.render.captions import UNIT_NAMES, bubble, makespan, steady_figures, unit_for
from schedir.render.text import Block, Piece, Table, as_json, count, fill, plain, size, table
from schedir.simulator import factor, how_derived

_SHAPE = ("target", "ranks", "stages", "microbatches", "chunks", "makespan", "time_per_microbatch")
_FIGURES = (
    *("bubble_fraction", "span_bubble_fraction", "peak_activations", "peak_bytes"),
    *("delay", "fits"),
)
_ENOUGH = 1e-9
_MARKDOWN = str.maketrans({each: f"\\{each}" for each in r"\`*_[]<>&#|~"})
_LATEX = str.maketrans(
    {each: rf"\{each}" for each in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"×": r"$\times$", "µ": r"$\mu$"}
)


class _Column(NamedTuple):
    """A column: its header and cells. A `spare` column is left out first if the table is too
    wide."""

    header: str
    cells: Sequence[str]
    spare: bool = False
    align: str = ">"


def _table(columns: Iterable[_Column]) -> Table:
    """The columns as a table with a header."""
    rows = list(zip(*([column.header, *column.cells] for column in columns), strict=True))
    return Table(rows, "".join(column.align for column in columns), header=True)


def comparison_blocks(comparison: Comparison, width: int | None = None) -> Iterator[Block]:
    """The table, with notes on its figures and on the schedules that can't run.

    If the table is wider than `width`, headers are folded, and columns that follow from others are
    left out.
    """
    columns, notes = list(_columns(comparison)), _notes(comparison)
    whole = _table(columns)
    if width is None or whole.width <= width:
        yield whole
    else:
        left_out = []
        text = _folded(whole)
        for spare in [column for column in reversed(columns) if column.spare]:
            if max(map(len, text.splitlines())) > width:
                columns.remove(spare)
                left_out.append(spare.header)
                text = _folded(_table(columns))
        yield Piece(text)
        if left_out:
            notes.insert(0, f"Left out because the table is too wide: {', '.join(left_out)}.")
    for note in notes:
        yield Piece(f"\n{fill(note, width)}\n")


def _folded(whole: Table) -> str:
    """A table as text, with each word of a header on its own line."""
    header, *rows = whole.rows
    lines = zip_longest(*(reversed(name.split()) for name in header), fillvalue="")
    return table([*reversed(list(lines)), *rows], whole.align)


def comparison_markdown(comparison: Comparison) -> str:
    """The whole table in Markdown, with its notes."""
    whole = _table(list(_columns(comparison)))
    header, *rows = _escaped(whole, _MARKDOWN)
    rule = ["--:" if align == ">" else ":--" for align in whole.align]
    lines = [f"| {' | '.join(row)} |\n" for row in (header, rule, *rows)]
    return "".join([*lines, *(f"\n{note.translate(_MARKDOWN)}\n" for note in _notes(comparison))])


def comparison_latex(comparison: Comparison) -> str:
    """The whole table as a LaTeX tabular that needs no package; notes are comments."""
    whole = _table(list(_columns(comparison)))
    ways = whole.align.replace("<", "l").replace(">", "r")
    header, *lines = [f"{' & '.join(row)} \\\\\n" for row in _escaped(whole, _LATEX)]
    return (
        f"\\begin{{tabular}}{{{ways}}}\n\\hline\n{header}\\hline\n{''.join(lines)}\\hline\n"
        "\\end{tabular}\n" + "".join(f"% {note}\n" for note in _notes(comparison))
    )


def _escaped(whole: Table, escapes: Mapping[int, str]) -> list[list[str]]:
    return [[cell.translate(escapes) for cell in row] for row in whole.rows]


def comparison_csv(comparison: Comparison) -> str:
    """The figures, unrounded, in the columns of `records`."""
    header, *rows = records(comparison)
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows([header, *rows])
    return text.getvalue()


def comparison_json(comparison: Comparison) -> str:
    """The comparison for a program: the keys are a contract."""
    best = comparison.best
    content = {
        "channel": comparison.channel,
        "memory_limit": comparison.memory_limit,
        "unit": comparison.unit,
        "best": None if best is None else comparison.rows.index(best),
        "rows": [_record(comparison, row) for row in comparison.rows],
    }
    return as_json(content)


def _record(comparison: Comparison, row: Row) -> dict[str, Any]:
    """The figures of a schedule."""
    problem = row.problem
    beside = {"edge_makespan": row.edge_makespan} if comparison.beside_edge else {}
    return {
        **{name: getattr(row, name) for name in _SHAPE},
        **beside,
        "ratio": comparison.ratio(row),
        **{name: getattr(row, name) for name in _FIGURES},
        "problem": problem and {"code": problem.code, "message": problem.message},
        "unmeasured": list(row.unmeasured),
        "steady": steady_figures(row.steady),
    }


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """A row without inner ones for each schedule, with the figures of the JSON."""
    several = []
    for row in comparison.rows:
        figures = _record(comparison, row)
        problem, steady = figures["problem"] or {}, figures["steady"] or {}
        message = problem.get("message")
        several.append(
            figures
            | {
                "target": printable(row.target),
                "unit": comparison.unit,
                "unmeasured": " ".join(row.unmeasured),
                "problem": message and printable(message),
                "code": problem.get("code"),
                "steady": steady.get("time_per_microbatch"),
            }
        )
    return several


def frame(comparison: Comparison) -> Any:
    """A comparison as a DataFrame."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise SchedirError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame(records(comparison))


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "text": lambda comparison: plain(comparison_blocks(comparison)),
    "json": comparison_json,
    "markdown": comparison_markdown,
    "latex": comparison_latex,
    "csv": comparison_csv,
}
"""The formats of `schedir compare` by name."""


def comparison_text(comparison: Comparison, form: str) -> str:
    """A comparison in one of `FORMATS`; "table" is the older name of "text". Raises ValueError for
    any other form."""
    write = FORMATS.get("text" if form == "table" else form)
    if write is None:
        raise ValueError(f"form must be {', '.join(FORMATS)}, not {form!r}")
    return write(comparison)


def _columns(comparison: Comparison) -> Iterator[_Column]:
    rows, unit, scale, each = comparison.rows, "", 1.0, comparison.per_microbatch
    if comparison.unit is not None:
        longest = max((row.makespan for row in rows if row.makespan is not None), default=0)
        shown = unit_for(longest * factor(comparison.unit, "s"))
        unit, scale = f" ({UNIT_NAMES[shown]})", factor(comparison.unit, shown)

    def time(value: float) -> str:
        """A number in five digits: a sixth decides nothing."""
        value *= scale
        return f"{value:.0f}" if value == int(value) else rounded(value, 5)

    def cells(value: Callable[[Row], Any], form: Callable[[Any], str] = str) -> list[str]:
        values = map(value, rows)
        return ["" if value is None else form(value) for value in values]

    def once_full(name: str, form: Callable[[Any], str]) -> list[str]:
        """A figure of the steady state; a dash for a schedule without one."""
        without = ("" if row.makespan is None else "-" for row in rows)
        found = cells(lambda row: row.steady and getattr(row.steady, name), form)
        return [figure or dash for figure, dash in zip(found, without, strict=True)]

    yield _Column("schedule", cells(lambda row: printable(row.target)), align="<")
    remarks = cells(lambda row: _remark(comparison, row))
    if any(remarks):
        yield _Column("", remarks, align="<")
    if len({row.ranks for row in rows} - {None}) > 1:
        yield _Column("P", cells(lambda row: row.ranks))
    if each:
        yield _Column("M", cells(lambda row: row.microbatches))
    if len({(row.target, row.chunks) for row in rows}) > len({row.target for row in rows}):
        yield _Column("V", cells(lambda row: row.chunks))
    yield _Column(f"makespan{unit}", cells(lambda row: row.makespan, time), spare=each)
    if comparison.beside_edge:
        yield _Column(f"under edge{unit}", cells(lambda row: row.edge_makespan, time), spare=True)
    full = any(row.steady is not None for row in rows)
    if each or full:
        taken = cells(lambda row: row.time_per_microbatch, time)
        yield _Column(f"makespan/M{unit}", taken, spare=not each)
    yield _Column("ratio", cells(comparison.ratio, "{:.3f}".format))
    percent = "{:.1%}".format
    whole, span = (
        cells(attrgetter(name), percent) for name in ("bubble_fraction", "span_bubble_fraction")
    )
    yield _Column("bubble", whole)
    if whole != span:
        yield _Column("bubble of span", span, spare=True)
    if full:
        yield _Column("bubble once full", once_full("bubble_fraction", percent), spare=True)
        taken = once_full("time_per_microbatch", time)
        yield _Column(f"time/M once full{unit}", taken, spare=True)
    yield _Column("peak activations", cells(_activations), spare=True)
    if any(row.peak_bytes is not None for row in rows):
        yield _Column("peak bytes", cells(lambda row: row.peak_bytes, size), spare=True)
    yield _Column("delay", cells(lambda row: row.delay))


def _activations(row: Row) -> str | None:
    peak = row.peak_activations
    return peak if peak is None else f"{peak}" + (f" × {row.share}" if row.share != 1 else "")


def _remark(comparison: Comparison, row: Row) -> str:
    """The mark of a row, such as `best` or `over`."""
    if row is comparison.best:
        return "best, derived" if row.unmeasured else "best"
    if row.problem is not None:
        return row.problem.code or "none"
    if row.fits is False:
        return "over"
    return "derived" if row.unmeasured else ""


def _notes(comparison: Comparison) -> list[str]:
    notes = (_on_figures, _on_derived, _on_problems)
    return [printable(note) for of in notes for note in of(comparison)]


def _on_figures(comparison: Comparison) -> Iterator[str]:
    if comparison.timed:
        yield (
            f"Timed under {comparison.channel}, without buffers: a bound from above. What does not "
            "run there is timed without a model, and timelines keep their times."
        )
    if comparison.beside_edge:
        yield "Under edge: the same lists if no stream hinders another one."
    if comparison.per_microbatch:
        yield "The numbers of microbatches, M, differ, so the time per microbatch is compared."
    if any(row.steady is not None for row in comparison.rows):
        yield (
            "Once full: the figures of an asynchronous schedule while its pipeline stays full. The "
            "other columns are of one call of M microbatches, which fills and drains the pipeline. "
            "A schedule with a dash drains at every update, or shows no steady state."
        )
    shares = {share for row in comparison.rows if (share := row.share) != 1}
    if shares:
        yield (
            "All schedules train the same model. A schedule with more stages than ranks has "
            "smaller stages: an activation counts as "
            f"{' or '.join(map(str, sorted(shares)))} of one."
        )
    if comparison.memory_limit is not None:
        above = sum(row.fits is False for row in comparison.rows)
        unknown = sum(row.makespan is not None and row.fits is None for row in comparison.rows)
        yield (
            f"The memory limit is {size(comparison.memory_limit)} on every rank: "
            f"{count(above, 'schedule')} over it"
            + (f", {unknown} of unknown size." if unknown else ".")
        )


def _on_derived(comparison: Comparison) -> Iterator[str]:
    """The schedules with costs that no run has shown, and what that means for the best one."""
    several: dict[tuple[str, ...], dict[str, None]] = {}
    for row in comparison.rows:
        if row.unmeasured:
            several.setdefault(row.unmeasured, {})[row.target] = None
    for costs, names in several.items():
        # Only a stage that was never measured lacks the cost of its forward.
        why = (
            "its stages are parts of the measured ones"
            if "forward" in costs
            else how_derived(costs)
        )
        yield f"Derived, not measured, for {', '.join(names)}: {why}."
    best, measured = comparison.best, comparison.measured
    if best is not None and best.unmeasured:
        other = (
            ""
            if measured is None
            else f"; of the measured schedules, {measured.target} is the best"
        )
        yield (
            f"{best.target} is the best only if its derived costs are right: measure a run of it, "
            f"and fit that too{other}."
        )


def _on_problems(comparison: Comparison) -> Iterator[str]:
    """Why schedules can't be chosen: the first reason for each target and code."""
    several: dict[tuple[str, str | None], list[str]] = {}
    for row in comparison.rows:
        why = row.problem
        if why is None:
            continue
        reason = f"{row.target}: {why.message}"
        if why.code is not None:
            where = f" under {comparison.channel}" if row.makespan is not None else ""
            reason = f"{row.target} does not run{where}: error[{why.code}]: {why.message}"
        several.setdefault((row.target, why.code), []).append(reason)
    for first, *others in several.values():
        yield first + (f" (also for {count(len(others), 'other shape')})" if others else "")
    if comparison.best is None:
        yield "No schedule runs within the limits."


def found_text(found: Found) -> str:
    """The figures of the schedule that `search` found, how far they are above the lower bound, and
    what the search chose."""
    line = found.timeline
    span = max(rank.span for rank in line.ranks)
    unit = f" {line.unit}" if line.unit else ""
    took = makespan(line, lambda time: f"{time:.10g}{unit}")
    peaks = [f"{max(rank.peak_activations for rank in line.ranks)} activations"]
    held = [rank.peak_bytes for rank in line.ranks if rank.peak_bytes is not None]
    if held:
        peaks.append(size(max(held)))
    above = found.distance
    is_best = above <= _ENOUGH and line.channel in (None, "edge")
    held_by_rank = count(found.schedule.stages // found.schedule.ranks, "stage")
    distance = f"{above:.2%} above it"
    if is_best:
        distance = f"none can be quicker with {held_by_rank} per rank"
    bound = f"lower bound of the {found.objective}" + " under edge" * (line.channel is not None)
    pairs = found.schedule.stages * found.schedule.microbatches
    chosen = [f"placement {found.placement}"] if found.schedule.stages > 1 else []
    if found.boundaries:
        chosen.append(f"boundaries {' '.join(map(str, found.boundaries))}")
    chosen.append(f"{found.split} of {pairs} backwards split")
    if found.recomputed:
        chosen.append(f"{found.recomputed} forwards recomputed")
    chosen.append(f"as {found.origin}" if found.origin else "its own order")
    return (
        f"makespan {took}, longest span {span:.10g}{unit}, bubble "
        f"{bubble(line)}\n"
        f"peak {', '.join(peaks)}\n"
        f"{bound} {found.lower_bound:.10g}{unit}: {distance}\n"
        f"{', '.join(chosen)}; {found.candidates} tried, seed {found.seed}"
        + (", cut short: the same seed may find another" if found.cut else "")
    )
