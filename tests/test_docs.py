"""The guides and the API reference: made without a warning, and complete."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, as text."""
    pages = tmp_path_factory.mktemp("docs")
    command = ["-q", "-W", "--keep-going", "-b", "text", "-d", str(pages / ".cache")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *command, str(DOCS), str(pages)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return pages


def test_every_public_name_is_in_the_reference(made: Path) -> None:
    text = (made / "reference.txt").read_text()
    described = set(re.findall(r"^(?:class |exception |type )?(\w+)", text, re.MULTILINE))
    for module in ("schedir", "schedir.simulator", "schedir.search", "schedir.runtime"):
        public = set(importlib.import_module(module).__all__)
        assert {name for name in public if not name.startswith("__")} <= described
    assert set(importlib.import_module("schedir.training").__all__) <= described


def test_docstrings_read_well(made: Path) -> None:
    text = (made / "reference.txt").read_text()
    assert "`" not in text  # Markdown's code is code here too
    assert "Built-in immutable sequence" not in text


def test_the_guides_are_there(made: Path) -> None:
    for guide in DOCS.glob("*.md"):
        assert (made / f"{guide.stem}.txt").stat().st_size > 100
