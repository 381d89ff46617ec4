"""The budgets of pyproject.toml are kept: a number there only shrinks, unless a commit says why."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from size import sizes

from tests.warm import commands

ROOT = Path(__file__).resolve().parents[1]
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["schedir"]
SPARE = 0.02  # of a budget: who shrinks more than this lowers it


def test_each_package_is_as_small_as_planned() -> None:
    found = {
        package: {"modules": modules, "tokens": tokens}
        for package, (modules, tokens, _) in sizes(ROOT).items()
        if package in TOOL["budget"]
    }
    over = [
        f"{package}: {found[package][what]} {what}, planned {planned[what]}"
        for package, planned in TOOL["budget"].items()
        for what in ("modules", "tokens")
        if not (1 - SPARE) * planned[what] <= found[package][what] <= planned[what]
    ]
    assert not over, "make it smaller, lower the budget, or raise it and say why: " + str(over)


def test_each_package_has_a_budget() -> None:
    packages = {path.name for path in (ROOT / "schedir").iterdir() if path.is_dir()}
    assert packages - {"__pycache__", "docs"} <= {*TOOL["budget"]}


def test_tests_are_as_few_as_planned(request: pytest.FixtureRequest) -> None:
    lines = sum(file.read_bytes().count(b"\n") for file in (ROOT / "tests").rglob("*.py"))
    assert lines <= TOOL["suite"]["lines"]
    quick = [item for item in request.session.items if not item.get_closest_marker("long")]
    assert len(quick) <= TOOL["suite"]["cases"]


def measured(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the tool says of a command; its processes are not this one's children."""
    command = [str(commands() / "python"), str(ROOT / "tools" / "processor.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def orphan(code: str) -> list[str]:
    """A command that starts another, and does not wait for it."""
    left = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    return [sys.executable, "-c", left]


def test_what_an_orphan_takes_is_counted() -> None:
    """No RUSAGE_CHILDREN but a subreaper's has it."""
    done = measured(*orphan("import time\nwhile time.process_time() < 2: pass"))
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout.split()[0]) >= 2


def test_an_orphan_that_does_not_end_is_ended_and_named() -> None:
    done = measured("--grace", "0.1", *orphan("import time; time.sleep(1000)"))
    assert done.returncode == 1
    assert done.stderr == f"ended an orphan: {sys.executable} -c import time; time.sleep(1000)\n"


def test_who_takes_more_than_planned_fails() -> None:
    done = measured("--at-most", "0", sys.executable, "-c", "")
    assert done.returncode == 1
    assert done.stderr == "error: more than 0 times what is planned\n"
    assert measured("--at-most", "1.5", sys.executable, "-c", "exit(3)").returncode == 3
