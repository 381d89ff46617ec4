"""Prove a schedule right, or say what is wrong: Schedule → Report."""

from schedir.check.channels import CHANNELS
from schedir.check.diagnostics import Diagnostic, Location, Report
from schedir.check.rules import RULES, Rule
from schedir.check.run import check, check_compute

__all__ = [
    "CHANNELS",
    "RULES",
    "Diagnostic",
    "Location",
    "Report",
    "Rule",
    "check",
    "check_compute",
]
