"""The guides and the API reference: made without a warning, and complete."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.sweeps import long

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PUBLIC = (
    *("schedir", "schedir.simulator", "schedir.finder", "schedir.render"),
    *("schedir.runtime", "schedir.training"),
)


@long
def test_the_pages_are_made_without_a_warning_and_have_all_public_names(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "text", DOCS, tmp_path],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / page.relative_to(DOCS)).with_suffix(".txt").stat().st_size > 100
    described: set[str] = set()
    for module in PUBLIC:
        text = (tmp_path / f"reference/api/{module}.txt").read_text()
        described.update(re.findall(r"^(?:class |exception |type )?(\w+)", text, re.MULTILINE))
        public = importlib.import_module(module).__all__
        assert {name for name in public if not name.startswith("__")} <= described
        assert "`" not in text  # Markdown's code is code here too
        assert "Built-in immutable sequence" not in text  # a type's docstring
