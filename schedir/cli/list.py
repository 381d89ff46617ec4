"""`schedir list`: every schedule that has a name."""

from __future__ import annotations

import argparse
import inspect
import sys

from schedir.ir import printable
from schedir.library import Generator, installed
from schedir.render.terminal import write
from schedir.render.text import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "List the schedules that have a name, with their parameters and defaults. "
        "Those of installed packages (entry points, group schedir.schedules) are run to find them."
    )


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    rows: list[tuple[str, ...]] = [("name", "aliases", "parameters", "description")]
    rows += [
        tuple(
            printable(cell)
            for cell in (
                generator.name,
                ", ".join(generator.aliases),
                _parameters(generator),
                generator.summary,
            )
        )
        for generator in installed()
    ]
    write([Table(rows, header=True)], sys.stdout)
    return 0


def _parameters(generator: Generator) -> str:
    """The parameters with their defaults, as the user would give them."""
    own = [f"--chunks {generator.chunks}"] if generator.chunks > 1 else []
    for name, parameter in generator.parameters.items():
        default = parameter.default
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            own.append("…")
        elif default is inspect.Parameter.empty:
            own.append(name)
        else:
            own.append(f"{name}={str(default).lower() if default in (True, False) else default}")
    return ", ".join(own)
