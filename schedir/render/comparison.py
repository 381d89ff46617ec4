"""Schedules compared, as a table or as JSON.

schedule                makespan  ratio  bubble  peak activations  delay
interleaved-1f1b  best      28.5  1.000   15.8%          11 × 1/2      0
1f1b                          33  1.158   27.3%                 4      0
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from schedir.finder import Comparison, Problem, Row
from schedir.ir import printable
from schedir.render.clock import unit_of
from schedir.render.styled import Block, Piece, Table, count, fill, table
from schedir.simulator import how_derived

_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


class _Column(NamedTuple):
    """A column's header and its cell of a row; what is `spare` goes first where room is short."""

    header: str
    align: str
    cell: Callable[[Row], str]
    spare: bool = False


def comparison_blocks(comparison: Comparison, width: int | None = None) -> Iterator[Block]:
    """The table, and below it what its figures mean and what speaks against some schedules.

    Where it is wider than `width`, its headers are folded, and columns are left out that follow
    from the others.
    """
    columns = list(_columns(comparison))
    notes = list(_notes(comparison))
    whole = Table(_cells(columns, comparison), _align(columns), header=True)
    if width is None or whole.width <= width:
        yield whole
    else:
        text, left_out = _narrow(columns, comparison, width)
        yield Piece(text)
        if left_out:
            notes.insert(0, f"Left out, as it is too wide here: {', '.join(left_out)}.")
    for note in notes:
        yield Piece(f"\n{fill(note, width)}\n")


def _narrow(
    columns: list[_Column], comparison: Comparison, width: int
) -> tuple[str, Sequence[str]]:
    """The table as text with folded headers, and the headers of what it has no room for."""
    left_out = []
    text = _folded(columns, comparison)
    for spare in [column for column in columns if column.spare]:
        if _width(text) <= width:
            break
        columns.remove(spare)
        left_out.append(spare.header)
        text = _folded(columns, comparison)
    return text, left_out


def _cells(columns: Sequence[_Column], comparison: Comparison) -> list[tuple[str, ...]]:
    """The header and all rows."""
    rows = [tuple(column.cell(row) for column in columns) for row in comparison.rows]
    return [tuple(column.header for column in columns), *rows]


def _folded(columns: Sequence[_Column], comparison: Comparison) -> str:
    """The table as text, each header in as many lines as it has words."""
    header, *rows = _cells(columns, comparison)
    lines = zip_longest(*(reversed(name.split()) for name in header), fillvalue="")
    return table([*reversed(list(lines)), *rows], _align(columns))


def _align(columns: Sequence[_Column]) -> str:
    return "".join(column.align for column in columns)


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def comparison_json(comparison: Comparison) -> str:
    """The comparison for a program: the keys are a contract."""
    best = comparison.best
    content = {
        "channel": comparison.channel,
        "memory_limit": comparison.memory_limit,
        "unit": comparison.unit,
        "best": None if best is None else comparison.rows.index(best),
        "rows": [_as_json(comparison, row) for row in comparison.rows],
    }
    return json.dumps(content, indent=2) + "\n"


def _as_json(comparison: Comparison, row: Row) -> dict[str, Any]:
    problem = row.problem
    return {
        "target": row.target,
        "ranks": row.ranks,
        "stages": row.stages,
        "microbatches": row.microbatches,
        "chunks": row.chunks,
        "makespan": row.makespan,
        "time_per_microbatch": row.time_per_microbatch,
        "ratio": comparison.ratio(row),
        "bubble_fraction": row.bubble_fraction,
        "span_bubble_fraction": row.span_bubble_fraction,
        "peak_activations": row.peak_activations,
        "peak_bytes": row.peak_bytes,
        "delay": row.delay,
        "fits": row.fits,
        "problem": problem and {"code": problem.code, "message": problem.message},
        "unmeasured": list(row.unmeasured),
    }


def _columns(comparison: Comparison) -> Iterator[_Column]:
    rows, unit, factor = comparison.rows, "", 1.0
    if comparison.unit is not None:
        times = [row.makespan for row in rows if row.makespan is not None]
        name, factor = unit_of(times, comparison.unit)
        unit = f" ({name})"
    yield _Column("schedule", "<", lambda row: printable(row.target))
    if any(_remark(comparison, row) for row in rows):
        yield _Column("", "<", lambda row: _remark(comparison, row))
    if len({row.ranks for row in rows} - {None}) > 1:
        yield _Column("P", ">", lambda row: _shown(row.ranks, "{}"))
    if comparison.per_microbatch:
        yield _Column("M", ">", lambda row: str(row.microbatches))
    if len({(row.target, row.chunks) for row in rows}) > len({row.target for row in rows}):
        yield _Column("V", ">", lambda row: _shown(row.chunks, "{}"))
    each = comparison.per_microbatch
    yield _Column(f"makespan{unit}", ">", lambda row: _time(row.makespan, factor), spare=each)
    if each:
        yield _Column(f"makespan/M{unit}", ">", lambda row: _time(row.time_per_microbatch, factor))
    yield _Column("ratio", ">", lambda row: _shown(comparison.ratio(row), "{:.3f}"))
    yield _Column("bubble", ">", _bubble, spare=True)
    if any(_bubble(row) != _bubble_of_span(row) for row in rows):
        yield _Column("bubble of span", ">", _bubble_of_span, spare=True)
    yield _Column("peak activations", ">", _activations)
    if any(row.peak_bytes is not None for row in rows):
        yield _Column("peak bytes", ">", lambda row: _size(row.peak_bytes))
    yield _Column("delay", ">", lambda row: _shown(row.delay, "{}"))


def _remark(comparison: Comparison, row: Row) -> str:
    """What decides over a row, in a word."""
    if row is comparison.best:
        return "best, derived" if row.unmeasured else "best"
    if row.problem is not None:
        return row.problem.code or "none"
    if row.fits is False:
        return "over"
    return "derived" if row.unmeasured else ""


def _notes(comparison: Comparison) -> Iterator[str]:
    if comparison.per_microbatch:
        yield "The numbers of microbatches, M, differ, so that time per microbatch is compared."
    shares = {share for row in comparison.rows if (share := row.share) != 1}
    if shares:
        yield (
            "All train the same model. One that cuts it into more stages than there are ranks has "
            "smaller ones, whose activations count as "
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
    yield from _derived(comparison)
    yield from _objections(comparison)
    if comparison.best is None:
        yield "None of them runs and is within the limits."


def _derived(comparison: Comparison) -> Iterator[str]:
    """Which times rest on costs that no run has shown, and what that means for the best one."""
    several: dict[tuple[str, ...], list[str]] = {}
    for row in comparison.rows:
        if row.unmeasured:
            names = several.setdefault(row.unmeasured, [])
            names.extend({row.target} - set(names))
    for costs, names in several.items():
        # A forward is measured wherever its stage is.
        why = "its stages are parts of those measured" if "forward" in costs else how_derived(costs)
        yield f"Derived, as no run has shown it, for {', '.join(names)}: {why}."
    best, measured = comparison.best, comparison.measured
    if best is not None and best.unmeasured:
        other = "" if measured is None else f"; of those measured, {measured.target} is the best"
        yield (
            f"{best.target} is the best only if what was derived is right: measure a run of it, "
            f"and fit that too{other}."
        )


def _objections(comparison: Comparison) -> Iterator[str]:
    """Why schedules can't be chosen: for each target and code the first reason."""
    several: dict[tuple[str, str | None], list[str]] = {}
    for row in comparison.rows:
        if row.problem is not None:
            reasons = several.setdefault((row.target, row.problem.code), [])
            reasons.append(_objection(comparison, row, row.problem))
    for first, *others in several.values():
        more = len(others)
        yield first + (f" (and so for {count(more, 'other shape')})" if more else "")


def _objection(comparison: Comparison, row: Row, why: Problem) -> str:
    if why.code is None:
        return printable(f"{row.target}: {why.message}")
    where = f" under {comparison.channel}" if row.makespan is not None else ""
    return printable(f"{row.target} does not run{where}: error[{why.code}]: {why.message}")


def _bubble(row: Row) -> str:
    return _shown(row.bubble_fraction, "{:.1%}")


def _bubble_of_span(row: Row) -> str:
    return _shown(row.span_bubble_fraction, "{:.1%}")


def _size(many: float | None) -> str:
    return "" if many is None else size(many)


def size(many: float) -> str:
    """A number of bytes in three digits: 1.5 GiB."""
    power = 0
    while many >= 1024 and power < len(_PREFIXES) - 1:
        many /= 1024
        power += 1
    return f"{many:.3g} {_PREFIXES[power]}B" if many < 1000 else f"{many:.0f} {_PREFIXES[power]}B"


def _activations(row: Row) -> str:
    if row.peak_activations is None:
        return ""
    share = row.share
    return f"{row.peak_activations}" + (f" × {share}" if share != 1 else "")


def _time(value: float | None, factor: float) -> str:
    """In five digits: the sixth decides nothing."""
    if value is None:
        return ""
    value *= factor
    return f"{value:.5g}" if value < 10**5 and value != int(value) else f"{value:.0f}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
