"""The guides for those who come from elsewhere count statements as Python does."""

from __future__ import annotations

import ast
import re

import pytest

from tests.pages import DOCS, blocks


@pytest.mark.parametrize(
    ("library", "fewer"),  # each row's script leaves out so many statements of the page's
    [("torch", [0]), ("deepspeed", [0]), ("colossalai", [0, 1]), ("megatron", [0])],
)
def test_statements_are_counted_as_told(library: str, fewer: list[int]) -> None:
    page = DOCS / "how-to" / f"from-{library}.md"
    _, script = (block.text for block in blocks(page) if block.language == "python")
    counted = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(script)))
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \|$", page.read_text(), re.MULTILINE)
    assert [int(ours) for _, ours in rows] == [counted - left_out for left_out in fewer]
    assert all(int(theirs) > int(ours) for theirs, ours in rows)
