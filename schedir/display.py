"""What schedules, timelines and results show of themselves in Python: a line, a text, a picture.

The objects lie below `schedir.render`, which knows how each is shown. So this is the one door that
leads upwards: `schedir.render.objects` is imported when somebody looks, and never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, TypedDict, Unpack


def _shown() -> Any:
    """The module of `render` that has a row for each class here."""
    return import_module("schedir.render.objects")


class Displayed:
    """What can be shown: `repr` is a line, `str` what the command prints, a notebook draws it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(_shown().line(self))

    def __str__(self) -> str:
        return str(_shown().text(self))

    def _repr_html_(self) -> str:
        return str(_shown().html(self))

    def __rich__(self) -> Any:
        return _shown().Renderable(self)

    def show(self, width: int | None = None, start: float = 0, end: float | None = None) -> None:
        """Print it as the command does, in at most `width` columns.

        On a terminal it has colours and fits the screen, elsewhere it is complete. Of a drawing
        what runs from `start` to `end` is shown, in the unit of its time axis. Raises SchedirError
        where nothing lies between them.
        """
        _shown().show(self, width, start, end)


class Looks(TypedDict, total=False):
    """How a picture looks: what `Timeline.svg`, `png` and `pdf` take.

    `against` is a second timeline on the same axis, below; with `memory` what each rank keeps is
    drawn as well. `title` stands in place of the schedule's name and shape, "" for none. `width` is
    "16cm", or a number of columns, each as wide as a letter. `greyscale` is for print. From `start`
    to `end` is drawn, in the unit of the time axis.
    """

    against: Any
    memory: bool
    title: str | None
    width: str | float | None
    greyscale: bool
    start: float
    end: float | None


class DisplayedTimeline(Displayed):
    """A timeline is drawn, as text or as a picture; the methods of `schedir.Timeline`."""

    __slots__ = ()

    def svg(self, **looks: Unpack[Looks]) -> str:
        """The picture, for papers and READMEs.

        `against` is a second timeline on the same axis; with `memory` what each rank keeps is drawn
        too. `title` stands in place of the schedule's shape, "" for none; `width` is "16cm" or a
        number of columns; `greyscale` is for print; from `start` to `end` is drawn.

        Raises SchedirError for a width that is none, and for a window without anything.
        """
        return str(_shown().exported(self, "svg", **looks))

    def png(self, **looks: Unpack[Looks]) -> bytes:
        """The picture of `svg` in pixels, 192 an inch. It takes what that takes.

        Raises SchedirError without the extra: pip install 'schedir[pictures]'.
        """
        return bytes(_shown().exported(self, "png", **looks))

    def pdf(self, **looks: Unpack[Looks]) -> bytes:
        """The picture of `svg` as a page of its size, as `png`."""
        return bytes(_shown().exported(self, "pdf", **looks))

    def html(self, against: Any = None, memory: bool = False) -> str:
        """One page to look around in with a browser; `against` is a second timeline below."""
        return str(_shown().exported(self, "html", against=against, memory=memory))

    def perfetto(self, against: Any = None) -> str:
        """A trace for ui.perfetto.dev, as JSON; `against` is a second timeline in it."""
        return str(_shown().exported(self, "perfetto", against=against))


class DisplayedComparison(Displayed):
    """A comparison is a table; the methods of `schedir.Comparison`."""

    __slots__ = ()

    def table(self, form: Literal["table", "markdown", "latex", "csv", "json"] = "table") -> str:
        """The table as `schedir compare --format` writes it; "csv" and "json" hold raw numbers.

        Raises ValueError for another form.
        """
        return str(_shown().compared(self, form))

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each schedule and the columns of "csv".

        Raises SchedirError where pandas is not installed.
        """
        return _shown().frame(self)
