"""Costs on the command line, measured files as targets, and two timelines on one axis."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import attrs
import pytest

import schedir
from schedir import CostModel, Timeline
from schedir.cli.arguments import size
from schedir.render import timeline_text
from schedir.render.outputs import drawn
from schedir.render.text import Screen, plain
from schedir.simulator import Measured, in_unit, median_step, save_timelines
from tests.command_line import Run


def measured(step: int, slower: float, name: str = "1f1b", **shape: int) -> Timeline:
    """A run of a schedule in seconds, `slower` than its costs."""
    line = schedir.simulate(
        schedir.build(name, **shape), CostModel(forward=0.125, backward=0.25, unit="s")
    )
    return attrs.evolve(
        line, starts=line.starts * slower, ends=line.ends * slower, measured=Measured(step, 1e-5)
    )


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps 3 to 6 take 4.125, 16.5, 8.25 and 5.5 s."""
    file = tmp_path_factory.mktemp("run") / "run.json"
    steps = enumerate((1, 4, 2, 4 / 3), 3)
    save_timelines([measured(step, slower) for step, slower in steps], file)
    return file


@pytest.fixture
def run(run: Run, steps: Path) -> Run:
    """Runs commands beside `run.json`."""
    shutil.copy(steps, "run.json")
    return run


def makespan(run: Run, *argv: str) -> float:
    out = run.prints("show", "--json", *argv)
    return float(json.loads(out)["makespan"])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ((), CostModel()),
        (("forward=2",), CostModel(forward=2)),
        (("forward=1,1,1,2", "optim_step=3"), CostModel(forward=(1, 1, 1, 2), optim_step=3)),
        (("latency=1e-1",), CostModel(latency=0.1)),
        (("optim_step=5", "overlapped=none", "recompute=2"), CostModel(optim_step=5)),
        (("boundary_bytes=1.5kB", "bandwidth=3000"), CostModel(latency=0.5)),
        (("weight_bytes=2Gi",), CostModel()),
    ],
)
def test_single_costs(run: Run, given: tuple[str, ...], meant: CostModel) -> None:
    argv = [word for cost in given for word in ("--cost", cost)]
    expected = schedir.simulate(schedir.build("fill-drain"), meant).makespan
    assert makespan(run, "fill-drain", *argv) == pytest.approx(expected)


def test_a_file_of_costs_and_single_ones_on_top(run: Run) -> None:
    CostModel(forward=2, backward=4, unit="ms").save("costs.json")
    assert makespan(run, "1f1b", "--costs", "costs.json") == 66
    assert makespan(run, "1f1b", "--costs", "costs.json", "--cost", "backward=2") == 44
    assert "makespan 66 ms, bubble" in run("show", "1f1b", "--costs", "costs.json")[1]


@pytest.mark.parametrize(
    ("cost", "why"),
    [
        ("forwad=1", "no cost is named 'forwad'; there are forward, backward, backward_input"),
        ("samples=1", "no cost is named 'samples'"),
        ("forward", "'forward' is not NAME=VALUE"),
        ("forward=", "'forward=' is not NAME=VALUE"),
        ("forward=-1", "forward: '-1' is not a number >= 0"),
        ("forward=nan", "forward: 'nan' is not a number"),
        ("forward=1,,2", "forward: '' is not a number"),
        ("forward=none", "forward: 'none' is not a number"),
        ("forward=inf", "forward must be finite"),
        ("bandwidth=0", "bandwidth must be above 0"),
        ("latency=1,2", "latency: --cost takes one number for all links"),
        ("weight_bytes=2XB", "weight_bytes: '2XB' is not a number of bytes, such as 40GiB"),
        ("weight_bytes=2iB", "weight_bytes: '2iB' is not a number of bytes"),
        ("unit=h", "unit: 'h' is none of s, ms, us"),
        ("forward=1,2,3", "forward"),
    ],
)
def test_a_bad_cost_is_an_error_that_names_it(run: Run, cost: str, why: str) -> None:
    assert why in run.refuses("show", "1f1b", "--cost", cost)


@pytest.mark.parametrize(
    ("text", "many"),
    [
        *(("0", 0), ("1500", 1500), ("40GiB", 40 * 2**30), ("16 GB", 16 * 10**9)),
        *(("1.5e9", 1_500_000_000), (".5kib", 512), ("2k", 2000), ("3Ti", 3 * 2**40)),
        *(("7b", 7), ("0.3", 0.3)),
    ],
)
def test_numbers_of_bytes(text: str, many: float) -> None:
    assert size(text) == many
    assert isinstance(size(text), type(many))


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e999", "1i", "1iB", "inf", "nan", "1 2", "4QB"]
)
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of bytes, such as 40GiB"):
        size(text)


@pytest.mark.parametrize("file", ["it.svg", "it.html", "it.json"])
def test_two_timelines_are_written_to_every_format(run: Run, file: str) -> None:
    memory = [] if file == "it.json" else ["--memory"]  # which a trace holds in any case
    costs = ["--cost", "forward=0.125", "--cost", "backward=0.25", *memory]
    code, out, err = run("export", "run.json", "--against", "gpipe", *costs, "-o", file)
    assert (code, out, err) == (0, "", "")
    form = {"it.json": "perfetto"}.get(file, file[3:])
    alone = run("export", "run.json", *memory, "--format", form)
    assert alone[0] == 0
    assert len(Path(file).read_text()) > len(alone[1]) > 1000


def test_costs_that_are_given_twice_or_are_no_file(run: Run) -> None:
    twice = run.refuses("show", "1f1b", "--cost", "forward=1", "--cost", "forward=2")
    assert twice == "error: --cost names forward twice\n"
    assert "none.json" in run.refuses("show", "1f1b", "--costs", "none.json")


def test_a_measured_file_is_drawn_at_its_median_step(run: Run) -> None:
    assert makespan(run, "run.json") == 5.5
    assert makespan(run, "run.json", "--step", "4") == 16.5
    code, out, _ = run("show", "run.json")
    assert code == 0
    assert out.startswith("1f1b: 4 ranks, 4 stages, 8 microbatches\n")
    assert "\nmakespan 5.5 s, bubble 27.3%, measured at step 6\n" in out
    code, out, _ = run("export", "run.json", "--format", "sched")
    assert (code, out) == (0, schedir.dumps(schedir.build("1f1b")))


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["run.json", "--step", "9"], "run.json holds no step 9; there are 3 to 6"),
        (["1f1b", "--step", "3"], "--step is for files of measured timelines"),
        (["run.json", "--ranks", "8"], "run.json has 4 ranks, not 8; leave --ranks out"),
        (["run.json", "--microbatches", "4"], "run.json has 8 microbatches, not 4"),
        (["run.json", "--chunks", "2"], "takes no --chunks, --set or --add-steps"),
        (["run.json", "--cost", "forward=2"], "--costs and --cost are for schedules"),
        (["1f1b", "--against", "run.json"], "the default costs have none"),
        (["1f1b", "--against", "nope"], "no schedule is named 'nope'"),
        (["1f1b", "--against", "gpipe", "--json"], "--format json prints numbers only"),
        (["1f1b", "--against", "gpipe", "--actions"], "--against draws two"),
        (["empty.json"], "empty.json holds no timeline"),
        (["none.json"], "none.json: "),
    ],
)
def test_what_can_not_be_drawn(run: Run, argv: list[str], why: str) -> None:
    save_timelines([], "empty.json")
    assert why in run.refuses("show", *argv)


def rows_under(text: str, name: str) -> list[str]:
    """The four lines of the drawing below a name."""
    lines = text.splitlines()
    return lines[lines.index(name) + 1 :][:4]


@pytest.mark.parametrize(
    "argv", [["1f1b", "--against", "run.json"], ["run.json", "--against", "1f1b"]]
)
def test_predicted_stands_above_measured_on_one_axis(run: Run, argv: list[str]) -> None:
    costs = ["--cost", "forward=0.125", "--cost", "backward=0.25"]
    out = run.prints("show", *argv, "--step", "5", *costs)
    above, below = rows_under(out, "predicted"), rows_under(out, "measured, step 5")
    assert out.index("\npredicted\n") < out.index("\nmeasured, step 5\n")
    assert "\ntime (s) 0..8.25\n" in out
    start = above[0].index("F0")
    # Twice as slow, so that everything is twice as far to the right.
    assert [below[r].index("F0") - start for r in range(4)] == [
        2 * (above[r].index("F0") - start) for r in range(4)
    ]
    assert "predicted: makespan 4.125 s, bubble 27.3%\n" in out
    assert "measured, step 5: makespan 8.25 s, bubble 27.3%\n" in out


def test_a_second_schedule_has_the_shape_of_what_was_measured(run: Run) -> None:
    save_timelines([measured(0, 1, ranks=2, microbatches=3)], "small.json")
    out = run("show", "gpipe", "--against", "small.json", "--cost", "forward=0.125")[1]
    assert out.startswith("fill-drain: 2 ranks, 2 stages, 3 microbatches\n1f1b: 2 ranks, 2 stages")
    out = run("show", "1f1b", "--against", "interleaved-1f1b", "--chunks", "1", "--ranks", "2")[1]
    assert "\ninterleaved-1f1b: 2 ranks, 2 stages" in out


def test_times_are_shown_in_the_unit_that_they_are_read_in(run: Run) -> None:
    costs = ["--cost", "forward=0.0001", "--cost", "backward=0.0002", "--cost", "unit=s"]
    out = run("show", "1f1b", *costs)[1]
    assert "\ntime (ms) 0..3.3\n" in out
    assert "\nmakespan 3.3 ms, bubble 27.3%\n" in out
    out = run("show", "1f1b", *costs, "--against", "run.json")[1]
    assert "\npredicted: makespan 0.0033 s, bubble 27.3%\n" in out
    assert makespan(run, "1f1b", *costs) == pytest.approx(0.0033)
    costs = ["--cost", "forward=10", "--cost", "backward=20", "--cost", "unit=us"]
    assert "makespan 330 µs" in run("show", "1f1b", *costs)[1]


def test_of_one_name_the_timelines_are_numbered(run: Run) -> None:
    out = run("show", "1f1b", "--against", "1F1B")[1]
    assert "\n1f1b (1)\n" in out
    assert rows_under(out, "1f1b (1)") == rows_under(out, "1f1b (2)")


def test_units_are_made_one() -> None:
    line = measured(2, 1)
    ms = in_unit(line, "ms")
    assert (ms.makespan, ms.unit) == (4125, "ms")
    assert ms.measured == Measured(2, 0.01)
    assert in_unit(ms, "s").makespan == pytest.approx(4.125)
    plain = schedir.simulate(line.schedule)
    assert in_unit(plain, "us") == attrs.evolve(plain, unit="us")
    with pytest.raises(ValueError, match="no timeline"):
        median_step([])
    steps = [measured(step, slower) for step, slower in enumerate((9, 1, 5, 3))]
    assert median_step(steps) is steps[3]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", ["full", "overview"])
def test_the_drawing_of_two_fits_and_shows_every_cell(width: int, name: str) -> None:
    screen = Screen(width, 24 if name == "overview" else None)
    text = plain(drawn(measured(0, 1), screen, against=measured(1, 1.5)))
    drawing = text.partition("\nF forward")[0].split("\n\n", 1 if name == "full" else 0)[-1]
    drawing = drawing[drawing.index("\nrank ") if name == "overview" else 0 :]
    assert max(map(len, drawing.splitlines()[1:])) <= width
    if name == "full":
        for microbatch in range(8):
            assert len(re.findall(rf"\bB{microbatch}\b", drawing)) == 8
    else:
        assert len(drawing.splitlines()) >= 11
    assert "predicted" not in timeline_text(measured(0, 1))
