"""Wrong schedules and exactly what is said of them.

Each case is a file, in tests/golden or in examples/broken, and a transcript in tests/golden: the
output of `schedir check` in every format. `pytest tests/test_golden.py --update-golden` writes the
transcripts anew; read the difference before you commit it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from schedir.checker import RULES
from schedir.cli import main
from schedir.render import outputs_of

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
BROKEN = ROOT / "examples" / "broken"
LESSONS = sorted(path for path in BROKEN.iterdir() if path.suffix in (".py", ".sched", ".csv"))
CASES = [*sorted(GOLDEN.glob("*.sched")), *LESSONS]


def command(path: Path) -> list[str]:
    """The arguments of `schedir` that the file's first line names."""
    first = path.read_text().partition("\n")[0]
    if path.suffix == ".csv":  # which has no comments
        return ["check", str(path.relative_to(ROOT))]
    program, *arguments = shlex.split(first.removeprefix("# "))
    assert (program, arguments[:2]) == ("schedir", ["check", str(path.relative_to(ROOT))])
    return arguments


def transcript(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    text = ""
    for output in outputs_of("check"):
        arguments = [*command(path), "--output-format", output]
        code = main(arguments)
        out, err = capsys.readouterr()
        text += f"$ schedir {shlex.join(arguments)}\n{out}{err}[exit code {code}]\n\n"
    return text.rstrip("\n") + "\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_transcript(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(ROOT)
    golden = GOLDEN / f"{path.stem}.txt"
    found = transcript(path, capsys)
    if request.config.getoption("--update-golden"):
        golden.write_text(found)
    assert golden.read_text() == found


def test_every_code_has_a_golden_message() -> None:
    said = "".join((GOLDEN / f"{path.stem}.txt").read_text() for path in CASES)
    assert set(re.findall(r"^(?:error|warning|note)\[(S\d+)\]", said, re.MULTILINE)) == set(RULES)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_finds_what_its_readme_says(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (row,) = (r for r in (BROKEN / "README.md").read_text().splitlines() if f"[{path.name}]" in r)
    assert main([*command(path), "--strict"]) == 1
    found = set(re.findall(r"^(?:error|warning)\[(S\d+)\].*\((.*)\)$", *said(capsys)))
    promised = {(code, RULES[code].name) for code in re.findall(r"S\d+", row)}
    assert promised <= found
    assert all(name in row for _, name in promised)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_answer_is_clean(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*command(BROKEN / "answers" / path.name), "--strict"]) == 0


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, re.RegexFlag]:
    return capsys.readouterr().out, re.MULTILINE
