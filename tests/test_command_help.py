"""The help of the commands: what people do first, then examples that work, then the options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from schedir.cli import TASKS
from tests.command_line import Run
from tests.warm import commands

DUMPS = Path(__file__).parent / "data" / "flight_recorder"
NAMES = [name for commands in TASKS.values() for name in commands]


def examples(text: str) -> list[str]:
    """The examples in a help text, which stand between the usage and the description."""
    usage, second, *_ = text.split("\n\n")
    assert usage.startswith("usage: schedir ")
    head, *lines = second.splitlines()
    assert head == "examples:"
    return [line.strip() for line in lines]


def test_the_help_shows_what_people_do_and_the_commands_for_it(run: Run) -> None:
    text = run.prints("--help")
    assert max(map(len, text.splitlines())) <= 80
    headings = [
        line for line in text.splitlines()[3:-1] if line and not line.startswith((" ", "`"))
    ]
    *tasks, last = TASKS
    assert headings == [*tasks, "train", last]
    assert len(tasks) + 1 == 6
    for of_task in TASKS.values():
        for name, about in of_task.items():
            assert f"\n  {name:12}  {about}\n" in text
    assert "\n    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule 1f1b\n" in text


@pytest.mark.parametrize("name", NAMES)
def test_examples_come_first_and_work_in_an_empty_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = run.prints(name, "--help")
    shown = examples(text)
    assert len(shown) == 2
    assert "--json" not in text  # older names of --format work, and are not told
    assert "--output-format" not in text
    monkeypatch.setenv("PATH", f"{commands()}:/usr/bin:/bin")
    for number, example in enumerate(shown):
        assert f"schedir {name}" in example
        folder = Path(str(number))
        folder.mkdir()
        if name == "blame":  # it needs the dumps of a job
            shutil.copytree(DUMPS, folder / "dumps")
        script = f"set -o pipefail; {example}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stderr
        assert "error" not in done.stderr
