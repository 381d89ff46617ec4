"""The command line: results on stdout, everything else on stderr.

Exit codes: 0 success, 1 a schedule with errors, 2 a target or option that can't be used.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import Any, NoReturn

import schedir
from schedir.cli.terminal import fail, say, see, tell
from schedir.errors import SchedirError
from schedir.render.text import legible

_ABOUT = "schedir: write, prove and run pipeline-parallel training schedules."

TASKS = {
    "see schedules": {
        "list": "list the schedules that have a name",
        "show": "draw the timeline of a schedule, and say why ranks are idle",
    },
    "prove one right": {
        "check": "prove a schedule free of deadlocks, or list its faults",
        "explain": "explain a code that check prints, such as S301",
        "blame": "name the rank that a hung job waits for, from torch's dumps",
    },
    "compare and predict": {
        "compare": "rank schedules by time and memory, for your costs",
    },
    "find a better one": {
        "search": "find a quick schedule for your costs and memory limit",
    },
    "write files": {
        "export": "write a picture, a trace, torch's CSV, or the list of actions",
    },
    "get help": {
        "docs": "open a page of the documentation",
        "completion": "print a script that completes commands in a shell",
    },
}
"""The commands by what people do with them, each with one line. A command's module has the rest."""

_TRAIN = """\
train
  torchrun      run a training script on several processes; in a checkout, try
    torchrun --nproc-per-node 2 examples/train_gpt.py --schedule 1f1b
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (by default `sys.argv`) and return its exit code."""
    with _streams():
        try:
            try:
                args = parser().parse_args(argv)
                code: int = args.run(args)
                return code
            except SchedirError as error:
                code = tell(error)
                see(error.page or args.parser.command)
                return code
            finally:
                sys.stdout.flush()  # here, so that an error is told
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            # Drop what stdout still buffers, or the flush at exit fails again. If it has no file
            # behind it, no flush can fail.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return 141  # as the shell sees a program that SIGPIPE ends
            return fail(str(error))


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = _Parser(prog="schedir", description=_ABOUT, allow_abbrev=False)
    whole.add_argument("--version", action="version", version=f"schedir {schedir.__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", parser_class=Command)
    for task in TASKS.values():
        for name, text in task.items():
            commands.add_parser(name, help=text, allow_abbrev=False)
    whole.set_defaults(whole=whole, commands=commands.choices)
    return whole


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as the commands do."""

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.prog.split()[-1]

    def error(self, message: str) -> NoReturn:
        fail(message)
        page = self.command if " " in self.prog else "commands"
        print(f"see: {self.prog} --help, or schedir docs {page}", file=sys.stderr)
        self.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, and let the errors of the stream through."""
        print(message, end="", file=file)

    def format_help(self) -> str:
        """What people do with schedir, and the commands for it."""
        tasks = [
            "".join([f"{task}\n", *(f"  {name:12}  {text}\n" for name, text in commands.items())])
            for task, commands in TASKS.items()
        ]
        return "\n".join(
            [
                "usage: schedir [-h] [--version] COMMAND ...\n",
                f"{self.description}\n",
                *tasks[:-1],
                _TRAIN,
                tasks[-1],
                "`schedir COMMAND --help` shows examples first, then every option.\n",
            ]
        )


class Command(_Parser):
    """The parser of a command. Its module is imported once the command is given."""

    def fill(self) -> None:
        """Add the arguments of the command, and what its docstring says: a title, two examples, the
        description, and perhaps an epilog."""
        command = import_module(f"schedir.cli.{self.command}")
        command.add_arguments(self)
        _, examples, *texts = [*str(command.__doc__).split("\n\n"), "", "", ""]
        self.examples: list[str] = [line.strip() for line in examples.splitlines()]
        self.description, self.epilog, *_ = (" ".join(text.split()) for text in texts)
        self.set_defaults(run=command.run, parser=self)

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """Parse arguments, which the command adds first. Unknown ones are an error here, where the
        options are known."""
        self.fill()
        found, unknown = super().parse_known_args(*given, **named)
        if unknown:
            from difflib import get_close_matches  # for who mistypes

            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def format_help(self) -> str:
        """Usage, examples, and then what argparse writes."""
        usage, _, rest = argparse.ArgumentParser.format_help(self).partition("\n\n")
        return "\n".join([usage, "", "examples:", *(f"  {e}" for e in self.examples), "", rest])


class _ToStderr(logging.Handler):
    """Writes `warning: …` to the current `sys.stderr`, which callers of `main` may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.levelname.lower(), record.getMessage())


class _Closed(io.RawIOBase):
    """A stream that the caller has closed: nothing can be written to it."""

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> NoReturn:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


@contextmanager
def _streams() -> Iterator[None]:
    """Make both streams legible, and print on stderr what schedir logs. If stdout is closed, which
    is None in Python, writing fails as on a full disk; what a closed stderr is told is lost."""
    stdout = sys.stdout or io.TextIOWrapper(io.BufferedWriter(_Closed()))
    logger, handler = logging.getLogger("schedir"), _ToStderr()
    with redirect_stdout(stdout), redirect_stderr(sys.stderr or io.StringIO()):
        legible(sys.stdout)
        legible(sys.stderr)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
