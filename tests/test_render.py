"""What is drawn: timelines, reports and explanations."""

import io
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Diagnostic, Kind, Pipeline, Report, Source, Timeline
from schedir.checker import RULES, Location
from schedir.checker.diagnostics import fill
from schedir.ir import COMPUTE
from schedir.render import explanation, timeline_json, timeline_text
from schedir.render.diagnostics import FORMATS
from schedir.render.repeats import Repeat, repeats
from schedir.render.terminal_timeline import overview_blocks, sketch_of
from schedir.render.text import coloured, number, plain, size, write_to_terminal
from tests.findings import odd
from tests.literals import listed
from tests.test_golden import GOLDEN, compare
from tests.timelines import lines, simulated


def rows_of(text: str) -> list[list[str]]:
    """For each rank what its row holds, page by page."""
    rows: dict[int, list[str]] = {}
    for rank, row in re.findall(r"^rank +(\d+)(?:  (.*))?$", text, re.MULTILINE):
        rows.setdefault(int(rank), []).append(row)
    return list(rows.values())


def labels_of(line: Timeline) -> list[list[str]]:
    """For each rank the labels that its row has to show."""
    several = line.schedule.stages > line.schedule.ranks
    return [
        [
            f"{span.action.stage if several else ''}{span.action.kind}{span.action.microbatch}"
            for span in spans
            if span.action.kind in (Kind.FORWARD, Kind.BACKWARD)
        ]
        for spans in line.spans
    ]


def test_timeline_text(request: pytest.FixtureRequest) -> None:
    compare(GOLDEN / "shown" / "1f1b.txt", timeline_text(simulated("1f1b", 4, 4)), request)


@given(lines(9, 40), st.integers(40, 200))
def test_pages_fit_and_show_every_cell_once(line: Timeline, width: int) -> None:
    text = timeline_text(line, width)
    drawn = text.partition("makespan")[0]
    assert max(map(len, drawn.splitlines())) <= width
    pages = rows_of(text)
    assert len({len(rows) for rows in pages}) == 1  # every page has every rank
    for rows, labels in zip(pages, labels_of(line), strict=True):
        assert [label for row in rows for label in re.findall(r"\d*[FB]\d+", row)] == labels


@given(lines(9, 40, st.none()), st.integers(40, 200))
def test_pages_laid_end_to_end_are_the_whole_rows(line: Timeline, width: int) -> None:
    paged, whole = timeline_text(line, width), rows_of(timeline_text(line))
    # The columns of a unit of time: a whole number, at these costs.
    unit = 1 + max(len(label) for labels in labels_of(line) for label in labels)
    ends = [int(end) for end in re.findall(r"^time \d+\.\.(\d+)$", paged, re.MULTILINE)]
    for rows, (row,) in zip(rows_of(paged), whole, strict=True):
        joined = ""
        for part, end in zip(rows, ends, strict=True):
            joined = (joined + part).ljust(end * unit)
        # Where a page ends inside a cell, its label stands on the first part.
        assert joined.rstrip() == row


class Counted(list[Any]):
    """A row of cells that counts how many of them are looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += len(range(len(self))[key]) if isinstance(key, slice) else 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.looks += len(self)
        return super().__iter__()


def test_a_page_looks_at_its_own_cells_only() -> None:
    def looks(microbatches: int) -> float:
        drawing = sketch_of([simulated("fill-drain", 2, microbatches)]).labelled()
        rows = [Counted(cells) for cells in drawing.rows]
        drawing = attrs.evolve(drawing, rows=rows)
        pages = [list(drawing.page(left, end)) for left, end in drawing.pages(80)]
        assert len(pages) > microbatches // 10
        return sum(row.looks for row in rows) / microbatches

    assert looks(800) < 1.5 * looks(100)  # per cell: the search for a page's first one grows


def test_the_stages_of_all_ranks_take_one_look_at_the_placement() -> None:
    placement = tuple((stage % 50,) for stage in range(100))
    looks = 0

    class Held(tuple[int, ...]):
        def __contains__(self, rank: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(rank)

        def __iter__(self) -> Iterator[int]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    pipe = Pipeline(50, 1, 2, tuple(map(Held, placement)))
    assert [pipe.stages_of(rank) for rank in range(50)] == [(r, r + 50) for r in range(50)]
    assert looks == 100


@pytest.mark.parametrize("width", [None, 80])
def test_colour_changes_no_character(width: int | None) -> None:
    line = simulated("interleaved-1f1b", 3, 5)
    painted = timeline_text(line, width, colour=True)
    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == timeline_text(line, width)


def test_each_chunk_has_its_shade() -> None:
    line = simulated("interleaved-1f1b", 2, 2)
    text = timeline_text(line, colour=True)
    shades = dict(re.findall(r"\x1b\[38;5;16;48;5;(\d+)m(\d[FB])", text))
    styles = {label: shade for shade, label in shades.items()}
    assert len(styles) == 4  # two kinds by two chunks, the same on both ranks


def test_an_optimiser_step_is_marked_at_any_cost() -> None:
    steps = simulated("pipedream", 3, 4)
    for rows in rows_of(timeline_text(steps)):
        assert sum(row.count("*") for row in rows) == 4
    costly = simulated("pipedream", 3, 4, CostModel(optim_step=2))
    assert "B0--- *---- " in timeline_text(costly)


def test_cells_that_have_no_room_are_marked() -> None:
    text = timeline_text(simulated("1f1b", 2, 3, CostModel(forward=0.01)))
    assert ": too short to be named" in text
    assert max(len(row) for rows in rows_of(text) for row in rows) < 20
    assert "too short" not in timeline_text(simulated("1f1b", 2, 3))


Drawn = tuple[float, float, int, Action]
"""What is drawn: start, end, rank and action."""


def later(span: Drawn, repeat: Repeat) -> Drawn:
    """The span one period on."""
    start, end, rank, action = span
    if action.microbatch is not None:
        microbatch = action.microbatch + repeat.microbatches
        action = Action(action.kind, action.stage, microbatch)
    return start + repeat.period, end + repeat.period, rank, action


@given(lines(9, 60, st.builds(CostModel, backward=st.integers(1, 3))))
def test_what_repeats_is_the_same_a_period_later(line: Timeline) -> None:
    drawn: list[Drawn] = [
        (span.start, span.end, rank, Action(*attrs.astuple(span.action, recurse=False)[:3]))
        for rank, spans in enumerate(line.spans)
        for span in spans
        if span.action.kind in COMPUTE
    ]
    known = set(drawn)
    ended = 0.0
    for repeat in repeats(line):
        assert repeat.times >= 3
        assert ended <= repeat.start
        ended = repeat.end
        last = repeat.end - repeat.period
        images = [later(span, repeat) for span in drawn if repeat.start <= span[0] < last]
        assert known.issuperset(images)
        again = [span for span in drawn if repeat.start + repeat.period <= span[0] < repeat.end]
        assert set(images) == set(again)
    assert ended <= line.makespan


@pytest.mark.parametrize(
    ("name", "periods"),
    [("1f1b", {3}), ("pipedream", {3}), ("fill-drain", {1, 2}), ("interleaved-1f1b", {24})],
)
def test_the_steady_state_of_the_built_in_schedules(name: str, periods: set[float]) -> None:
    line = simulated(name, 4, 60)
    found = repeats(line)
    assert {repeat.period for repeat in found} == periods
    assert sum(repeat.end - repeat.start for repeat in found) > 0.75 * line.makespan


def test_a_schedule_without_a_steady_state_has_none() -> None:
    odd = listed(6, "0", "0F0 0F1 0B1 0F2 0F3 0B3 0B0 0F4 0B2 0F5 0B5 0B4")
    assert repeats(schedir.simulate(odd)) == []


@given(lines(20, 40), st.integers(60, 200), st.integers(14, 60))
def test_the_overview_fits(line: Timeline, width: int, height: int) -> None:
    screen = io.StringIO()
    write_to_terminal(overview_blocks([line], width, height), screen, width, colour=False)
    rows = screen.getvalue().splitlines()
    assert len(rows) < height
    assert max(map(len, rows)) <= width


def test_the_overview_is_the_timeline_with_a_piece_cut_out() -> None:
    line = simulated("1f1b", 4, 12)
    whole = [row for (row,) in rows_of(timeline_text(line))]
    overview = plain(overview_blocks([line], 120, 24))
    rows = re.findall(r"^ +\d  (.*)$", overview, re.MULTILINE)[:4]
    assert "… 7 × the same …" in overview
    legend = " ".join(overview.split())
    assert "7 × the same: time 10..13 again, each time 1 microbatch later" in legend
    cuts = {row.index("…") for row in rows}
    assert len(cuts) == 1  # at the same time on all ranks
    for row, full_row in zip(rows, whole, strict=True):
        before, after = row.split("…")
        assert full_row.startswith(before)
        assert full_row.endswith(after[1:].lstrip("- "))
    # If it needs more columns than there are, it goes on below, and keeps its labels.
    folded = plain(overview_blocks([simulated("1f1b", 4, 48)], 80, 24))
    assert folded.count("\nrank  ") > 1
    assert {"F0", "F47", "B0", "B47"} <= set(re.findall(r"[FB]\d+", folded))


def test_a_name_is_no_markup() -> None:
    line = simulated("1f1b", 2, 2)
    name = "a[/b] [red]c :smile:"
    line = attrs.evolve(line, schedule=attrs.evolve(line.schedule, name=name))
    screen = io.StringIO()
    write_to_terminal(overview_blocks([line], 80, 24), screen, 80, colour=False)
    assert f" {name}: 2 ranks, " in screen.getvalue().splitlines()[0]


def test_ranks_that_have_no_room_are_counted() -> None:
    overview = plain(overview_blocks([simulated("1f1b", 40, 4)], 80, 24))
    shown = [int(rank) for rank in re.findall(r"^ +(\d+)  ", overview, re.MULTILINE)]
    (hidden,) = re.findall(r"^   …  (\d+) ranks left out$", overview, re.MULTILINE)
    assert len(shown) + int(hidden) == 40
    assert shown[0] == 0
    assert shown[-1] == 39
    assert "F1" in plain(overview_blocks([simulated("1f1b", 1, 2)], 80, 6))


def test_an_overview_of_what_fits_leaves_nothing_out() -> None:
    line = simulated("1f1b", 4, 4)
    overview = plain(overview_blocks([line], 80, 24))
    for (row,) in rows_of(timeline_text(line)):
        assert f"  {row}\n" in overview
    assert "--full" not in overview
    assert "peak activations" in overview.splitlines()[1]


def test_split_backwards_are_named() -> None:
    text = timeline_text(schedir.simulate(listed(1, "0", "0F0 0I0 0W0")))
    assert "rank 0  F0 I0 W0\n" in text
    assert "F forward, I gradient of the input, W gradient of the weights;" in text


def test_timeline_json() -> None:
    data = json.loads(timeline_json(simulated("pipedream", 2, 3)))
    assert list(data) == ["makespan", "bubble_fraction", "ranks"]
    assert data["makespan"] == 12
    assert data["ranks"][0] == {
        "rank": 0,
        "busy": 9,
        "idle": 3,
        "span": 12,
        "peak_activations": 2,
        "weight_versions": 2,
    }


def written(name: str, report: Report, subject: str, colour: bool = False) -> str:
    """What `schedir check --format NAME` prints."""
    blocks = FORMATS[name](report, subject)
    return (coloured if colour else plain)(blocks)


full = partial(written, "text")


def test_colour_of_a_report_changes_no_character() -> None:
    report = schedir.check(schedir.loads(RULES["S301"].example))
    painted = full(report, "my-1f1b", colour=True)
    assert painted != full(report, "my-1f1b")
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == full(report, "my-1f1b")


def test_what_is_missing_is_shown_beside_the_line_that_needs_it() -> None:
    missing = Location(0, None, schedir.backward(0, 1))
    there = Location(0, 1, schedir.forward(0, 1), Source("mine.py", 7))
    report = Report("edge", (odd("error", missing, there),))
    assert written("concise", report, "mine").startswith("mine.py:7: rank 0 0B1 (missing)")
    assert written("github", report, "mine").startswith("::error file=mine.py,line=7,")


def test_github_escapes_what_its_commands_cannot_hold() -> None:
    place = Location(0, 1, schedir.forward(0, 1), Source("a,b:c%.py", 7))
    said = "100 %: a,\r\nb"
    found = odd("error", place, said=said)
    warning = odd("warning", said=said)
    note = odd("note", attrs.evolve(place, source=None), said=said)
    text = written("github", Report("edge", (found, warning, note)), "my.sched")
    assert text.splitlines() == [
        "::error file=a%2Cb%3Ac%25.py,line=7,title=S999 odd::rank 0 #1 0F1: 100 %25: a,%0D%0Ab",
        "::warning file=my.sched,title=S999 odd::100 %25: a,%0D%0Ab",
        "::notice file=my.sched,title=S999 odd::rank 0 #1 0F1: 100 %25: a,%0D%0Ab",
    ]


def test_the_last_line_sums_up() -> None:
    clean = partial(Report, "edge", ())
    assert (
        full(clean(schedir.CHANNELS), "x") == "x: clean under edge and every other channel model\n"
    )
    assert full(clean(("edge", "async")), "x") == (
        "x: clean under edge (also: async; not: host, rank, pair, direction)\n"
    )
    place = Location(0, 1, schedir.forward(0, 1))
    warning = odd("warning", place)
    report = Report("async", (warning, warning), ("async",))
    assert full(report, "x").endswith(
        "x: clean under async (not: host, rank, pair, edge, direction), 2 warnings\n"
    )
    assert full(Report("edge", (odd("error", place), warning)), "x").endswith(
        "x: 1 error, 1 warning under edge\n"
    )


def alike(line: int, many: int, more: int = 0) -> list[Diagnostic]:
    """Findings of one code and line, the last of which stands for `more`."""
    place = Location(0, 1, schedir.forward(0, 1), Source("a.py", line))
    found = [odd("error", place)] * many
    return [*found[:-1], attrs.evolve(found[-1], more=more)]


@pytest.mark.parametrize(
    ("found", "others"),
    [
        (alike(1, 3), []),
        (alike(1, 4), ["and 1 more like it"]),
        (alike(1, 1000, more=7769), ["and 8,766 more like it"]),
        (alike(1, 5) + alike(2, 4), ["and 2 more like it", "and 1 more like it"]),
        (
            alike(1, 5) + alike(2, 4, more=90),
            ["and 2 more like it", "and 1 more like it, and 90 more of S999"],
        ),
        (alike(1, 2, more=90), []),  # which its headline says
    ],
)
def test_of_those_alike_the_rest_is_counted(found: list[Diagnostic], others: list[str]) -> None:
    report = Report("edge", tuple(found))
    assert re.findall(r"^   … (.*)$", full(report, "x"), re.MULTILINE) == others
    assert re.findall(r": … (.*)$", written("concise", report, "x"), re.MULTILINE) == others
    assert len(json.loads(written("json", report, "x"))["diagnostics"]) == len(found)


def test_findings_without_a_line_are_alike_where_rank_and_stage_are() -> None:
    of_one = [odd("error", Location(0, m, schedir.forward(0, m))) for m in range(100)]
    text = full(Report("edge", tuple(of_one)), "x")
    assert text.count("error[") == 3
    assert "   … and 97 more like it\n" in text
    of_each = [odd("error", Location(0, stage, schedir.forward(stage, 0))) for stage in range(9)]
    assert full(Report("edge", tuple(of_each)), "x").count("error[") == 9


def test_a_finding_with_many_places_shows_a_few() -> None:
    many = " ".join(f"0F{m} 1F{m} 1B{m} 0B{m}" for m in range(20))
    text = full(schedir.check(listed(20, "0 0", f"{many} 1OPTIM_STEP")), "many")
    assert text.count(":::") == 3
    assert "  ::: and 17 more\n" in text


@pytest.mark.parametrize("code", RULES)
def test_every_rule_is_explained_by_an_example_that_breaks_it(code: str) -> None:
    rule = RULES[code]
    report = schedir.check(schedir.loads(rule.example), **dict(rule.options))
    assert code in {found.code for found in report.diagnostics}
    text = explanation(rule)
    flowing = " ".join(text.split())
    for part in (code, rule.name, rule.meaning, rule.why, rule.fix, *rule.example.splitlines()):
        assert " ".join(part.split()) in flowing
    assert f"    {rule.severity}[{code}]: " in text


def test_an_overlapped_pair_is_one_cell() -> None:
    lists = "0F0 0F1 (0F2;0B0) 0B1 0B2 0OPTIM_STEP", "1F0 1B0 1F1 1B1 1F2 1B2 1OPTIM_STEP"
    line = schedir.simulate(listed(3, "0 1", *lists))
    drawn = timeline_text(line).splitlines()
    assert drawn[4:6] == [
        "rank 0  F0 F1       F2;B0--- B1---    B2---*",
        "rank 1     F0 B0--- F1 B1--- F2 B2---*",
    ]
    assert "; between two that run as one" in drawn[7]
    coarse = plain(overview_blocks([line], 24, 14))
    assert "   0  FFF   XXXXXBBB BBB\n   1   FFBBBFFBBBFBBB\n" in coarse
    assert "X a forward and a backward as one" in " ".join(coarse.split())


@attrs.frozen
class Filler:
    one = 1
    several = 3
    late = 2.50
    action = schedir.forward(2, 5)
    none: tuple[int, ...] = ()
    numbers: tuple[int, ...] = (4, 0, 1, 2)


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("no hole", "no hole"),
        ("{one} of {several}", "1 of 3"),
        ("{action} is of stage {action.stage}", "2F5 is of stage 2"),
        ("{one:is|are}, {several:is|are}, {one:|s}", "is, are, "),
        ("{late:g}", "2.5"),
        ("{numbers:and}", "4, 0, 1 and 2"),
        ("{numbers:ranges}, {none:ranges}", "0-2, 4, none"),
        ("{{one}}", "{one}"),
    ],
)
def test_holes_are_filled_with_attributes(template: str, filled: str) -> None:
    assert fill(template, Filler()) == filled


def test_an_attribute_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="severel"):
        fill("{severel}", Filler())


@pytest.mark.parametrize(
    ("value", "shown"),
    [(99999.6, "99999.6"), (1023693.6, "1023694"), (21.0, "21"), (0.1 + 0.2, "0.3")],
)
def test_a_number_keeps_what_stands_before_its_point(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("many", "shown"),
    [(1023693, "1000 KiB"), (1048575.6, "1 MiB"), (1536, "1.5 KiB"), (5e300, "4.44e+285 PiB")],
)
def test_a_size_has_at_least_its_whole_digits(many: float, shown: str) -> None:
    assert size(many) == shown
