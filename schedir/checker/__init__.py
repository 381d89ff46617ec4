"""Prove a schedule right, or say what is wrong: Schedule → Report."""

from schedir.checker.deadlock import clean_channels
from schedir.checker.diagnostics import (
    Add,
    AsSent,
    Batch,
    Change,
    Diagnostic,
    Excerpt,
    LeaveOut,
    Location,
    Move,
    Remove,
    Reorder,
    Report,
    Rule,
    Several,
    Write,
)
from schedir.checker.memory import delays
from schedir.checker.repairs import changed
from schedir.checker.rules import RETIRED, RULES
from schedir.checker.run import check, prove, sound
from schedir.ir import CHANNELS

__all__ = [
    "CHANNELS",
    "RETIRED",
    "RULES",
    "Add",
    "AsSent",
    "Batch",
    "Change",
    "Diagnostic",
    "Excerpt",
    "LeaveOut",
    "Location",
    "Move",
    "Remove",
    "Reorder",
    "Report",
    "Rule",
    "Several",
    "Write",
    "changed",
    "check",
    "clean_channels",
    "delays",
    "prove",
    "sound",
]
