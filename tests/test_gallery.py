"""The gallery shows every built-in schedule as it is."""

from __future__ import annotations

import pytest
from write_gallery import DOCS, pages

from tests.test_golden import compare


def test_the_gallery_is_current(request: pytest.FixtureRequest) -> None:
    found = pages()
    for path, text in found.items():
        compare(DOCS / path, text, request)
    pictures = {f"gallery/{path.name}" for path in (DOCS / "gallery").iterdir()}
    assert {"gallery.md", *pictures} == set(found)
