"""The page of what works together: its tests exist, and its errors are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.pages import DOCS, ROOT

PAGE = (DOCS / "reference" / "composition.md").read_text()


def texts(file: Path) -> Iterator[str]:
    """The strings of a file; a … stands where an f-string has a value."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_test_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    found = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert not named - found


def test_each_error_is_one_of_the_code() -> None:
    refused = PAGE.partition("## What is refused")[2].partition("\n## ")[0]
    quoted = re.findall(r'"([^"]+)"', refused)
    every = [text for file in (ROOT / "schedir").rglob("*.py") for text in texts(file)]
    assert len(quoted) > 10
    assert not [one for one in quoted if not any(one in text for text in every)]
