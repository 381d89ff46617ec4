"""Completion, as the shells themselves complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.checker import RULES
from schedir.cli import TASKS
from schedir.cli.export import LISTS
from schedir.ir import CHANNELS, TRANSPORTS
from schedir.render.outputs import TIMELINES
from tests.built_in import EVERY
from tests.command_line import Run

NAMES = {*EVERY}
ASK = {
    "bash": """
        source ./script
        while IFS= read -r line; do
            IFS=' ' read -r -a COMP_WORDS <<< "$line"
            [[ $line == *' ' ]] && COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            $(complete -p schedir | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            echo "${COMPREPLY[@]}"
        done
    """,
    "fish": """
        source ./script
        while read -l line
            echo (complete -C "$line" | string split -f 1 \\t)
        end
    """,
}
"""Scripts that read lines, and print for each what completes it."""


def answers(shell: str, *lines: str) -> list[set[str]]:
    """What a shell completes each line with, in a directory with the script."""
    done = subprocess.run(
        [shell, "-c", ASK[shell]],
        input="".join(f"{line}\n" for line in lines),
        env=os.environ | {"HOME": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [set(line.split()) for line in done.stdout.splitlines()]


def in_shells(*names: str) -> pytest.MarkDecorator:
    """Run the test in each of these shells; CI installs them."""
    return pytest.mark.parametrize(
        "shell",
        [
            pytest.param(
                name,
                marks=pytest.mark.skipif(not shutil.which(name), reason=f"{name} is not installed"),
            )
            for name in names
        ],
    )


@in_shells(*ASK)
def test_a_shell_completes_what_stands_there(run: Run, shell: str) -> None:
    Path("script").write_text(run.prints("completion", shell))
    for file in ("zap.sched", "costs.json"):
        Path(file).touch()
    asked: dict[str, set[str]] = {
        "schedir se": {"search"},
        "schedir show z": {name for name in NAMES if name.startswith("z")} | {"zap.sched"},
        "schedir show 1f1b --against dual": {"dualpipe", "dualpipev"},
        "schedir check 1f1b zap": {"zap.sched"},
        "schedir compare 1f1b interleaved-1f1b interleaved-z": {"interleaved-zb"},
        "schedir check --channel ": {*CHANNELS, *TRANSPORTS},
        "schedir export 1f1b --format torch": {"torch-csv", "torch-csv-comms"},
        "schedir show 1f1b --costs co": {"costs.json"},
        "schedir show 1f1b --micro": {"--microbatches"},
        "schedir explain S3": {code for code in RULES if code.startswith("S3")},
        "schedir completion ": {"bash", "zsh", "fish"},
    }
    assert dict(zip(asked, answers(shell, *asked), strict=True)) == asked


@in_shells("bash", "zsh", "fish")
def test_a_shell_reads_its_script(run: Run, shell: str) -> None:
    Path("script").write_text(run.prints("completion", shell))
    done = subprocess.run([shell, "-n", "script"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_whole(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no help breaks an option in two
    script = run.prints("completion", shell)
    words = set(re.findall(r"\w[\w-]*", script))
    assert {*NAMES, *RULES, *CHANNELS, *TRANSPORTS, *LISTS, *TIMELINES} <= words
    for command in [name for task in TASKS.values() for name in task]:
        named = set(re.findall(r"(?:^| )--([a-z][a-z-]+)", run(command, "--help")[1]))
        assert named <= words, command


def test_a_shell_there_is_no_script_for(run: Run) -> None:
    said = "error: argument SHELL: invalid choice: 'cmd' (choose from "
    assert run.refuses("completion", "cmd").startswith(said)


def test_a_missing_library_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    error = "error: completion needs shtab: pip install 'schedir[completion]'\n"
    assert run("completion", "bash") == (2, "", error)
