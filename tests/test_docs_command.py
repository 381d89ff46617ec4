"""`schedir docs` finds a page, built or not, and opens it where a person can see it."""

from __future__ import annotations

import io
import webbrowser
from pathlib import Path
from unittest.mock import Mock, call

import pytest

import schedir
from schedir.cli import main
from tests.command_line import Run

PAGES = (
    *("index", "gpus", "how-to/gpus", "how-to/read-a-diagnostic", "explanation/search"),
    *("explanation/gpus", "reference/commands", "reference/rules", "reference/api/index"),
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose pages are built."""
    for page in PAGES:
        for name in (f"docs/{page}.md", f"build/docs/{page}.html"):
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    monkeypatch.setattr(schedir, "__file__", str(tmp_path / "schedir" / "__init__.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ([], "index.html"),
        (["read-a-diagnostic"], "how-to/read-a-diagnostic.html"),
        (["How-To/GPUs"], "how-to/gpus.html"),
        (["gpus"], "gpus.html"),
        (["S301"], "reference/rules.html#s301-wait-cycle"),
        (["wait-cycle"], "reference/rules.html#s301-wait-cycle"),
        (["s402"], "reference/rules.html#s105-missing-action"),
        (["check"], "reference/commands.html#schedir-check"),
        (["search"], "reference/commands.html#schedir-search"),
        (["explanation/search"], "explanation/search.html"),
    ],
)
def test_a_page_has_a_path(run: Run, checkout: Path, asked: list[str], found: str) -> None:
    assert run("docs", *asked) == (0, f"{checkout}/build/docs/{found}\n", "")


def test_the_source_stands_in_for_pages_that_are_not_built(run: Run, checkout: Path) -> None:
    (checkout / "build").rename(checkout / "gone")
    note = "note: the pages are not built: `make docs` in a checkout of schedir builds them\n"
    assert run("docs", "S301") == (0, f"{checkout}/docs/reference/rules.md\n", note)
    (checkout / "schedir").mkdir()
    (checkout / "docs").rename(checkout / "schedir" / "docs")  # as pip installs it
    assert run("docs", "S301")[:2] == (0, f"{checkout}/schedir/docs/reference/rules.md\n")
    (checkout / "schedir" / "docs").rename(checkout / "gone" / "too")
    said = "error: this installation of schedir has no documentation; "
    assert run.refuses("docs").startswith(said)


def test_a_misspelt_page_lists_near_ones(run: Run, checkout: Path) -> None:
    for asked, near in (
        ("diagnostic", "; did you mean how-to/read-a-diagnostic?"),
        ("serch", "; did you mean search or explanation/search?"),
        ("xyzzy", ""),
    ):
        assert run.refuses("docs", asked) == f"error: no page is named {asked!r}{near}\n"
    (checkout / "build" / "docs" / "gpus.html").unlink()
    named = "several pages are named 'gpus'; did you mean explanation/gpus or how-to/gpus?"
    assert run.refuses("docs", "gpus") == f"error: {named}\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_browser_opens_where_there_is_a_display(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    path = f"{checkout}/build/docs/reference/rules.html#s301-wait-cycle"
    for display, works, shown in ((":0", True, ""), (":0", False, path), ("", True, path)):
        monkeypatch.setenv("DISPLAY", display)
        monkeypatch.setattr(webbrowser, "open", opened := Mock(return_value=works))
        monkeypatch.setattr("sys.stdout", screen := Screen())
        assert main(["docs", "S301"]) == 0
        assert screen.getvalue().strip() == shown
        assert opened.mock_calls == ([call(f"file://{path}")] if display else [])


def test_every_page_that_an_error_names_exists(run: Run) -> None:
    pages = ("text-form", "authoring", "costs-file", "measure-and-predict", "read-a-diagnostic")
    for page in (*pages, "debug-a-hang"):
        assert Path(run("docs", page)[1].strip()).exists()
