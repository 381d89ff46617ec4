"""`schedir explain`: what a code of `schedir check` means, and how to fix the schedule."""

from __future__ import annotations

import argparse
import sys

from schedir.checker import RETIRED, RULES
from schedir.errors import SchedirError
from schedir.render import explanation
from schedir.render.text import Table, write

EXAMPLES = ("schedir explain S301", "schedir explain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and its description."""
    parser.description = (
        "Explain a code that `schedir check` prints: what it means, why it is bad, how to fix it, "
        "and a schedule that has it. Without a code, list them all."
    )
    parser.add_argument(
        "code",
        metavar="CODE",
        nargs="?",
        help="a code, such as S301, or its name, such as wait-cycle",
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a rule, or a list of all rules."""
    if args.code is None:
        rows = [(rule.code, rule.name, rule.meaning) for rule in RULES.values()]
        write([Table(rows)], sys.stdout)
        return 0
    if args.code.upper() in RETIRED:
        instead = RETIRED[args.code.upper()]
        print(f"{args.code.upper()} is no longer reported: see {instead} instead.\n")
        args.code = instead
    for rule in RULES.values():
        if args.code.lower() in (rule.code.lower(), rule.name):
            print(explanation(rule), end="")
            return 0
    raise SchedirError(f"there is no diagnostic {args.code!r}; known: {' '.join(RULES)}")
