"""Streams that can't encode every character: what schedir draws with falls back to ASCII."""

from __future__ import annotations

import codecs
import io
from typing import TextIO

_INSTEAD = {"…": "...", "→": "->", "−": "-", "–": "-", "×": "x", "µ": "u"}


def legible(stream: TextIO | None) -> None:
    """Have a stream write, in place of what its encoding lacks, something that a person can read.

    Any other character becomes its escape, such as `\\xe9`, and none is an error.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="schedir.legible")


def _instead(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        plain = _INSTEAD.get(error.object[error.start])
        if plain is not None:
            return plain, error.start + 1
        error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


codecs.register_error("schedir.legible", _instead)
