"""Numbers as people write them on a command line: 0.5, 1e-3, inf, 40GiB."""

from __future__ import annotations

import argparse
import math
import re

_BYTES = re.compile(r"(?i)([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?:([kmgtp])(i?))?b?")


def quantity(text: str) -> float:
    """A number >= 0: whole ones stay whole. Raises ArgumentTypeError."""
    if re.fullmatch("[0-9]{1,15}", text):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def size(text: str) -> float:
    """A number of bytes: 1500, 40GiB, 16 GB, 1.5e9. Raises ArgumentTypeError."""
    found = _BYTES.fullmatch(text.strip())
    value = math.inf
    if found is not None:
        number, prefix, binary = found.groups()
        value = float(number) * (1024 if binary else 1000) ** " KMGTP".index(
            (prefix or " ").upper()
        )
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 40GiB")
    return int(value) if value == int(value) else value
