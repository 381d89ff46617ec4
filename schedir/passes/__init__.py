"""Passes: Schedule → Schedule. Valid in, valid out."""

from schedir.passes.communication import insert_communication, strip_communication

__all__ = ["insert_communication", "strip_communication"]
