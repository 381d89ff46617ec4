"""The command line: stdout is the artefact, stderr the rest.

Exit codes: 0 success, 1 a schedule with errors, 2 a target or option that can't be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

import schedir
from schedir.cli.terminal import RefusedError, fail, refuse, say, tell
from schedir.errors import SchedirError
from schedir.render import legible

_COMMANDS = {
    "list": "list the schedules that have a name",
    "show": "draw the timeline of a schedule",
    "check": "prove that a schedule is right",
    "compare": "compare schedules, and say which is best",
    "search": "find a schedule for given costs and limits",
    "export": "write a schedule or its timeline to a file",
    "explain": "explain a diagnostic",
    "completion": "print a script that completes commands in a shell",
}
"""What each command is for; its module here has the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (by default `sys.argv`) and return its exit code."""
    legible(sys.stdout)
    legible(sys.stderr)
    with _warnings():
        try:
            args = _parser().parse_args(argv)
            code: int = args.run(args)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except RefusedError as refused:
            return refuse(refused)
        except SchedirError as error:
            return tell(error)
        except BrokenPipeError:
            _silence_stdout()
            return 141  # as the shell sees a program that SIGPIPE ends
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            _silence_stdout()
            return fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="schedir", description=schedir.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"schedir {schedir.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, allow_abbrev=False)
    parser.set_defaults(whole=parser, commands=commands.choices)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(fail(f"{message}; see `{self.prog} --help`"))


class _Command(_Parser):
    """The parser of a command, whose module is imported, and asked for its arguments, once the
    command is given."""

    def fill(self) -> None:
        """Have all arguments of the command."""
        command = import_module(f"schedir.cli.{self.prog.split()[-1]}")
        command.add_arguments(self)
        self.set_defaults(run=command.run, parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill()
        return super().parse_known_args(args, namespace)


class _ToStderr(logging.Handler):
    """Writes `warning: …`, on the `sys.stderr` of the moment, as callers of `main` replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.levelname.lower(), record.getMessage())


@contextmanager
def _warnings() -> Iterator[None]:
    """Show what schedir logs."""
    logger = logging.getLogger("schedir")
    handler = _ToStderr()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _silence_stdout() -> None:
    """Nobody takes what is still buffered: keep the flush at exit from failing once more."""
    # Where there is no file behind it, no flush can fail.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
