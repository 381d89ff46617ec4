"""`schedir.compare` and the command: what is best, and why the rest is not."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import attrs
import pytest

import schedir
from schedir import CostModel, Kind, LoadError, SchedirError, Schedule
from schedir.checker import CHANNELS
from schedir.finder import Comparison, Row
from schedir.render.tables import FORMATS, comparison_blocks, comparison_text
from schedir.render.text import plain
from schedir.simulator import Measured, save_timelines, simulate
from tests.command_line import DEADLOCK, Run
from tests.measured import even, measured_run

SYNCHRONOUS = ["1f1b", "fill-drain", "interleaved-1f1b"]
BUILT_IN = [*SYNCHRONOUS, "pipedream"]
WRONG = "schedir 1\nname wrong\nmicrobatches 1\nplacement 0\nrank 0: 0B0 0F0\n"


@pytest.fixture
def run(run: Run) -> Run:
    Path("dead.sched").write_text(DEADLOCK)
    Path("wrong.sched").write_text(WRONG)
    return run


def table(comparison: Comparison, width: int | None = None) -> str:
    return plain(comparison_blocks(comparison, width))


def by_target(comparison: Comparison) -> dict[str, Row]:
    return {row.target: row for row in comparison.rows}


def test_the_table() -> None:
    expected = """\
schedule                makespan  ratio  bubble  peak activations  delay
interleaved-1f1b  best      28.5  1.000   15.8%          11 × 1/2      0
1f1b                          33  1.158   27.3%                 4      0
fill-drain                    33  1.158   27.3%                 8      0

All schedules train the same model. A schedule with more stages than ranks has smaller stages: an \
activation counts as 1/2 of one.
"""
    assert table(schedir.compare(SYNCHRONOUS)) == expected


def test_a_sweep_and_what_takes_no_such_shape(run: Run) -> None:
    argv = ["--sweep", "microbatches=4,8", "--sweep", "chunks=1,2"]
    out = run.prints("compare", "interleaved-1f1b", "1f1b", *argv)
    rows, notes = out.split("\n\n", 1)
    expected = """\
schedule                M  V  makespan  makespan/M  ratio  bubble  peak activations  delay
interleaved-1f1b  best  8  2      28.5      3.5625  1.000   15.8%          11 × 1/2      0
interleaved-1f1b        4  2      16.5       4.125  1.158   27.3%           8 × 1/2      0
1f1b                    8  1        33       4.125  1.158   27.3%                 4      0
interleaved-1f1b        8  1        33       4.125  1.158   27.3%                 7      0
interleaved-1f1b        4  1        21        5.25  1.474   42.9%                 4      0
1f1b                    4  1        21        5.25  1.474   42.9%                 4      0
1f1b              none  4  2
1f1b              none  8  2"""
    assert rows == expected
    assert "M, differ, so the time per microbatch is compared" in notes
    assert notes.count("1f1b: 1f1b runs one stage per rank, not 2: leave chunks out") == 1
    assert "(also for 1 other shape)\n" in notes


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_it_fits_a_terminal(width: int) -> None:
    sweep = {"microbatches": [8, 16], "chunks": [1, 2]}
    costs = CostModel(forward=0.12345, backward=0.2512341, unit="s")
    for targets, enough in ((SYNCHRONOUS, 100), (BUILT_IN, 200)):
        comparison = schedir.compare(targets, sweep=sweep, costs=costs)
        shown = table(comparison, width).splitlines()
        assert max(map(len, shown)) <= max(width, 70)
        assert all(sum(line.startswith(name) for line in shown) >= 2 for name in targets)
        assert sum("(s)" in line or "(ms)" in line for line in shown) >= 1
        said = "Left out because the table is too wide"
        left_out = [line for line in shown if line.startswith(said)]
        assert bool(left_out) == (width < enough)


@pytest.mark.parametrize("channel", CHANNELS)
def test_what_does_not_run_under_the_channel_model_is_listed_and_not_chosen(
    run: Run, channel: str
) -> None:
    code, out, _ = run("compare", "dead.sched", "--channel", channel, "--json")
    found = json.loads(out)
    (row,) = found["rows"]
    runs = channel in ("edge", "direction", "async")
    assert (code, found["best"]) == ((0, 0) if runs else (1, None))
    assert row["makespan"] == 9
    assert row["problem"] == (
        None if runs else {"code": "S301", "message": "deadlock: ranks 0 and 1 wait on each other"}
    )


def test_what_is_best_is_the_quickest_that_runs(run: Run) -> None:
    Path("quick.sched").write_text(DEADLOCK.replace("my-1f1b", "quick"))
    targets = ("gpipe", "quick.sched", "wrong.sched")
    code, out, _ = run("compare", *targets, "--microbatches", "2", "--ranks", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[1].split()[:2] == ["gpipe", "best"]
    assert "quick.sched  S301" in out
    assert "quick.sched does not run under rank: error[S301]: deadlock: ranks 0 and 1" in out
    assert "wrong.sched has 1 ranks, not 2" in out
    code, out, _ = run("compare", "wrong.sched")
    assert code == 1
    assert "wrong.sched  S201" in out or "wrong.sched does not run: error[S2" in out
    assert out.endswith("No schedule runs within the limits.\n")


def test_the_json_has_these_keys(run: Run) -> None:
    code, out, _ = run("compare", "1f1b", "interleaved-1f1b", "pipedream", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["channel", "memory_limit", "unit", "best", "rows"]
    assert (found["channel"], found["memory_limit"], found["unit"]) == ("rank", None, None)
    assert found["best"] == 0
    assert [row["target"] for row in found["rows"]] == ["interleaved-1f1b", "1f1b", "pipedream"]
    assert [row["delay"] for row in found["rows"]] == [0, 0, 3]
    shape = {"ranks": 4, "stages": 8, "microbatches": 8, "chunks": 2}
    times = {"makespan": 28.5, "time_per_microbatch": 28.5 / 8, "ratio": 1}
    bubble = pytest.approx(9 / 57)
    kept = {"peak_activations": 11, "peak_bytes": None, "delay": 0}
    assert found["rows"][0] == {
        **{"target": "interleaved-1f1b", **shape, **times, **kept},
        **{"bubble_fraction": bubble, "span_bubble_fraction": bubble},
        **{"fits": None, "problem": None, "unmeasured": [], "steady": None},
    }


def test_of_equally_quick_ones_what_keeps_less_and_delays_less_comes_first() -> None:
    names = ["fill-drain", "pipedream", "interleaved-1f1b", "1f1b"]
    expected = ["1f1b", "pipedream", "interleaved-1f1b", "fill-drain"]
    # Sums in another order differ in their last digits: fill-drain's is the least here.
    for costs in (CostModel(), CostModel(forward=0.1, backward=0.2)):
        table = schedir.compare(names, chunks=1, costs=costs)
        assert [row.target for row in table.rows] == expected
    # Copies of the weights outweigh activations.
    costs = CostModel(weight_bytes=1000, activation_bytes=1)
    table = schedir.compare(names, chunks=1, costs=costs)
    assert [row.target for row in table.rows][-1] == "pipedream"
    # Half a stage's activations count half.
    costs = CostModel(forward=0, backward=0, optim_step=1)
    table = schedir.compare(["fill-drain", "interleaved-1f1b"], costs=costs)
    assert [row.peak_activations for row in table.rows] == [11, 8]


def test_a_memory_limit(run: Run) -> None:
    costs = ["--cost", "activation_bytes=1GiB", "--cost", "weight_bytes=512MiB"]
    out = run.prints("compare", *BUILT_IN[:3], *costs, "--memory-limit", "5GiB")
    expected = """\
schedule                makespan  ratio  bubble  peak activations  peak bytes  delay
interleaved-1f1b  over      28.5  0.864   15.8%          11 × 1/2       6 GiB      0
1f1b              best        33  1.000   27.3%                 4     4.5 GiB      0
fill-drain        over        33  1.000   27.3%                 8     8.5 GiB      0

All schedules train the same model. A schedule with more stages than ranks has smaller stages: an \
activation counts as 1/2 of one.

The memory limit is 5 GiB on every rank: 2 schedules over it.
"""
    assert out == expected
    assert run("compare", "1f1b", *costs, "--memory-limit", "4.5GiB")[0] == 0
    code, out, _ = run("compare", "1f1b", *costs, "--memory-limit", str(int(4.5 * 2**30) - 1))
    assert code == 1
    assert out.endswith("No schedule runs within the limits.\n")


def test_what_is_of_unknown_size_is_not_chosen_under_a_limit() -> None:
    line = simulate(schedir.build("1f1b"), CostModel(forward=0.5, backward=0.5))
    costs = CostModel(activation_bytes=10)
    comparison = schedir.compare([line, "1f1b"], costs=costs, memory_limit=40)
    assert comparison.best is comparison.rows[1]
    assert [row.fits for row in comparison.rows] == [None, True]
    assert "0 schedules over it, 1 one of unknown size" not in table(comparison)
    assert "0 schedules over it, 1 of unknown size." in table(comparison)


def test_all_do_the_same_work() -> None:
    """Whatever the number of stages: what all ranks are busy with is the same."""
    costs = CostModel(forward=(1, 2, 3, 4), backward=(2, 3, 4, 5), unit="ms")
    for given in (None, costs):
        names, sweep = ["1f1b", "interleaved-1f1b"], {"chunks": [1, 2, 4]}
        comparison = schedir.compare(names, costs=given, sweep=sweep)
        timed = [row for row in comparison.rows if row.makespan is not None]
        assert len(timed) == 4
        for row in timed:
            assert row.makespan is not None
            assert row.bubble_fraction is not None
            busy = 4 * row.makespan * (1 - row.bubble_fraction)
            assert busy == pytest.approx(96 if given is None else 8 * 24)
            assert row.unit == (given and "ms")


def test_times_are_shown_in_the_unit_that_they_are_read_in(run: Run) -> None:
    argv = ["compare", "1f1b", "--cost", "forward=0.0001", "--cost", "backward=0.0002"]
    assert run(*argv, "--cost", "unit=s")[1].splitlines() == [
        "schedule        makespan (ms)  ratio  bubble  peak activations  delay",
        "1f1b      best            3.3  1.000   27.3%                 4      0",
    ]
    found = json.loads(run(*argv, "--cost", "unit=s", "--json")[1])
    assert found["unit"] == "s"
    assert found["rows"][0]["makespan"] == pytest.approx(0.0033)
    assert "makespan (µs)" in run(*argv, "--cost", "unit=us")[1]


def test_costs_may_follow_from_the_number_of_stages() -> None:
    asked = []

    def costs(stages: int) -> CostModel:
        asked.append(stages)
        return CostModel(forward=1, backward=1)

    comparison = schedir.compare(["1f1b", "interleaved-1f1b"], costs=costs)
    assert asked == [4, 8]
    found = by_target(comparison)
    assert found["1f1b"].makespan == 22
    assert found["interleaved-1f1b"].makespan == 2 * 16 + 6


def test_delay_is_what_the_checker_counts() -> None:
    for row in schedir.compare(BUILT_IN).rows:
        schedule, delay = row.build(), row.delay
        assert delay is not None
        assert schedir.check(schedule, max_delay=delay).ok
        if delay:
            found = schedir.check(schedule, max_delay=delay - 1).diagnostics
            assert "S403" in {each.code for each in found}


def test_an_open_shape_is_that_of_the_measured_run(run: Run) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=6)
    save_timelines([attrs.evolve(simulate(schedule), measured=Measured(0))], "run.json")
    found = json.loads(run("compare", "run.json", "fill-drain", "--json")[1])
    assert [(row["ranks"], row["microbatches"]) for row in found["rows"]] == [(2, 6), (2, 6)]
    swept = json.loads(run("compare", "run.json", "1f1b", "--sweep", "microbatches=4", "--json")[1])
    assert [(row["ranks"], row["microbatches"]) for row in swept["rows"]] == [(2, 6), (2, 4)]


def test_measured_timelines_are_compared_too(run: Run) -> None:
    costs = CostModel(forward=0.5, backward=1, unit="s")
    lines = [
        attrs.evolve(line, starts=line.starts * by, ends=line.ends * by, measured=Measured(step))
        for line in [simulate(schedir.build("1f1b"), costs)]
        for step, by in enumerate((3, 1, 2))
    ]
    save_timelines(lines, "run.json")
    assert "the textbook's costs have none" in run.refuses("compare", "1f1b", "run.json")
    costs_in_ms = ("forward=500", "backward=1000", "unit=ms")
    options = [word for cost in costs_in_ms for word in ("--cost", cost)]
    out = run.prints("compare", "1f1b", "run.json", *options)
    assert out.splitlines()[0].split()[1] == "makespan"
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["1f1b", "best", "16.5"],
        ["run.json", "33", "2.000"],
    ]
    comparison = schedir.compare([lines[0], simulate(lines[0].schedule, costs)])
    assert [row.makespan for row in comparison.rows] == [16.5, 49.5]
    assert comparison.unit == "s"


def test_what_ran_is_not_judged() -> None:
    schedule = schedir.loads(DEADLOCK)
    line = attrs.evolve(simulate(schedule), measured=Measured(0))
    assert schedir.compare([line]).best is not None
    assert schedir.compare([simulate(schedule)]).best is None


def test_a_parameter_goes_to_the_schedules_that_have_it(run: Run) -> None:
    argv = ["compare", "1f1b", "interleaved-1f1b", "--json"]
    _, plain_out, _ = run(*argv)
    code, out, _ = run(*argv, "--set", "group_size=8")
    assert code == 0
    plain_rows, rows = json.loads(plain_out)["rows"], json.loads(out)["rows"]
    peaks = {row["target"]: row["peak_activations"] for row in rows}
    assert peaks["1f1b"] == 4
    assert peaks["interleaved-1f1b"] > plain_rows[0]["peak_activations"]
    code, out, err = run(*argv, "--set", "grup_size=8")
    assert (code, out, err) == (2, "", "error: no schedule here has a parameter 'grup_size'\n")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["nope"], "no schedule is named 'nope'"),
        (["1f1b", "none.sched"], "none.sched: no such file"),
        (["none.json"], "none.json"),
        (["1f1b", "--sweep", "ranks=2,4"], "'ranks=2,4' is not microbatches=8,16 or chunks=8,16"),
        (["1f1b", "--sweep", "chunks=2,x"], "'x' is not a whole number >= 1"),
        (["1f1b", "--sweep", "chunks=0,1"], "'0' is not a whole number >= 1"),
        (["1f1b", "--sweep", "chunks=1,1"], "give some values, each once"),
        (["1f1b", "--sweep", "chunks=1", "--sweep", "chunks=2"], "--sweep names chunks twice"),
        (["1f1b", "--sweep", "chunks=1", "--chunks", "2"], "chunks has one value and is swept"),
        (["1f1b", "--memory-limit", "40GB"], "a memory limit needs bytes"),
        (["1f1b", "--memory-limit", "much"], "'much' is not a number of bytes, such as 40GiB"),
        (["1f1b", "--cost", "forward=-1"], "forward: '-1' is not a number >= 0"),
        ([], "the following arguments are required: TARGET"),
    ],
)
def test_bad_arguments(run: Run, argv: list[str], why: str) -> None:
    assert why in run.refuses("compare", *argv)


def test_costs_that_fit_no_number_of_stages_are_a_problem_of_that_schedule() -> None:
    comparison = schedir.compare(["1f1b"], ranks=3, costs=CostModel(forward=(1, 1, 1, 1)))
    (row,) = comparison.rows
    assert row.problem is not None
    assert "forward is given for 4 stages, which can't be made 3" in row.problem.message
    assert comparison.best is None


def test_one_number_is_of_no_known_share_where_numbers_of_ranks_differ() -> None:
    """2 stages of a forward of 1 are half the model that 4 are."""
    several = [schedir.build("1f1b", ranks=ranks) for ranks in (2, 4)]
    with pytest.raises(SchedirError, match=r"have 2 and 4 ranks, .* one number .* by stage"):
        schedir.compare(several)
    rows = schedir.compare(several, costs=CostModel(forward=(1, 1, 1, 1))).rows
    assert [(row.ranks, row.makespan) for row in rows] == [(4, 33), (2, 54)]
    schedir.compare([schedir.simulate(each) for each in several])  # these have their times


def test_in_python() -> None:
    with pytest.raises(TypeError, match="targets must be a list"):
        schedir.compare("1f1b")
    with pytest.raises(LoadError, match="nothing to compare"):
        schedir.compare([])
    with pytest.raises(ValueError, match="unknown channel model 'tcp'"):
        schedir.compare(["1f1b"], channel="tcp")
    with pytest.raises(SchedirError, match="a memory limit needs bytes"):
        schedir.compare(["1f1b"], memory_limit=10)
    for limit in (-1, math.nan):
        with pytest.raises(ValueError, match=f"memory_limit must be .* >= 0, not {limit}"):
            schedir.compare(["1f1b"], memory_limit=limit)
    told: list[tuple[int, int]] = []
    schedir.compare(BUILT_IN, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    schedule = schedir.build("gpipe", ranks=2)
    (row,) = schedir.compare([schedule]).rows
    assert (row.target, row.makespan) == ("fill-drain", simulate(schedule).makespan)
    assert row.build() == schedule


def test_what_is_compared_can_be_built() -> None:
    for row in schedir.compare(BUILT_IN, ranks=3, sweep={"microbatches": [4, 6]}).rows:
        assert row.build() == schedir.build(row.target, ranks=3, microbatches=row.microbatches)


def fitted_on_1f1b() -> CostModel:
    """Costs of 4 stages whose backwards were all whole."""
    return CostModel.fit(measured_run(schedir.build("1f1b", ranks=4, microbatches=8), 6, even))


def test_what_no_run_has_shown_is_marked_and_not_simply_the_best(run: Run) -> None:
    comparison = schedir.compare(["1f1b", "zb-h1", "interleaved-1f1b"], costs=fitted_on_1f1b())
    rows = by_target(comparison)
    assert rows["1f1b"].unmeasured == ()
    assert rows["zb-h1"].unmeasured == ("backward_input", "backward_weight")
    assert rows["interleaved-1f1b"].unmeasured == ("forward", "backward", "optim_step")
    assert comparison.best is not None
    assert comparison.best.unmeasured
    assert comparison.measured is rows["1f1b"]
    shown = table(comparison)
    assert f"{comparison.best.target}" in shown.splitlines()[1]
    assert "best, derived" in shown.splitlines()[1]
    assert "  derived  " in shown.splitlines()[2]
    half = "backward_input (half of the backward), backward_weight (half of the backward)"
    assert f"Derived, not measured, for zb-h1: {half}." in shown
    assert "for interleaved-1f1b: its stages are parts of the measured ones." in shown
    assert f"{comparison.best.target} is the best only if its derived costs are right" in shown
    assert "of the measured schedules, 1f1b is the best." in shown

    fitted_on_1f1b().save("costs.json")
    code, out, _ = run("compare", "1f1b", "zb-h1", "--costs", "costs.json", "--json")
    assert code == 0
    found = {row["target"]: row["unmeasured"] for row in json.loads(out)["rows"]}
    assert found == {"1f1b": [], "zb-h1": ["backward_input", "backward_weight"]}


def test_what_was_measured_or_given_is_not_marked(run: Run) -> None:
    times = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.2, Kind.BACKWARD_WEIGHT: 0.7}
    split = schedir.build("zb-h1", ranks=4, microbatches=8)
    seen = CostModel.fit(measured_run(split, 6, even, times=times | {Kind.OPTIM_STEP: 0.3}))
    by_hand = attrs.evolve(fitted_on_1f1b(), backward_input=1.1, backward_weight=1)
    for costs in (seen, by_hand, CostModel()):
        comparison = schedir.compare(["zb-h1"], costs=costs)
        assert [row.unmeasured for row in comparison.rows] == [()]
        assert "erived" not in table(comparison)
    # A whole backward is then the sum of its parts.
    assert by_target(schedir.compare(["1f1b"], costs=seen))["1f1b"].unmeasured == ("backward",)
    # Fewer stages are sums of those that were measured.
    (row,) = schedir.compare(["1f1b"], ranks=2, costs=fitted_on_1f1b()).rows
    assert row.unmeasured == ()
    run_again = schedir.recompute(schedir.build("1f1b", ranks=4, microbatches=8), [1])
    (row,) = schedir.compare([run_again], costs=fitted_on_1f1b()).rows
    assert row.unmeasured == ("recompute",)


def test_other_commands_and_bands_name_what_no_run_has_shown(run: Run) -> None:
    fitted_on_1f1b().save("costs.json")
    split = schedir.build("zb-h1", ranks=4, microbatches=8)
    band = schedir.forecast(split, fitted_on_1f1b())
    assert band.unmeasured == ("backward_input", "backward_weight")
    note = "note: derived, not measured: backward_input (half of the backward), "
    for argv in (("show", "zb-h1"), ("export", "zb-h1", "-o", "zb.svg")):
        code, _, err = run(*argv, "--costs", "costs.json")
        assert (code, note in err) == (0, True)
    assert run("show", "1f1b", "--costs", "costs.json")[2] == ""
    code, _, err = run("search", "--costs", "costs.json", "--seconds", "0.1", "-o", "found.sched")
    found = schedir.loads(Path("found.sched").read_text())
    assert code == 0
    assert ("backward_input" in err) == (len(found.columns.where(Kind.BACKWARD_INPUT)) > 0)


def test_what_a_narrow_table_leaves_out_are_the_peaks() -> None:
    costs = CostModel(activation_bytes=2**30, unit="ms")
    names = ["1f1b", "interleaved-1f1b", "zbv", "pipedream"]
    text = table(schedir.compare(names, ranks=8, microbatches=32, costs=costs), 80)
    header = text[: text.index("\ninterleaved-1f1b")]
    assert all(name in header for name in ("makespan", "ratio", "bubble"))
    assert "peak" not in header
    assert re.search(r"Left out because the table is too wide: peak bytes, peak activations", text)
    assert max(map(len, text.splitlines())) <= 80


HOSTILE = Schedule.of('a|b_&%${}~^\\*`<i>"=', [0], ["0F0 0B0"])


def hostile() -> Comparison:
    return schedir.compare([HOSTILE, "1f1b"], ranks=1, microbatches=1)


def test_markdown_is_read_as_the_table() -> None:
    text = hostile().table("markdown")
    lines = [row for row in text.splitlines() if row.startswith("|")]
    cells = [
        [re.sub(r"\\(.)", r"\1", cell) for cell in re.split(r"(?<!\\) \| ", row[2:-2])]
        for row in lines
    ]
    assert {len(row) for row in cells} == {len(cells[0])}
    assert all(set(rule) <= {":", "-"} for rule in cells[1])
    whole = table(hostile()).split("\n\n")[0].splitlines()
    expected = [re.split(" {2,}", row.strip()) for row in whole]
    assert [[cell for cell in row if cell] for row in (cells[0], *cells[2:])] == expected
    assert not re.search(r"(?<!\\)[*`<>&]", text)


def test_latex_is_a_tabular_whose_specials_are_escaped() -> None:
    costs = CostModel(unit="us")
    two = schedir.build("interleaved-1f1b", ranks=1, microbatches=1)
    text = schedir.compare([HOSTILE, two], costs=costs).table("latex")
    head, *rows, foot = [line for line in text.splitlines() if not line.startswith("%")]
    assert re.fullmatch(r"\\begin{tabular}{[lr]+}", head)
    assert foot == r"\end{tabular}"
    columns = len(re.findall("[lr]", head.partition("}{")[2]))
    rows = [row for row in rows if row != r"\hline"]
    assert len(rows) == 3
    for row in rows:
        assert row.endswith(r" \\")
        assert len(re.findall(r"(?<!\\)&", row)) == columns - 1
        bare = re.sub(r"\\[&%$#_{}]|\\text\w+{}|\$\\(times|mu)\$", "", row[:-3])
        assert not set(bare) & set("%$#_{}~^\\")
    assert r"\$" in text
    assert r"$\times$ 1/2" in text
    assert r"$\mu$s" in text


def test_csv_holds_the_numbers_and_the_texts_as_they_are() -> None:
    comparison = hostile()
    rows = list(csv.DictReader(io.StringIO(comparison.table("csv"))))
    assert [row["target"] for row in rows] == [row.target for row in comparison.rows]
    for row, found in zip(comparison.rows, rows, strict=True):
        assert float(found["makespan"]) == row.makespan
        assert float(found["ratio"]) == comparison.ratio(row)
        assert found["peak_bytes"] == ""
    failed = schedir.compare(["1f1b", Schedule.of("x", [0], ["0B0"])], ranks=1, microbatches=1)
    *_, last = csv.DictReader(io.StringIO(failed.table("csv")))
    assert last["code"].startswith("S")
    assert last["makespan"] == ""


def test_the_command_writes_each_form(run: Run) -> None:
    targets = ("1f1b", "zb-h1")
    comparison = schedir.compare(targets)
    for form in FORMATS:
        text = run.prints("compare", *targets, "--format", form)
        assert text == comparison_text(comparison, form)
    assert run("compare", *targets, "--json")[1] == comparison.table("json")
    assert run("compare", *targets, "--format", "table")[1] == comparison.table()  # its old name
    assert run("compare", *targets, "--json", "--format", "csv")[0] == 2
    with pytest.raises(ValueError, match="form must be text, json, markdown, latex, csv, not 'x'"):
        comparison.table("x")  # type: ignore[arg-type]
