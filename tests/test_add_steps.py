"""`--add-steps`: lists from elsewhere, such as torch's CSVs, get their OPTIM_STEPs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import schedir
from schedir import Kind
from tests.command_line import Run


@pytest.fixture
def run(run: Run) -> Run:
    """Run a command beside `theirs.csv`, which is 1F1B without its updates."""
    assert run("export", "1f1b", "-o", "theirs.csv")[0] == 0
    return run


def test_the_note_names_the_option_that_mends_it(run: Run) -> None:
    code, out, _ = run("check", "theirs.csv")
    assert code == 0
    assert "note[S213]: there is no OPTIM_STEP: the update is left to the caller" in out
    assert "--add-steps" in out
    assert run("check", "theirs.csv", "--strict")[0] == 0
    clean = "theirs.csv: clean under rank and every other channel model\n"
    assert run("check", "theirs.csv", "--add-steps", "--strict") == (0, clean, "")


def test_an_exported_list_has_them(run: Run) -> None:
    assert run("export", "theirs.csv", "--add-steps", "-o", "ours.sched") == (0, "", "")
    ours = schedir.loads(Path("ours.sched").read_text())
    listed = [[a for a in actions if a.kind is not Kind.REDUCE_GRAD] for actions in ours.flat]
    assert listed == [[*actions] for actions in schedir.build("1f1b").flat]


def test_they_are_drawn(run: Run) -> None:
    assert "*" not in run("show", "theirs.csv")[1]
    lines = run("show", "theirs.csv", "--add-steps")[1].splitlines()
    rows = [line for line in lines if line.startswith("rank ") and "F0" in line]
    assert [row.endswith("*") for row in rows] == [True] * 4
    against = run("show", "1f1b", "--against", "theirs.csv", "--add-steps")[1]
    assert sum(line.endswith("*") for line in against.splitlines()) == 8


def test_compared_schedules_have_them(run: Run) -> None:
    argv = ("compare", "theirs.csv", "1f1b", "--cost", "optim_step=1", "--json")
    spans = []
    for more in ([], ["--add-steps"]):
        _, out, _ = run(*argv, *more)
        spans.append({row["target"]: row["makespan"] for row in json.loads(out)["rows"]})
    assert spans[0]["theirs.csv"] == spans[0]["1f1b"] - 1
    assert spans[1]["theirs.csv"] == spans[1]["1f1b"] == spans[0]["1f1b"]


def test_what_has_its_own_stays_as_it_is(run: Run) -> None:
    for command in (("export", "pipedream"), ("check", "1f1b"), ("show", "zb.py")):
        Path("zb.py").write_text(
            "from schedir import *\n@schedule('zb')\ndef zb(pipe, rank):\n"
            "    for action in (forward(rank, 0), backward(rank, 0), optim_step(rank)):\n"
            "        yield action\n"
        )
        assert run(*command, "--add-steps") == run(*command)


def test_a_measured_run_has_run(run: Run) -> None:
    line = schedir.simulate(schedir.build("1f1b"))
    line.save("run.json")
    err = run.refuses("show", "run.json", "--add-steps")
    assert err == "error: run.json holds a timeline, and takes no --chunks, --set or --add-steps\n"
