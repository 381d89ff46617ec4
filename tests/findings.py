"""Findings made up for tests of what is done with findings."""

from __future__ import annotations

from schedir import Diagnostic
from schedir.checker import Location, Rule
from schedir.checker.diagnostics import Severity


def odd(severity: Severity, *locations: Location, said: str = "it is odd") -> Diagnostic:
    rule = Rule(
        code="S999",
        name="odd",
        severity=severity,
        meaning="Something is odd.",
        why="It is.",
        fix="Even it out.",
        example="",
        message="{text}",
    )
    return Diagnostic(rule, locations, {"text": said})
