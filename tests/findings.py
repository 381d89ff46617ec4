"""Findings made up for tests of what is done with findings."""

from __future__ import annotations

import attrs

from schedir import Diagnostic
from schedir.checker import Location


@attrs.frozen(kw_only=True)
class Odd(Diagnostic):
    code = "S999"
    name = "odd"
    message = "{text}"

    text: str = "it is odd"


class OddWarning(Odd):
    severity = "warning"


class OddNote(Odd):
    severity = "note"


def odd(severity: str, *locations: Location, said: str = "it is odd") -> Diagnostic:
    rule = {"error": Odd, "warning": OddWarning, "note": OddNote}[severity]
    return rule(locations=locations, text=said)
