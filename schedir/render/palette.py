"""The words, marks and colours that all renderers share.

A style is in the notation of rich: `bold red`, `#000000 on #5fafff`. Pictures have other fills,
because a terminal may have few colours, and paper is white.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schedir.ir import KINDS, Kind, Schedule
from schedir.ir.kinds import DRAWN
from schedir.render.lanes import SHADES, most_stages
from schedir.render.text import Piece
from schedir.simulator import Cause

WORDS: dict[Kind, str] = {kind: kind.meaning.word for kind in DRAWN if kind is not Kind.OPTIM_STEP}
"""The kinds that have a cell in a timeline, in words."""

# Backgrounds for black text: a hue for each kind, and a shade for each stage of a rank in turn.
# Without a row here a kind is grey.
_SHADES = {
    Kind.FORWARD: ("#5fafff", "#87d7ff", "#5f87ff", "#afd7ff"),
    Kind.BACKWARD: ("#87d787", "#afffaf", "#5faf5f", "#d7ffd7"),
    Kind.BACKWARD_INPUT: ("#5fd7d7", "#87ffff", "#00afaf", "#afffff"),
    Kind.BACKWARD_WEIGHT: ("#ffaf5f", "#ffd7af", "#d7875f", "#ffffd7"),
    Kind.RECOMPUTE: ("#ff87af", "#ffafd7", "#d75f87", "#ffd7d7"),
    Kind.RELOAD: ("#9e9e9e", "#bcbcbc", "#8a8a8a", "#a8a8a8"),
}
_OTHER_SHADES = ("#bcbcbc", "#dadada", "#9e9e9e", "#eeeeee")

STEP, STEP_STYLE = Kind.OPTIM_STEP.letter, "bold red"
PAIR, PAIR_STYLE = "X", "#000000 on #d7afff"
"""An overlapped pair: the letter that stands for both actions, and their style."""
MIX = "+"
"""A column of a terminal with several kinds of action."""
SHORT = ":"
"""The mark of a cell without room for its label."""
LEFT_OUT, FAINT = "…", "dim"


_COLOUR = re.compile('"#([0-9a-f]{6})"')


def shade(kind: Kind, chunk: int = 0) -> str:
    """The style of a kind's cells, for the `chunk`-th stage of its rank."""
    shades = _SHADES.get(kind, _OTHER_SHADES)
    return f"#000000 on {shades[chunk % len(shades)]}"


def blended(shares: Mapping[str, float]) -> str:
    """The style of a mixed cell: the mean background, weighted by the shares of the styles."""
    parts = [(bytes.fromhex(style[-6:]), part) for style, part in shares.items() if "#" in style]
    mean = (round(sum(colour[n] * part for colour, part in parts)) for n in range(3))
    return f"#000000 on #{bytes(mean).hex()}"


class Fill(NamedTuple):
    """The colours of a cell in a picture, `#rrggbb`: its area, and the ink of its label."""

    area: str
    ink: str


# The hues of Okabe and Ito (2008), which people with any colour blindness can tell apart, a purple
# for the gradient of the input, and a dark blue for recomputation. The five kinds differ in grey
# print too: the lightness (CIE L*) of F is 79 to 87, of W 66 to 74, of B 52 to 61, of I 35 to 45,
# of R 13 to 25. The shades of a rank's stages stay within these ranges.
_FILLS = {
    Kind.FORWARD: ("#86ccf2", "#abe0ff", "#8ed3fa", "#99daff"),
    Kind.BACKWARD: ("#058f68", "#17a67a", "#02966d", "#039f74"),
    Kind.BACKWARD_INPUT: ("#793783", "#94509e", "#82408d", "#8c4996"),
    Kind.BACKWARD_WEIGHT: ("#d69404", "#f1a815", "#e09b01", "#eaa30a"),
    Kind.RECOMPUTE: ("#132536", "#263b50", "#192d40", "#20354a"),
    Kind.RELOAD: ("#8f8f8f", "#a3a3a3", "#878787", "#999999"),
}
_OTHER_FILLS = ("#bcbcbc", "#dadada", "#acacac", "#cccccc")
_WHITE_LABELS = {Kind.BACKWARD_INPUT, Kind.RECOMPUTE}

PAPER, INK, FAINT_INK, GRID = "#ffffff", "#1a1a1a", "#595959", "#d9d9d9"
"""A picture's background, its text and axes, its lesser text, and its grid."""
IDLE_FILL = "#f4f4f4"
"""The fill of a lane while the rank does nothing."""
STEP_FILL = "#1a1a1a"
"""The mark of an OPTIM_STEP."""
CAUSE_WORDS: dict[Cause, str] = {
    Cause.WARMUP: "warmup",
    Cause.SLOWER: "slower stage",
    Cause.DATA: "waiting for data",
    Cause.COMMUNICATION: "communication",
    Cause.COLLECTIVE: "sum of gradients",
    Cause.OVERHEAD: "overhead",
    Cause.DRAIN: "drain",
    Cause.UNKNOWN: "not known why",
    Cause.DONE: "nothing left to do",
}
"""The causes of idle time in words, roughly in the order in which a rank meets them."""
# Pale, so that idle time still looks idle.
CAUSE_FILLS: dict[Cause, str] = {
    Cause.SLOWER: "#f3c3ad",
    Cause.WARMUP: "#e6e6e6",
    Cause.DRAIN: "#d6d6d6",
    Cause.DATA: "#f5e9a8",
    Cause.COMMUNICATION: "#e3c9ea",
    Cause.COLLECTIVE: "#c9cdf0",
    Cause.OVERHEAD: "#f7d5dd",
    Cause.UNKNOWN: "#ffffff",
    Cause.DONE: "#f4f4f4",
}
"""The fill of a lane while its rank is idle, by cause."""
CRITICAL_LINE = "#b30000"
"""The colour of the critical path: a dark red that no fill has."""
MEMORY_LINE, MEMORY_FILL = "#4d5a66", "#d3dae1"


def grey(piece: Piece) -> Piece:
    """A piece of a picture with each colour replaced by a grey of the same lightness."""
    return Piece(_COLOUR.sub(_as_light, piece.text))


def _as_light(colour: re.Match[str]) -> str:
    red, green, blue = bytes.fromhex(colour[1])  # weighted as in Rec. 709
    return f'"#{3 * f"{round(0.2126 * red + 0.7152 * green + 0.0722 * blue):02x}"}"'


def picture_fill(kind: Kind, chunk: int = 0) -> Fill:
    """The colours of a kind's cells, for the `chunk`-th stage of its rank."""
    fills = _FILLS.get(kind, _OTHER_FILLS)
    return Fill(fills[chunk % len(fills)], "#ffffff" if kind in _WHITE_LABELS else "#000000")


def fill_of(colour: int) -> Fill:
    """The colours of a cell whose `colour` is as in `Lanes`."""
    return picture_fill(KINDS[colour // SHADES], colour % SHADES)


def swatches(schedules: Sequence[Schedule]) -> Iterator[tuple[list[str], str]]:
    """The fills and words of the kinds that occur, in each shade that occurs."""
    kinds = {KINDS[kind] for each in schedules for kind in np.unique(each.columns.kind)}
    shades = min(SHADES, max(map(most_stages, schedules)))
    for kind, word in WORDS.items():
        if kind in kinds:
            yield (
                [picture_fill(kind, turn).area for turn in range(shades)],
                f"{kind.letter} {word}",
            )
    if Kind.OPTIM_STEP in kinds:
        yield [STEP_FILL], Kind.OPTIM_STEP.meaning.word
