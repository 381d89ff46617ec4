"""The words, marks and colours that all renderers share.

A style is written as rich writes it: `bold red`, `#000000 on #5fafff`.
"""

from __future__ import annotations

from schedir.ir import COMPUTE, Kind

WORDS: dict[Kind, str] = {
    kind: kind.traits.word for kind in Kind if kind in COMPUTE and kind != Kind.OPTIM_STEP
}
"""The kinds that have a cell of their own in a timeline, in words."""

# Backgrounds that black text is legible on: a hue per kind, and a shade for each of a rank's
# stages in turn.
_SHADES = {
    Kind.FORWARD: ("#5fafff", "#87d7ff", "#5f87ff", "#afd7ff"),
    Kind.BACKWARD: ("#87d787", "#afffaf", "#5faf5f", "#d7ffd7"),
    Kind.BACKWARD_INPUT: ("#5fd7d7", "#87ffff", "#00afaf", "#afffff"),
    Kind.BACKWARD_WEIGHT: ("#ffaf5f", "#ffd7af", "#d7875f", "#ffffd7"),
}
_OTHER_SHADES = ("#bcbcbc", "#dadada", "#9e9e9e", "#eeeeee")

STEP, STEP_STYLE = "*", "bold red"
PAIR, PAIR_STYLE = "X", "#000000 on #d7afff"
"""A forward and a backward that run as one: the letter that stands for both, and their style."""
SHORT = ":"
"""The mark of a cell that has no room for its label."""
LEFT_OUT, FAINT = "…", "dim"

SEVERITIES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
"""The style of each severity, the gravest first."""


def shade(kind: Kind, chunk: int = 0) -> str:
    """The style of a kind's cells, for the `chunk`-th stage of its rank."""
    shades = _SHADES.get(kind, _OTHER_SHADES)
    return f"#000000 on {shades[chunk % len(shades)]}"
