"""What the tests here share: how an example runs, and the folder of all ranks."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runtime.kit import everyone
from tests.runtime.launch import ROOT


@pytest.fixture
def folder(rank: int, tmp_path: Path) -> Path:
    """The first rank's folder, on every rank."""
    return Path(everyone(tmp_path)[0]) if dist.is_initialized() else tmp_path


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Run an example, which ends well; what it prints on rank 0, as it says nothing elsewhere."""

    def run(command: str) -> str:
        script, *options = f"{command} --verify".split()
        path = str(ROOT / "examples" / script)
        monkeypatch.setattr(sys, "argv", [path, *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        out, err = capsys.readouterr()
        assert ended.value.code == 0, out + err
        assert (out != "") == (os.environ["RANK"] == "0")
        return out

    return run
