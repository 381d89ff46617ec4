"""The rules: one frozen class each, with its code, its texts, and what they are made of.

Codes are stable and never reused. S1xx structure, S2xx ordering, S3xx communication, S4xx memory
and weights, S5xx performance. Each example is a whole `.sched` text that the rule rejects.
"""

from schedir.checker.diagnostics import Diagnostic
from schedir.checker.rules import communication, lints, memory, ordering, structure


def _rules() -> dict[str, type[Diagnostic]]:
    found = [
        value
        for module in (structure, ordering, communication, memory, lints)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Diagnostic) and hasattr(value, "code")
    ]
    return {rule.code: rule for rule in sorted(found, key=lambda rule: rule.code)}


RULES: dict[str, type[Diagnostic]] = _rules()

RETIRED = {"S402": "S105"}
"""Codes that are not reported any more, each with the one that says what it said."""
