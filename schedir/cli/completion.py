"""`schedir completion`: a script that completes commands, options and schedules in a shell.

    eval "$(schedir completion bash)"
    schedir completion fish > schedir.fish

Print a script that completes commands, options, names of schedules, and files. For bash put eval
"$(schedir completion bash)" into ~/.bashrc, and for zsh the same with zsh into ~/.zshrc. For fish
write the script to ~/.config/fish/completions/schedir.fish. It knows the schedules that are
installed today: write it again after you install more. It needs shtab: pip install
'schedir[completion]'.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from schedir.checker import RULES
from schedir.errors import SchedirError
from schedir.library import installed

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise SchedirError("completion needs shtab: pip install 'schedir[completion]'") from None
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
    print(script.replace('"(*):', '"*:'))  # else zsh completes only the first of several
    return 0
