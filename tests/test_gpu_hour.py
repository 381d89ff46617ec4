"""The script of the first GPU hour, on the CPU: it stops at nothing, and says where ranks were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gpu_hour
import pytest
from gpu_hour import failures, row
from on_gpu.checks import checks
from on_gpu.launch import Check, run

from tests.runtime.features import FEATURES
from tests.sweeps import long

HANGS = """
import threading
from on_gpu.rank import begin, say
begin("cpu")
say("so far so good")
def in_vain(): threading.Event().wait()
in_vain()
"""
FAILS = """
import os, threading
if os.environ["RANK"] == "1": raise RuntimeError("of the test")
threading.Event().wait(5)
"""


def test_every_feature_has_a_row() -> None:
    for device in ("cpu", "cuda:0"):
        names = Counter(check.name for check in checks(device))
        assert set(names.values()) == {1}
        for name in FEATURES:
            assert any(found.startswith(f"{name}, on") for found in names)


@long
def test_a_check_that_hangs_is_ended_and_says_where_it_was() -> None:
    outcome = run(Check("hangs", ("-c", HANGS), ranks=2, limit=40.0))
    assert outcome.state == "hung"
    assert len(outcome.printed) == 2
    for text in outcome.printed:
        assert "in in_vain" in text


def test_a_rank_that_fails_is_named_and_ends_the_others() -> None:
    outcome = run(Check("fails", ("-c", FAILS), ranks=2, limit=100.0))
    assert outcome.state == "failed"
    assert outcome.note == "rank 1: RuntimeError: of the test"
    assert row(outcome).startswith("| fails | failed | ")
    assert "### fails: failed, rank 1" in failures([outcome])


@long
def test_the_table_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows of the real table beside one that fails, one that needs a GPU, and one too many."""
    real = {check.name: check for check in checks("cpu")}
    rows = [
        Check("fails", ("-c", "raise SystemExit('a | b')")),
        real["the machine"],
        real["pytest -m cuda"],
        real["1f1b, on 2 ranks"],
        Check("takes long", (), limit=1e6),
    ]
    monkeypatch.setattr(gpu_hour, "checks", lambda device: rows)
    file = tmp_path / "table.md"
    assert gpu_hour.main(["--device", "cpu", "--minutes", "50", "-o", str(file)]) == 1
    lines = [line.split(" | ") for line in file.read_text().splitlines()[2:7]]
    states = ["failed", "ok", "makes no sense here", "ok", "not reached"]
    assert [line[1] for line in lines] == states
    assert lines[0][3] == r"a \| b |"
    assert "1f1b equals plain training" in lines[3][3]
    assert capsys.readouterr().out == file.read_text() + "\n"
