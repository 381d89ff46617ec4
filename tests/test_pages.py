"""What README and docs show is what happens: each page runs as printed, in an empty folder."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pages import DOCS, ROOT, anchors, blocks, compare, links, ranks_of, run
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import long
from tests.warm import REAL, commands

GENERATED = {"gallery.md", "reference/rules.md", "reference/commands.md", "reference/kinds.md"}
"""Pages that a tool writes from what the code does; other tests hold them to that."""

WRITTEN = [
    page
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT)) not in GENERATED
]
LONG = {
    "docs/how-to/fit-a-memory-limit.md",
    "docs/tutorials/first-pipeline.md",
    "docs/tutorials/hugging-face.md",
}
"""Pages that search long or start many processes: CI runs them, `make test` leaves them out."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[long] if name_of(page) in LONG else [])
        for page in WRITTEN
        if ranks_of(page) == 1
    ],
)
def test_a_page_runs_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = REAL if page.name == "README.md" else commands()
    run(page, first=True, meet=lambda: None, programs=programs)


@on_ranks(2)
@pytest.mark.parametrize("page", [p for p in WRITTEN if ranks_of(p) == 2], ids=name_of)
def test_a_page_runs_as_printed_on_two_ranks(
    page: Path, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = [tmp_path]
    dist.broadcast_object_list(folder)  # files are where both ranks can see them
    monkeypatch.chdir(folder[0])
    run(page, first=rank == 0, meet=dist.barrier, programs=commands())


def test_links_and_pictures_lead_somewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    dead = []
    for page in map(ROOT.joinpath, listed.stdout.split()):
        for file, anchor in links(page):
            to = page.parent / file if file else page
            missing = anchor and to.suffix == ".md" and to.exists() and anchor not in anchors(to)
            if not to.exists() or missing:
                dead.append(f"{name_of(page)}: {file}{'#' * bool(anchor)}{anchor}")
    assert not dead, "\n".join(dead)


def test_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 700


def test_guides_are_short() -> None:
    lengths = {page: len(page.read_text().splitlines()) for page in (DOCS / "how-to").glob("*.md")}
    assert max(lengths.values()) <= 80, lengths


@pytest.mark.parametrize(
    ("library", "fewer"),  # each row's script leaves out so many statements of the page's
    [("torch", [0]), ("deepspeed", [0]), ("colossalai", [0, 1]), ("megatron", [0])],
)
def test_statements_are_counted_as_told(library: str, fewer: list[int]) -> None:
    """As Python counts them, in the guides for those who come from elsewhere."""
    page = DOCS / "how-to" / f"from-{library}.md"
    _, script = (block.text for block in blocks(page) if block.language == "python")
    counted = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(script)))
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \|$", page.read_text(), re.MULTILINE)
    assert [int(ours) for _, ours in rows] == [counted - left_out for left_out in fewer]
    assert all(int(theirs) > int(ours) for theirs, ours in rows)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [("a\n…\nd\n", "a\nb\nc\nd\n"), ("loss …\n", "loss 1.23\n"), ("a  \n", "a\n")],
)
def test_an_ellipsis_stands_for_anything(shown: str, printed: str) -> None:
    compare(shown, printed, "here")


@pytest.mark.parametrize(("shown", "printed"), [("a\n", "a\nb\n"), ("a\n", "b\n"), ("a b", "ab")])
def test_what_a_page_shows_is_compared(shown: str, printed: str) -> None:
    with pytest.raises(AssertionError, match="It prints"):
        compare(shown, printed, "here")
