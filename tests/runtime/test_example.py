"""The main job, at a size that a test can afford."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import schedir
from tests.built_in import GENERATORS, NAMES
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import long, sweep

SMALL = "--layers 4 --width 32 --heads 2 --context 32 --batch 8 --steps 12 --lr 0.01 --verify"


def switched(name: str) -> list[str]:
    """The schedule as it is, and with each of its switches on."""
    parameters = GENERATORS[name].parameters.values()
    switches = [p.name for p in parameters if isinstance(p.default, bool)]
    return [name, *(f"{name} --set {switch}=true" for switch in switches)]


@sweep(
    "schedule",
    [*(one for name in NAMES for one in switched(name)), "mine.py", "mine.sched"],
    quick=["1f1b", "mine.py"],
)
@pytest.mark.filterwarnings("default")
@on_ranks(2)
def test_the_example_trains_and_verifies(
    schedule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "mine" in schedule:
        file = tmp_path / "mine.py"
        file.write_text((ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0])
        listed = tmp_path / "mine.sched"
        listed.write_text(schedir.dumps(schedir.build(file, ranks=2, microbatches=4)))
        schedule = str(tmp_path / schedule)
    script = str(ROOT / "examples" / "train_gpt.py")
    monkeypatch.chdir(tmp_path)  # where it writes its page
    monkeypatch.setattr(sys, "argv", [script, "--schedule", *f"{schedule} {SMALL}".split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    if os.environ["RANK"] != "0":
        assert out == ""
        return
    assert "tensors equal, bit for bit" in out
    assert re.search(r"^rank 1  .*F0", out, re.MULTILINE)  # the timeline that it ran
    # Of 12 steps, on a machine that does other things: there may be no band.
    predicted = r"predicted .*: [\d.]+ ms at their medians, (9 of 10|no band: .*rank)"
    for makespan in (predicted, r"measured .*: [\d.]+ ms$"):
        assert re.search(f"^makespan of a step, {makespan}", out, re.MULTILINE)
    assert out.endswith("in a browser: train_gpt.html\n")
    page = Path("train_gpt.html").read_text()
    assert "measured" in page
    assert "predicted" in page
    found = re.search(r"held-out loss ([\d.]+) → ([\d.]+)", out)
    assert found is not None
    before, after = map(float, found.groups())
    assert after < before - 0.5


@long
def test_the_example_runs_all_ranks_in_one_process_in_any_locale() -> None:
    arguments = f"examples/train_gpt.py --in-process 4 --schedule 1f1b {SMALL}".split()
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},  # which has no arrow
        capture_output=True,
        encoding="cp1252",
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "tensors equal, bit for bit" in result.stdout
    assert re.search(r"^rank 3  .*F0", result.stdout, re.MULTILINE)
    assert re.search(r"held-out loss [\d.]+ -> [\d.]+", result.stdout)


@long
def test_a_wrong_schedule_ends_with_one_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.sched"
    wrong.write_text(
        "schedir 1\nname x\nmicrobatches 1\nplacement 0 1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0\n"
    )
    result = torchrun(2, "examples/train_gpt.py", "--schedule", str(wrong))
    assert result.returncode != 0
    assert "error: S201 backward-before-forward: 0B0 is listed before 0F0" in result.stderr
    assert str(ROOT / "schedir") not in result.stderr  # no frame of schedir's own
