"""Every built-in schedule, whatever its idea: drawn as its docstring draws it, clean in all shapes.

A schedule may refuse a shape that its idea has no meaning in, by raising ValueError, whose message
says which shapes it takes.
"""

from __future__ import annotations

import inspect
import random
import re
from itertools import product
from typing import Any

import pytest

import schedir
from schedir import LoadError, Schedule
from schedir.library import generator_of
from schedir.render.terminal_timeline import timeline_text
from tests.built_in import EVERY, variants
from tests.oracle import happens
from tests.sweeps import sweep

ROW = re.compile(r"rank +\d.*")


def built(name: str, ranks: int, microbatches: int, parameters: dict[str, Any]) -> Schedule | None:
    """The schedule; None where it refuses the shape, and says which it takes."""
    try:
        return schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)
    except LoadError as error:
        refused = str(error)
    assert name in refused
    assert "unpack" not in refused  # said in the user's words
    return None


@pytest.mark.parametrize("name", EVERY)
def test_the_docstring_draws_the_timeline(name: str) -> None:
    doc = inspect.cleandoc(generator_of(name).function.__doc__ or "")
    drawn = ROW.findall(doc)
    assert drawn, "no timetable"
    numbers = [int(row.split()[1]) for row in drawn]
    shape = 1 + max(numbers), 1 + max(int(m) for row in drawn for m in re.findall(r"F(\d+)", row))
    line = schedir.simulate(schedir.build(name, ranks=shape[0], microbatches=shape[1]))
    rows = ROW.findall(timeline_text(line))
    for row, picture in zip(rows, drawn, strict=False):
        # A picture may end before its timeline does.
        assert row.startswith(picture[:-3]) if picture.endswith("...") else row == picture


@sweep("ranks, others, run", [(2, 6, 4), (4, 20, 8)], quick=[(2, 6, 4)])
@pytest.mark.parametrize("name", EVERY)
def test_every_shape_is_clean_or_refused(name: str, ranks: int, others: int, run: int) -> None:
    """On so many ranks at most, of which the oracle runs the smallest, and some other shapes up to
    12 ranks and microbatches and 4 chunks."""
    chosen = [*variants(name), {"chunks": 1}, {"chunks": 4}]
    shapes = [(p, m, own) for p, m in product(range(1, ranks + 1), (1, 2, 4, 5)) for own in chosen]
    large = [(p, m, own) for p, m in product(range(1, 13), repeat=2) for own in chosen]
    taken = 0
    for ranks, microbatches, own in shapes + random.Random(name).sample(large, others):
        schedule = built(name, ranks, microbatches, own)
        if schedule is None:
            continue
        taken += 1
        report = schedir.check(schedule)
        assert report.ok, (ranks, microbatches, own, report.diagnostics[0].message)
        if ranks * microbatches <= run:
            assert happens(schedule, "rank") == "completes", (ranks, microbatches, own)
    assert taken >= 5
    assert built(name, 4, 8, {}) is not None, "the shape that commands take by default"
