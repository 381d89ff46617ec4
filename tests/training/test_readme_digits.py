"""The README's script from a model to a checkpoint, as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.kit import everyone
from tests.runtime.on_ranks import on_ranks

README = Path(__file__).resolve().parents[2] / "README.md"


@on_ranks(2)
def test_it_learns_the_digits_and_goes_on_from_its_checkpoint(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README.read_text().split("## From a model to a checkpoint")[1]
    (script,) = re.findall(r"^```python\n(.*?)^```$", section.split("\n## ")[0], re.M | re.S)
    monkeypatch.chdir(everyone(tmp_path)[0])  # each rank has one of its own
    first: dict[str, Any] = {}
    exec(script, first)
    assert first["best"].metrics["accuracy"] > 0.9
    again: dict[str, Any] = {}
    exec(script, again)
    assert again["best"] == first["best"]  # there was nothing left to train
