"""Writes docs/rules.md, the reference of check's rules, from the text of `schedir explain`.

python tools/write_rules.py
"""

from __future__ import annotations

from pathlib import Path

from schedir import check, loads
from schedir.checker import RULES, Rule
from schedir.files import write_text
from schedir.render.diagnostics import command_options, finding

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "rules.md"


def reference() -> str:
    """The whole reference in Markdown."""
    head = (
        "# Rules\n\nWhat `schedir check` finds, one code each; `schedir explain CODE` prints the "
        "same. Written by `tools/write_rules.py`: edit `schedir/checker/rules.py` instead.\n\n"
    )
    return head + "\n".join(_section(rule) for rule in RULES.values())


def _section(rule: Rule) -> str:
    found = [
        d
        for d in check(loads(rule.example), **dict(rule.options)).diagnostics
        if d.code == rule.code
    ]
    return (
        f"## {rule.code} {rule.name}\n\n{rule.meaning}\n\n**Why:** {rule.why}\n\n"
        f"**Fix:** {rule.fix}\n\n```\n{rule.example}```\n\n"
        f"`schedir check{command_options(rule)}` says:\n\n```\n{finding(found[0])}```\n"
    )


if __name__ == "__main__":
    write_text(REFERENCE, reference())
