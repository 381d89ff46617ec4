"""The formats in which a timeline is written to a file, each a function with keyword arguments.

A renderer's module is imported when it writes, so that commands start fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import COMPUTE, Kind
from schedir.render.text import Block, Piece, Screen, plain

if TYPE_CHECKING:
    from schedir.simulator import Timeline


@attrs.frozen
class Written:
    """The content of a file, text or `data`, and a sentence for each thing that it leaves out."""

    blocks: Iterable[Block]
    left_out: Iterable[str] = ()
    data: bytes | None = None

    @property
    def content(self) -> str | bytes:
        """The whole content at once."""
        return plain(self.blocks) if self.data is None else self.data


def svg(
    timeline: Timeline,
    *,
    against: Timeline | None = None,
    memory: bool = False,
    title: str | None = None,
    width: str | float | None = None,
    greyscale: bool = False,
    start: float = 0,
    end: float | None = None,
) -> Written:
    """A picture; the arguments are those of `display.Looks`."""
    from schedir.render.palette import grey
    from schedir.render.svg import svg_blocks

    pieces = svg_blocks(
        timeline, against, memory=memory, heading=title, breadth=width, start=start, end=end
    )
    left_out = _left_out([timeline, against], COMPUTE)
    return Written(map(grey, pieces) if greyscale else pieces, left_out)


_SIDE = re.compile(r'(?<=dth="|ght=")[.0-9]+')


def _converted(form: str, scale: float) -> Callable[..., Written]:
    """A function that writes the picture of `svg` in another format, with `scale` of its units to a
    pixel."""

    @wraps(svg)
    def write(timeline: Timeline, **looks: Any) -> Written:
        try:
            convert = getattr(import_module("vl_convert"), f"svg_to_{form}")
        except ImportError:
            raise SchedirError(
                f"{form} needs vl-convert-python: pip install 'schedir[pictures]'"
            ) from None
        picture = svg(timeline, **looks)
        scaled = _SIDE.sub(lambda side: str(float(side[0]) * scale), plain(picture.blocks), 2)
        return Written((), picture.left_out, convert(scaled))

    return write


def perfetto(timeline: Timeline, *, against: Timeline | None = None) -> Written:
    """A trace for Perfetto, with the memory of each rank."""
    from schedir.render.perfetto import trace_events

    return Written(trace_events(timeline, against), _left_out([timeline, against], Kind))


def html(timeline: Timeline, *, against: Timeline | None = None, memory: bool = False) -> Written:
    """A page; with `memory` it opens with the memory curves."""
    from schedir.render.html import html_page

    return Written([Piece(html_page(timeline, against, memory=memory))])


FORMATS: Mapping[str, Callable[..., Written]] = {
    "svg": svg,
    "png": _converted("png", 2),
    "pdf": _converted("pdf", 0.75),
    "perfetto": perfetto,
    "html": html,
}
"""The formats by name."""


def _left_out(lines: Sequence[Timeline | None], kinds: Iterable[Kind]) -> Iterator[str]:
    """A sentence for each timeline with actions of these kinds whose times are unknown: pictures
    leave them out."""
    for line in filter(None, lines):
        columns = line.schedule.columns
        asked = columns.is_kind(*kinds)
        without = np.flatnonzero(asked & ~line.known)
        if len(without):
            rank, index = columns.position(int(without[0]))
            yield (
                f"{len(without)} of {asked.sum()} actions are left out because their times are "
                f"unknown: rank {rank} #{index} {columns.action(int(without[0]))}"
                + (" is the first" if len(without) > 1 else "")
            )


def drawn(
    timeline: Timeline,
    screen: Screen,
    *,
    against: Timeline | None = None,
    start: float = 0,
    end: float | None = None,
) -> Iterable[Block]:
    """The timeline in text: on one screen, if that has a height, or else every action of it. So is
    a part, if a `start` or an `end` is given."""
    from schedir.render.captions import readable, window_of

    first, *others = readable([timeline] if against is None else [timeline, against])
    second = others[0] if others else None
    if screen.width is None or screen.height is None or start or end is not None:
        from schedir.render.terminal_timeline import timeline_blocks

        window = window_of([first, *others], start, end)
        return timeline_blocks(first, screen.width, second, window)
    from schedir.render.overview import overview_blocks

    return overview_blocks(first, screen.width, screen.height, second)
