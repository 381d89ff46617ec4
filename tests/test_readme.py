"""What the README prints and promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import schedir
from schedir.cli import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; every second fence ends one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's schedule of one's own, saved as printed."""
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


@pytest.mark.usefixtures("mine")
def test_the_schedule_of_ones_own_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        line
        for line in "".join(blocks("")).splitlines()
        if " mine.py " in line and line.startswith("schedir")
    ]
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()[1:]) == 0
    out = capsys.readouterr().out
    assert "rank 1     F0 F1 B0--- B1---" in out
    assert "mine: clean under rank" in out


def test_the_schedule_of_ones_own_is_twenty_lines() -> None:
    assert len(blocks("python")[0].splitlines()) <= 20


def test_the_schedule_of_ones_own_is_what_its_docstring_says(mine: Path) -> None:
    built = schedir.build(mine, ranks=2, microbatches=4)
    assert schedir.check(built).ok
    assert [r.peak_activations for r in schedir.simulate(built).ranks] == [2, 2]


def test_the_pictures_are_real(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "1f1b"]) == 0
    assert capsys.readouterr().out.rstrip() in README
    late = tmp_path / "late.sched"
    late.write_text(
        "schedir 1\nname late\nmicrobatches 2\nplacement 0 1\n"
        "rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP\n"
        "rank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP\n"
    )
    assert main(["check", str(late)]) == 1
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "").rstrip() in README


def test_every_command_is_described() -> None:
    for command in ("list", "show", "check", "compare", "export", "explain"):
        assert f"`schedir {command}" in README


def test_the_costs_are_found_and_used_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = schedir.build("1f1b", ranks=8, microbatches=8)
    names = {"schedir": schedir, "timelines": 6 * [schedir.simulate(run)]}
    exec(blocks("python")[1], names)
    assert schedir.CostModel.load("costs.json") == names["costs"]
    assert names["table"].best.target == "interleaved-1f1b"  # type: ignore[attr-defined]
    assert names["band"].median == pytest.approx(117)  # type: ignore[attr-defined]  # 3 (32 + 7)
