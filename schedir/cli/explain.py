"""`schedir explain`: what a code of `schedir check` means, and how to fix the schedule.

    schedir explain S301
    schedir explain

Explain a code that `schedir check` prints: what it means, why it is bad, how to fix it, and a
schedule that has it. Without a code, list them all.
"""

from __future__ import annotations

import argparse
import sys

from schedir.checker import RETIRED, RULES, Rule
from schedir.errors import SchedirError
from schedir.render import explanation
from schedir.render.text import Table, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
    rule = rule_of(args.code)
    if rule is None:
        raise SchedirError(f"there is no diagnostic {args.code!r}; known: {' '.join(RULES)}")
    if (code := args.code.upper()) in RETIRED:
        print(f"{code} is no longer reported: see {rule.code} instead.\n")
    print(explanation(rule), end="")
    return 0


def rule_of(text: str) -> Rule | None:
    """The rule that has this code or name, or covers what a code did that is retired."""
    code = RETIRED.get(text.upper(), text.upper())
    return next((rule for rule in RULES.values() if code in (rule.code, rule.name.upper())), None)
