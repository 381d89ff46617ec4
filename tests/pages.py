"""Reads the pages of the documentation, and runs what they show, in the order of the page.

| fence | what becomes of it |
| --- | --- |
| `python` | runs, as the next part of the page's one script |
| any, after "save this as `NAME`" | is written to the file NAME |
| `console` | lines behind `$ ` run in bash; what they print is what stands below them |
| `sh` | runs in bash, and ends with exit code 0 |
| `text` directly after `python` | is what the script has printed since |
| any, below `<!-- not run: why -->` | nothing |

In what is printed, a line `…` stands for any lines, and `…` within a line for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import frozen
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LIMIT = 120  # seconds, of one command

_SAVED = re.compile(r"\b[Ss]ave (?:this|it|the \w+) as `([^`]+)`")
_OF_TORCHRUN = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)$|MASTER_|TORCHELASTIC_|LOCAL_WORLD|PYTEST"
)


@frozen
class Block:
    """A fence of a page: its language, its text, its line, and what stands directly before it."""

    language: str
    text: str
    line: int
    before: str

    @property
    def saved_as(self) -> str | None:
        """The file that the page says to save it as."""
        found = _SAVED.search(self.before)
        return found[1] if found else None

    @property
    def is_run(self) -> bool:
        return "<!-- not run:" not in self.before


def ranks_of(page: Path) -> int:
    """On how many ranks the Python of a page runs."""
    found = re.match(r"<!-- ranks: (\d+) -->", page.read_text())
    return int(found[1]) if found else 1


def blocks(page: Path) -> list[Block]:
    """All fences of a page."""
    lines = page.read_text().splitlines()
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence" and token.map:
            start = token.map[0]
            found.append(Block(token.info, token.content, start + 1, _before(lines, start)))
    return found


def _before(lines: list[str], fence: int) -> str:
    """The paragraph, or the comment, that ends above a fence."""
    above = fence
    while above and not lines[above - 1].strip():
        above -= 1
    first = above
    while first and lines[first - 1].strip():
        first -= 1
    return " ".join(lines[first:above])


def run(page: Path, first: bool, meet: Callable[[], object], programs: Path) -> None:
    """Run a page in the working directory; `programs` is the folder of `schedir` and `torchrun`.

    Of several processes that run it, one is the `first`, which writes files, runs commands and
    compares what is printed; `meet` returns once all processes have called it.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = StringIO()
    last = ""
    for block in blocks(page):
        place = f"{page.relative_to(ROOT)}:{block.line}"
        language, last = last, block.language
        if not block.language:
            raise AssertionError(f"{place}: this fence names no language")
        if not block.is_run:
            continue
        if block.saved_as:
            if first:
                Path(block.saved_as).write_text(block.text)
            meet()
        elif block.language == "python":
            if language != "text":
                printed = StringIO()
            code = compile("\n" * block.line + block.text, str(page), "exec")
            with redirect_stdout(printed):
                exec(code, names)
        elif block.language == "text" and language == "python":
            if first:
                compare(block.text, printed.getvalue(), place)
            printed = StringIO()
        elif block.language in ("console", "sh"):
            if first:
                _run_commands(block, place, programs)
            meet()


def _run_commands(block: Block, place: str, programs: Path) -> None:
    if block.language == "sh":
        code, output = _bash("set -e\n" + block.text, programs)
        assert code == 0, f"{place}: exit code {code}\n{output}"
        return
    for command, expected in _sessions(block.text):
        compare(expected, _bash(command, programs)[1], f"{place}: $ {command}")


def _sessions(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console, and what is shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield command, expected


def _bash(command: str, programs: Path) -> tuple[int, str]:
    """The exit code of a command, and what it prints on both streams."""
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    kept = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.match(name)}
    kept.pop("COLUMNS", None)
    done = subprocess.run(
        ["bash", "-c", command],
        env={**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout


def compare(expected: str, printed: str, place: str) -> None:
    """Fail where a page shows something else than what is printed."""
    shown, found = _stripped(expected), _stripped(printed)
    lines = (
        r"(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in shown.splitlines()
    )
    if not re.fullmatch("".join(lines), found):
        raise AssertionError(f"{place}\nThe page shows:\n{shown}\nIt prints:\n{found}")


def _stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def links(page: Path) -> Iterator[tuple[str, str]]:
    """What the links and pictures of a page lead to within the repository: file and anchor."""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for child in token.children or ():
            to = str(child.attrs.get("href" if child.type == "link_open" else "src", ""))
            if to and not re.match(r"[a-z]+:", to):
                file, _, anchor = to.partition("#")
                yield file, anchor


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    tokens = MarkdownIt().parse(page.read_text())
    titles = [
        "".join(child.content for child in after.children or ())
        for token, after in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
