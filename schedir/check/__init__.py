"""Prove a schedule right, or say what is wrong: Schedule → Report."""

from schedir.check.channels import CHANNELS
from schedir.check.diagnostics import Diagnostic, Excerpt, Location, Move, Report, moved
from schedir.check.rules import RULES
from schedir.check.run import check, check_compute

__all__ = [
    "CHANNELS",
    "RULES",
    "Diagnostic",
    "Excerpt",
    "Location",
    "Move",
    "Report",
    "check",
    "check_compute",
    "moved",
]
