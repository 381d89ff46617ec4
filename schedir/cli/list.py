"""`schedir list`: every schedule that has a name.

    schedir list
    schedir list --format json

List the schedules that have a name, with their parameters and defaults. Installed packages can add
schedules (entry points, group schedir.schedules); to list one, schedir imports its module.

JSON: [{name, aliases, file, chunks, parameters: [{name, default}], description}]. A parameter
without default must be set. file is null if the code is in no file.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

from schedir.cli.arguments import add_format
from schedir.ir import printable
from schedir.library import Generator, installed
from schedir.render.text import Table, as_json, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_format(parser, ("text", "json"), "a table, or JSON; the keys are below")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the same as data."""
    if args.format == "json":
        print(as_json([_data(generator) for generator in installed()]), end="")
        return 0
    rows = [["name", "aliases", "parameters", "description"]]
    for each in installed():
        cells = each.name, ", ".join(each.aliases), _parameters(each), each.summary
        rows.append([*map(printable, cells)])
    write([Table(rows, header=True)], sys.stdout)
    return 0


def _data(generator: Generator) -> dict[str, Any]:
    """A row of the JSON. Its keys are a contract."""
    empty = inspect.Parameter.empty
    code = getattr(inspect.unwrap(generator.function), "__code__", None)
    return {
        "name": generator.name,
        "aliases": generator.aliases,
        "file": code and code.co_filename,
        "chunks": generator.chunks,
        "parameters": [
            {"name": name} | ({} if each.default is empty else {"default": each.default})
            for name, each in generator.parameters.items()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ],
        "description": generator.summary,
    }


def _parameters(generator: Generator) -> str:
    """The parameters with their defaults, as the user writes them."""
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
