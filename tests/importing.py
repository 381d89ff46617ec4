"""Modules that tests import from a folder, and forget."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules in a test's folder can be imported until it ends.

    Give them names that no other module has, such as one of the examples.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    forget_modules(tmp_path)


def forget_modules(folder: Path) -> None:
    """Have the modules in a folder imported anew."""
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]
