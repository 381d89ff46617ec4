"""Findings made up for tests of what is done with findings."""

from __future__ import annotations

from typing import ClassVar

import attrs

from schedir import Diagnostic
from schedir.checker import Location


@attrs.frozen(kw_only=True)
class Odd(Diagnostic):
    code = "S999"
    name = "odd"

    said: str = "it is odd"

    @property
    def message(self) -> str:
        return self.said


class OddWarning(Odd):
    severity: ClassVar = "warning"


class OddNote(Odd):
    severity: ClassVar = "note"


def odd(severity: str, *locations: Location, said: str = "it is odd") -> Diagnostic:
    rule = {"error": Odd, "warning": OddWarning, "note": OddNote}[severity]
    return rule(locations=locations, said=said)
