"""Curves of a loss as a picture: SVG, in the colours and lengths of schedir's own pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import attrs

from schedir.files import write_text
from schedir.render.axis import round_step
from schedir.render.palette import FAINT_INK, GRID, INK, PAPER
from schedir.render.svg_text import px, text_at
from schedir.render.text import Piece, number, plain

# Okabe and Ito's, dark enough for lines
COLOURS = ("#595959", "#a0467b", "#0072b2", "#d55e00", "#009e73")
DASHES = ("2 3", "5 5", "7 3", "", "9 3 2 3")  # and told apart without any colour
WIDE, HIGH, LEFT, TOP, BETWEEN, LINE = 400.0, 240.0, 52.0, 96.0, 62.0, 18.0


@attrs.frozen
class Curve:
    """The held-out losses of a training, and after how many samples and seconds each was found."""

    name: str
    losses: Sequence[float] = ()
    samples: Sequence[float] = ()
    seconds: Sequence[float] = ()


def save(curves: Sequence[Curve], target: float, title: str, file: Path) -> None:
    """Keep what `picture` takes, to draw it again."""
    record = {"title": title, "target": target, "curves": [attrs.asdict(c) for c in curves]}
    write_text(file, json.dumps(record, indent=1) + "\n")


def load(file: Path) -> tuple[list[Curve], float, str]:
    """The curves that were kept, the loss that they were to reach, and the title."""
    record = json.loads(file.read_text(encoding="utf-8"))
    return [Curve(**curve) for curve in record["curves"]], record["target"], record["title"]


def picture(curves: Sequence[Curve], target: float, title: str) -> str:
    """The losses over the samples on the left, over the seconds on the right."""
    wide, high = LEFT + 2 * WIDE + BETWEEN + 20, TOP + HIGH + 46
    found = [loss for curve in curves for loss in curve.losses]
    step = round_step((max(found) - min(found)) / 8)
    low, top = step * math.floor(min(*found, target) / step), step * math.ceil(max(found) / step)
    pieces = [
        Piece(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{px(wide)}" height="{px(high)}" '
            f'viewBox="0 0 {px(wide)} {px(high)}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="12">\n<title>{escape(title)}</title>\n'
            f'<rect width="100%" height="100%" rx="4" fill="{PAPER}"/>\n'
        ),
        text_at(LEFT, 26, title, size=14, weight="bold"),
    ]
    for turn, curve in enumerate(curves):
        x, y = LEFT + turn % 2 * (WIDE + BETWEEN), 48 + turn // 2 * LINE
        pieces += _line(turn, f"M{px(x)} {px(y - 4)}h34"), text_at(x + 42, y, curve.name)
    for left, what in ((LEFT, "samples"), (LEFT + WIDE + BETWEEN, "seconds")):
        pieces += _panel(curves, what, left, low, top, step, target)
    return plain([*pieces, Piece("</svg>\n")])


def _panel(
    curves: Sequence[Curve],
    what: str,
    left: float,
    low: float,
    top: float,
    step: float,
    target: float,
) -> Iterator[Piece]:
    longest = max(max(getattr(curve, what)) for curve in curves)

    def place(x: float, loss: float) -> tuple[float, float]:
        return left + WIDE * x / longest, TOP + HIGH * (top - loss) / (top - low)

    for turn in range(round((top - low) / step) + 1):
        loss = low + turn * step
        _, y = place(0, loss)
        yield Piece(f'<path stroke="{GRID}" d="M{px(left)} {px(y)}h{px(WIDE)}"/>\n')
        yield text_at(left - 7, y + 4, number(loss), anchor="end")
    every = round_step(longest / 6)
    for turn in range(math.floor(longest / every) + 1):
        x, y = place(turn * every, low)
        yield Piece(f'<path stroke="{INK}" d="M{px(x)} {px(y)}v5"/>\n')
        yield text_at(x, y + 20, f"{turn * every:,g}", anchor="middle")
    _, y = place(0, target)
    yield Piece(
        f'<path stroke="{INK}" stroke-dasharray="1 3" d="M{px(left)} {px(y)}h{px(WIDE)}"/>\n'
    )
    yield text_at(left + WIDE, y + 15, f"held-out loss {target:g}", anchor="end", fill=FAINT_INK)
    for turn, curve in enumerate(curves):
        points = (place(*pair) for pair in zip(getattr(curve, what), curve.losses, strict=True))
        yield _line(turn, "M" + "L".join(f"{px(x)} {px(y)}" for x, y in points))
    yield text_at(left + WIDE / 2, TOP + HIGH + 38, what, anchor="middle")


def _line(turn: int, path: str) -> Piece:
    dashes = f' stroke-dasharray="{DASHES[turn]}"' if DASHES[turn] else ""
    colour = COLOURS[turn]
    return Piece(f'<path fill="none" stroke="{colour}" stroke-width="2"{dashes} d="{path}"/>\n')
