"""What a rule means, why it matters, an example that breaks it, and how to mend that."""

from __future__ import annotations

import textwrap

from schedir.check import Rule, check
from schedir.ir import loads
from schedir.render.diagnostics import finding

_WIDTH = 80


def explanation(rule: Rule) -> str:
    """The explanation of a rule in full, its example checked as it is printed."""
    report = check(loads(rule.example))
    found = "\n".join(finding(diagnostic) for diagnostic in report.diagnostics)
    return (
        "\n".join(
            [
                f"{rule.severity}[{rule.code}]: {rule.name}",
                "",
                textwrap.fill(rule.meaning, _WIDTH),
                "",
                textwrap.fill(f"Why: {rule.why}", _WIDTH),
                "",
                textwrap.fill(f"Mend: {rule.mend}", _WIDTH),
                "",
                "Example:",
                "",
                textwrap.indent(rule.example, "    "),
                "`schedir check` says:",
                "",
                textwrap.indent(found, "    "),
            ]
        ).rstrip("\n")
        + "\n"
    )
