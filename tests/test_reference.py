"""The generated pages of the reference are those of today's code.

`pytest tests/test_reference.py --update-golden` writes them anew; read the difference before you
commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from write_reference import GPUS, PAGES, REFERENCE, Need, need

import schedir
from schedir import Kind
from schedir.checker import RULES
from schedir.cli import TASKS
from schedir.ir.kinds import VALUES
from tests.runtime.lists import megatron
from tests.test_golden import compare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_current(page: Path, request: pytest.FixtureRequest) -> None:
    compare(page, PAGES[page](), request)


def test_the_pages_are_complete() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    for rule in RULES.values():
        assert f"\n## {rule.code} {rule.name}\n" in pages[REFERENCE / "rules.md"]
    for commands in TASKS.values():
        for name in commands:
            assert f"\n## schedir {name}\n" in pages[REFERENCE / "commands.md"]
    for row in (*(f"{kind.name} |" for kind in Kind), *(f"\n| {name} |" for name in VALUES)):
        assert row in pages[REFERENCE / "kinds.md"]
    assert "`1f1b`" in pages[GPUS]


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        # Rank 0 sends to rank 1 and receives from it; each over a communicator of its own.
        ("1f1b", 2, Need(2, 0, 1 * 8 * 9.2)),
        # Rank 1 does so with ranks 0 and 2.
        ("1f1b", 4, Need(4, 0, 2 * 8 * 9.2)),
        # Both ranks hold both stages.
        ("dualpipe", 2, Need(2, 1, 1 * 8 * 9.2)),
    ],
)
def test_a_rank_needs_what_its_list_says(name: str, ranks: int, expected: Need) -> None:
    found = need(schedir.build(name, ranks=ranks, microbatches=2 * ranks))
    assert (found.transfers, found.sums) == (expected.transfers, expected.sums)
    assert found.memory == pytest.approx(expected.memory)


def test_channels_that_go_together_need_one() -> None:
    assert need(megatron(2, 4)).transfers == 1
