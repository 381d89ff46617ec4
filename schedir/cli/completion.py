"""`schedir completion`: the script with which a shell completes commands, options and schedules."""

from __future__ import annotations

import argparse
import re
from typing import Any

from schedir.checker import RULES
from schedir.cli.terminal import fail
from schedir.library import installed

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Print a script that completes commands, options, the names of schedules, and files. It "
        "knows the schedules that are installed when it is written. For bash and zsh: "
        'eval "$(schedir completion bash)" in ~/.bashrc; for fish: '
        "schedir completion fish > ~/.config/fish/completions/schedir.fish. It takes shtab: "
        "pip install 'schedir[completion]'."
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ModuleNotFoundError:
        return fail("completion needs shtab: pip install 'schedir[completion]'")
    names = " ".join(each.name for each in installed() if re.fullmatch(r"[\w.-]+", each.name))
    completed: dict[str | tuple[str, ...] | None, dict[str, Any]] = {
        "FILE": shtab.FILE,
        "TARGET": {
            "bash": "_schedir_name_or_file",
            "zsh": f"{{_alternative 'names:schedule:({names})' 'files:file:_files'}}",
            "fish": f"{names} {shtab.FILE['fish']}",
            "preamble": {
                "bash": f'_schedir_name_or_file() {{ compgen -W "{names}" -f -- "$1"; }}\n',
            },
        },
    }
    for command in args.commands.values():
        if command is not args.parser:
            command.fill()
        for action in command._actions:
            if action.metavar in completed:
                action.complete = completed[action.metavar]
            elif action.metavar == "CODE":
                action.choices = [*RULES]
    script = shtab.complete(args.whole, args.shell)
    print(script.replace('"(*):', '"*:'))  # zsh would complete the first of several arguments alone
    return 0
