"""Wrong schedules and exactly what is said of them.

Each case has a transcript in tests/golden, the output of `schedir check` in every format. Cases are
the example of each rule, and the files in tests/golden and in examples/broken. `pytest
tests/test_golden.py --update-golden` writes the transcripts anew; read the difference before you
commit it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import attrs
import pytest

import schedir
from schedir.checker import RULES, Rule
from schedir.cli import main
from schedir.render.diagnostics import FORMATS, command_options

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
BROKEN = ROOT / "examples" / "broken"
LESSONS = sorted(path for path in BROKEN.iterdir() if path.suffix in (".py", ".sched", ".csv"))
FILES = [*sorted(GOLDEN.glob("*.sched")), *LESSONS]


def case(rule: Rule) -> str:
    """The name of the case that is a rule's example."""
    return f"{rule.code}_{rule.name.replace('-', '_')}"


def command(path: Path) -> list[str]:
    """The arguments of `schedir` that the file's first line names."""
    first = path.read_text().partition("\n")[0]
    if path.suffix == ".csv":  # which has no comments
        return ["check", str(path.relative_to(ROOT))]
    program, *arguments = shlex.split(first.removeprefix("# "))
    assert (program, arguments[:2]) == ("schedir", ["check", str(path.relative_to(ROOT))])
    return arguments


def transcript(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    text = ""
    for form in FORMATS:
        arguments = [*command, "--format", form]
        code = main(arguments)
        out, err = capsys.readouterr()
        text += f"$ schedir {shlex.join(arguments)}\n{out}{err}[exit code {code}]\n\n"
    return text.rstrip("\n") + "\n"


def compare(golden: Path, found: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        golden.write_text(found, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == found


@pytest.mark.parametrize("rule", RULES.values(), ids=case)
def test_what_is_said_of_an_example(
    rule: Rule,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("example.sched").write_text(rule.example)
    arguments = ["check", "example.sched", *command_options(rule).split()]
    found = transcript(arguments, capsys)
    assert re.search(rf"^{rule.severity}\[{rule.code}\]: .*  \({rule.name}\)$", found, re.MULTILINE)
    compare(GOLDEN / f"{case(rule)}.txt", found, request)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_said_of_a_file(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(ROOT)
    compare(GOLDEN / f"{path.stem}.txt", transcript(command(path), capsys), request)


@pytest.mark.parametrize("rule", RULES.values(), ids=case)
def test_the_texts_of_a_rule_name_what_its_findings_have(rule: Rule) -> None:
    report = schedir.check(schedir.loads(rule.example), **dict(rule.options))
    finding = next(each for each in report.diagnostics if each.code == rule.code)
    # Even where a change is known, in the place of which the advice is not shown.
    advice = attrs.evolve(finding, change=None).help or ""
    for text in (finding.message, *finding.labels, *finding.notes, finding.help or "", advice):
        assert text == text.strip()
        assert not set("{}") & set(text)


def test_there_is_no_other_transcript() -> None:
    cases = {case(rule) for rule in RULES.values()} | {path.stem for path in FILES}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == cases


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_finds_what_its_readme_says_and_its_answer_is_clean(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (row,) = (r for r in (BROKEN / "README.md").read_text().splitlines() if f"[{path.name}]" in r)
    assert main([*command(path), "--strict"]) == 1
    out = capsys.readouterr().out
    found = set(re.findall(r"^(?:error|warning)\[(S\d+)\].*\((.*)\)$", out, re.MULTILINE))
    promised = {(code, RULES[code].name) for code in re.findall(r"S\d+", row)}
    assert promised <= found
    assert all(name in row for _, name in promised)
    assert main([*command(BROKEN / "answers" / path.name), "--strict"]) == 0
