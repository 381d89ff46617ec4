"""The two tables of what actions mean: a row that leaves something unsaid is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from schedir import Kind
from schedir.ir import kinds
from schedir.ir.kinds import VALUES, Meaning, Use, Value, incomplete


class Row(str):
    """A kind that the table might have."""

    name: str
    meaning: Meaning


def row(meaning: Meaning) -> Row:
    made = Row(meaning.token)
    made.name, made.meaning = meaning.token, meaning
    return made


def use(does: str, value: str, **more: str) -> Use:
    return Use(does=does, value=value, at="end", **more)  # type: ignore[arg-type]


def test_the_tables_are_complete() -> None:
    assert not [*incomplete([*Kind])]
    # A value says its size, so that none takes no bytes because nobody has thought of it.
    with pytest.raises(TypeError, match="size"):
        Value(word="digest")  # type: ignore[call-arg]


def test_a_kind_may_occupy_compute_and_do_nothing() -> None:
    pause = row(Meaning("PAUSE", "pause", "compute", (), cost=1))
    assert not [*incomplete([*Kind, pause])]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("meaning", "what"),
    [
        (Meaning("X", "", "compute", ()), "X has no word"),
        (Meaning("X", "x", "copy", ()), "X is on a copy, and so uses a value"),
        (
            Meaning("X", "x", "copy", (use("make", "ran"),)),
            "X is a copy, and so makes a value that has a size",
        ),
        (
            Meaning("X", "x", "copy", (), letter="<", stage_wide=True),
            "X has the letter < of RELOAD",
        ),
        (
            Meaning("X", "x", "copy", (use("end", "saved"), use("make", "stored")), cost=1),
            "X is a copy, whose cost is the time of its bytes",
        ),
        (
            Meaning("X", "x", "copy", (use("read", "saved"), use("make", "stored"))),
            "X is a copy that reads the saved: what ends it would not wait, so end it, and make it",
        ),
        (
            Meaning("X", "x", "send", (use("make", "saved"),)),
            "X is a send, and so ends one value",
        ),
        (
            Meaning("X", "x", "send", (use("end", "saved"),)),
            "X has no kind that it meets: its value has no link",
        ),
        (
            Meaning("X", "x", "compute", (use("end", "heat"),)),
            "X uses 'heat', which is no value",
        ),
        (
            Meaning("X", "x", "compute", (use("make", "saved", beside="Y"),)),
            "X depends on a kind that there is not",
        ),
        (
            Meaning("X", "x", "compute", (use("read", "weights"),)),
            "X must say which version of weights it uses",
        ),
        (
            Meaning("X", "x", "compute", (use("read", "saved", version="newest"),)),
            "X must say which version of saved it uses",
        ),
        (
            Meaning("X", "x", "compute", (use("end", "saved"),), stage_wide=True),
            "X is for a whole stage, but uses the saved of one pair",
        ),
    ],
)
def test_an_incomplete_kind(meaning: Meaning, what: str) -> None:
    assert what in incomplete([*Kind, row(meaning)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"word": ""}, "the value 'saved' has no word"),
        ({"size": "heat"}, "the value 'saved' has the size 'heat', which there is not"),
        ({"link": ("heat", 1)}, "the value 'saved' is linked to 'heat', which is no value"),
    ],
)
def test_an_incomplete_value(
    value: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VALUES, "saved", attrs.evolve(VALUES["saved"], **value))
    assert what in incomplete([*Kind])


@pytest.mark.parametrize(
    ("without", "what"),
    [
        (Kind.RELOAD, "no kind ends the value 'stored', which must be ended"),
        (Kind.OFFLOAD, "no kind makes the value 'stored'"),
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
