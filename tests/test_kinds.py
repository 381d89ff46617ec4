"""The two tables of what actions mean: a row that leaves something unsaid is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

import schedir
from schedir import Kind
from schedir.ir import kinds
from schedir.ir.kinds import VALUES, Meaning, Use, incomplete


class Row(str):
    """A kind that the table might have."""

    name: str
    meaning: Meaning


def row(token: str, meaning: Meaning) -> Row:
    made = Row(token)
    made.name, made.meaning = token, meaning
    return made


def use(does: str, value: str, **more: str) -> Use:
    return Use(does=does, value=value, at="end", **more)  # type: ignore[arg-type]


def test_the_tables_are_complete() -> None:
    assert incomplete(Kind) == []


def test_a_kind_may_occupy_compute_and_do_nothing() -> None:
    pause = row("PAUSE", Meaning("pause", "compute", "microbatch", (), cost=1))
    assert incomplete([*Kind, pause]) == []  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("meaning", "what"),
    [
        (Meaning("", "compute", "microbatch", ()), "X has no word"),
        (Meaning("x", "copy", "microbatch", ()), "X is on a copy, and so uses a value"),
        (
            Meaning("x", "send", "microbatch", (use("make", "saved"),)),
            "X is a send, and so ends one value",
        ),
        (
            Meaning("x", "send", "microbatch", (use("end", "saved"),)),
            "X has no kind that it meets: its value has no link",
        ),
        (
            Meaning("x", "compute", "microbatch", (use("end", "heat"),)),
            "X uses 'heat', which is no value",
        ),
        (
            Meaning("x", "compute", "microbatch", (use("make", "saved", beside="Y"),)),
            "X depends on a kind that there is not",
        ),
        (
            Meaning("x", "compute", "microbatch", (use("read", "weights"),)),
            "X must say which version of weights it uses",
        ),
        (
            Meaning("x", "compute", "microbatch", (use("read", "saved", version="newest"),)),
            "X must say which version of saved it uses",
        ),
        (
            Meaning("x", "compute", "stage", (use("end", "saved"),)),
            "X is for a whole stage, but uses the saved of one pair",
        ),
    ],
)
def test_an_incomplete_kind(meaning: Meaning, what: str) -> None:
    assert what in incomplete([*Kind, row("X", meaning)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"word": ""}, "the value 'saved' has no word"),
        ({"link": ("heat", 1)}, "the value 'saved' is linked to 'heat', which is no value"),
    ],
)
def test_an_incomplete_value(
    value: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VALUES, "saved", attrs.evolve(VALUES["saved"], **value))
    assert what in incomplete(Kind)


@pytest.mark.parametrize(
    ("without", "what"),
    [
        (Kind.RELOAD, "no kind ends the value 'stored', which must be ended"),
        (Kind.OFFLOAD, "no kind makes the value 'stored'"),
        (Kind.RECOMPUTE, "no kind ends the value 'kept', which must be ended"),
    ],
)
def test_a_value_without_a_kind(without: Kind, what: str) -> None:
    assert what in incomplete([kind for kind in Kind if kind is not without])


def test_the_import_refuses_an_incomplete_row() -> None:
    source = Path(kinds.__file__).read_text(encoding="utf-8")
    broken = source.replace('_end("stored"), _make("saved")', '_make("saved"),')
    assert broken != source
    with pytest.raises(ImportError, match="no kind ends the value 'stored', which must be ended"):
        exec(compile(broken, "kinds.py", "exec"), {"__name__": "schedir.ir.broken"})


ROWS = """
    CHECK = (
        "CHECK",
        Meaning(
            "check of the activation",
            "compute",
            "microbatch",
            (_end("saved"), _make("saved"), _make("digest")),
            cost=2,
        ),
    )
    REMAKE = (
        "REMAKE",
        Meaning("other recomputation", "compute", "microbatch", (_end("kept"), _make("saved"))),
    )
    SEND_ACT = ("""
USED = """
import schedir

found = schedir.search(ranks=2, microbatches=4, max_activations=1)
assert schedir.check(found).ok

checked = schedir.Schedule.of("checked", [0], ["0F0 0CHECK0 0B0 0OPTIM_STEP"])
line = schedir.simulate(checked, schedir.CostModel(forward=1.5, backward=2))
assert line.makespan == 6.5, line.makespan

for refused in (
    lambda: schedir.CostModel.fit([line]),
    lambda: schedir.simulate(checked, schedir.CostModel(activation_bytes=1)).memory(0),
):
    try:
        refused()
    except schedir.SchedirError as error:
        print(error)
"""


def test_a_new_row_breaks_nothing_and_is_left_out_nowhere(tmp_path: Path) -> None:
    """As rows of the tables alone: a kind of compute that has a value of its own, and one that
    takes from a queue of the Board."""
    kept = Path(schedir.__file__).parents[1]
    for package in ("schedir", "schedules"):
        shutil.copytree(
            kept / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    table = tmp_path / "schedir/ir/kinds.py"
    source = table.read_text(encoding="utf-8").replace("    SEND_ACT = (", ROWS)
    source = source.replace(
        "VALUES = {", "VALUES = {'digest': Value(word='digest', ended='never'),"
    )
    table.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", USED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    fit, size = done.stdout.splitlines()
    assert "add the field check to CostModel" in fit
    assert "CHECK uses the value 'digest', whose bytes are not known" in size
