"""A process that is killed while it saves leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launch import ROOT
from tests.sweeps import sweep


@pytest.mark.timeout(280)
@sweep("how", ["save", "async_save"], quick=["save"])
@sweep("seed, trials", [(0, 6), (1, 60)], quick=[(0, 6)])
def test_what_was_complete_loads(how: str, seed: int, trials: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.killed_saves", str(tmp_path / "folder"), how]
    command += [str(seed), str(trials)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=270)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == trials + 12
    for moment, is_over, is_there, values, refused, files, again in found:
        assert values in ([[1.0], [2.0]] if is_there else [[]]), moment
        assert is_there or not is_over, moment
        begun = f"there is no complete checkpoint in {tmp_path}/folder: there is no such folder"
        assert refused.startswith("" if is_there else begun), moment
        assert bool(refused) != is_there
        assert (files, again) == (2, [3.0]), f"{moment}: more than the two files of a new save"
    assert {tuple(values) for _, is_over, _, values, *_ in found if is_over} == {(1.0,), (2.0,)}
    assert {is_there for _, is_over, is_there, *_ in found if not is_over} >= {False}
