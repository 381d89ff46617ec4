"""`schedir explain`: what a diagnostic means, and how to fix the schedule."""

from __future__ import annotations

import argparse
import sys

from schedir.checker import RETIRED, RULES
from schedir.cli.terminal import fail
from schedir.render import explanation
from schedir.render.terminal import write
from schedir.render.text import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes, and what it does."""
    parser.description = (
        "Explain a diagnostic: what it means, why it is bad, an example, and how to "
        "fix it. Without a code, list them all."
    )
    parser.add_argument("code", metavar="CODE", nargs="?", help="such as S301, or wait-cycle")


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a rule, or the list of all."""
    if args.code is None:
        rows = [(rule.code, rule.name, rule.meaning) for rule in RULES.values()]
        write([Table(rows)], sys.stdout)
        return 0
    if args.code.upper() in RETIRED:
        instead = RETIRED[args.code.upper()]
        print(f"{args.code.upper()} is not reported any more: {instead} says what it said.\n")
        args.code = instead
    for rule in RULES.values():
        if args.code.lower() in (rule.code.lower(), rule.name):
            print(explanation(rule), end="")
            return 0
    return fail(f"there is no diagnostic {args.code!r}; known: {' '.join(RULES)}")
