"""The page of what works together: its tests exist, and its errors are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.pages import DOCS, ROOT

PAGE = (DOCS / "reference" / "composition.md").read_text()


def texts(source: str) -> Iterator[str]:
    """The strings of a module; a … stands where an f-string has a value."""
    for node in ast.walk(ast.parse(source)):
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
    assert len(quoted) > 10
    left = set(quoted)
    for file in (ROOT / "schedir").rglob("*.py"):
        source = file.read_text()
        if any(one[:12].partition("…")[0] in source for one in left):  # else it isn't worth parsing
            left -= {one for one in left for text in texts(source) if one in text}
    assert not left
