"""Passes: Schedule → Schedule. Valid in, valid out."""

from schedir.passes.communication import insert_communication, strip_communication
from schedir.passes.forward import forward_only

__all__ = ["forward_only", "insert_communication", "strip_communication"]
