"""The examples' words can be read where the encoding lacks some of their characters."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("train_*.py"))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_and_errors_are_legible(
    script: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for argv in (["--help"], ["--schedule", "→ö", "--in-process", "2"]):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "argv", [str(script), *argv])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        stream.flush()
        said.append((end.value.code, stream.buffer.getvalue().decode(encoding)))
    assert [code for code, _ in said] == [0, 2]
    assert "--microbatches" in said[0][1]
    assert "no schedule is named '->" in said[1][1]
