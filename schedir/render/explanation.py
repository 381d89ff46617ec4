"""What a rule means, why it matters, an example that breaks it, and how to fix that."""

from __future__ import annotations

import textwrap
from itertools import starmap
from typing import Any

from schedir.checker import Rule, check
from schedir.ir import loads
from schedir.render.diagnostics import finding

_WIDTH = 80


def explanation(rule: Rule) -> str:
    """The explanation of a rule in full, its example checked as it is printed."""
    report = check(loads(rule.example), **dict(rule.options))
    found = "\n".join(finding(diagnostic) for diagnostic in report.diagnostics)
    return (
        "\n".join(
            [
                f"{rule.severity}[{rule.code}]: {rule.name}",
                "",
                _fill(rule.meaning),
                "",
                _fill(f"Why: {rule.why}"),
                "",
                _fill(f"Fix: {rule.fix}"),
                "",
                "Example:",
                "",
                textwrap.indent(rule.example, "    "),
                f"`schedir check{command_options(rule)}` says:",
                "",
                textwrap.indent(found, "    "),
            ]
        ).rstrip("\n")
        + "\n"
    )


def _fill(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)  # options stay whole


def command_options(rule: Rule) -> str:
    """The options of `schedir check` that the rule's example needs."""
    return "".join(starmap(_option, rule.options))


def _option(name: str, value: Any) -> str:
    if name == "ties":
        return "".join(f" --tie {','.join(map(str, tie))}" for tie in value)
    return f" --{name.replace('_', '-')} {value}"
