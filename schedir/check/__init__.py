"""Prove a schedule right, or say what is wrong: Schedule → Report."""

from schedir.check.changes import Change, LeaveOut, Move, Reorder, changed
from schedir.check.channels import CHANNELS
from schedir.check.diagnostics import Diagnostic, Excerpt, Location, Report
from schedir.check.rules import RETIRED, RULES
from schedir.check.run import check, check_compute

__all__ = [
    "CHANNELS",
    "RETIRED",
    "RULES",
    "Change",
    "Diagnostic",
    "Excerpt",
    "LeaveOut",
    "Location",
    "Move",
    "Reorder",
    "Report",
    "changed",
    "check",
    "check_compute",
]
