"""How schedules, timelines and results show themselves in Python: a line, a text, a picture.

`schedir.render` draws these objects, and it imports the packages that define them. So this module
imports a module of `schedir.render` only when somebody looks at an object.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, TypedDict, Unpack


def rounded(value: float, digits: int = 6) -> str:
    """A number in so many significant digits, but with all that stand before the point.

    >>> rounded(0.1 + 0.2), rounded(1023693.6), rounded(1e300)
    ('0.3', '1023694', '1e+300')
    """
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


def _render(module: str) -> Any:
    """A module of `render`."""
    return import_module(f"schedir.render.{module}")


class Displayed:
    """An object that shows itself: `repr` is one line, `str` is what the command prints, and a
    notebook draws it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(_render("outputs").line(self))

    def __str__(self) -> str:
        return str(_render("outputs").text(self))

    def _repr_html_(self) -> str:
        return str(_render("outputs").shown_html(self))

    def __rich__(self) -> Any:
        return _render("outputs").Renderable(self)

    def show(self, width: int | None = None, start: float = 0, end: float | None = None) -> None:
        """Print the object as the command does, in at most `width` columns.

        On a terminal the output has colours and fits the screen; elsewhere it is complete. `start`
        and `end` select a part of a drawing, in the unit of its time axis. Raises SchedirError if
        that part is empty.
        """
        _render("outputs").show(self, width, start, end)


def _written(timeline: Any, form: str, **options: Any) -> Any:
    """A timeline as `schedir export --format` writes it."""
    return _render("outputs").TIMELINES[form](timeline, **options).content


class Looks(TypedDict, total=False):
    """How a picture looks: the arguments of `Timeline.svg`, `png` and `pdf`.

    `against` is a second timeline, drawn below on the same axis. `memory` also draws what each rank
    keeps. `title` replaces the schedule's name and shape; "" leaves the title out. `width` is
    "16cm", or a number of columns, each as wide as a letter. `greyscale` is for print. `start` and
    `end` select a part, in the unit of the time axis.
    """

    against: Any
    memory: bool
    title: str | None
    width: str | float | None
    greyscale: bool
    start: float
    end: float | None


class DisplayedTimeline(Displayed):
    """The methods of `schedir.Timeline` that draw it, as text or as a picture."""

    __slots__ = ()

    def svg(self, **looks: Unpack[Looks]) -> str:
        """The timeline as an SVG picture, for papers and READMEs.

        `against` is a second timeline on the same axis. `memory` also draws what each rank keeps.
        `title` replaces the schedule's name and shape; "" leaves it out. `width` is "16cm" or a
        number of columns. `greyscale` is for print. `start` and `end` select a part.

        Raises SchedirError for a bad width, and if nothing lies between `start` and `end`.
        """
        return str(_written(self, "svg", **looks))

    def png(self, **looks: Unpack[Looks]) -> bytes:
        """The picture of `svg` as a PNG, at 192 pixels an inch. It takes the same arguments.

        Raises SchedirError if the extra is missing: pip install 'schedir[pictures]'.
        """
        return bytes(_written(self, "png", **looks))

    def pdf(self, **looks: Unpack[Looks]) -> bytes:
        """The picture of `svg` as a PDF page of its size. It takes the same arguments, and raises
        as `png` does."""
        return bytes(_written(self, "pdf", **looks))

    def html(self, against: Any = None, memory: bool = False) -> str:
        """An HTML page to explore the timeline in a browser; `against` is a second timeline
        below."""
        return str(_written(self, "html", against=against, memory=memory))

    def perfetto(self, against: Any = None) -> str:
        """A trace for ui.perfetto.dev, as JSON; `against` is a second timeline in the same
        trace."""
        return str(_written(self, "perfetto", against=against))


class DisplayedComparison(Displayed):
    """The methods of `schedir.Comparison` that show it as a table."""

    __slots__ = ()

    def table(self, form: Literal["text", "json", "markdown", "latex", "csv"] = "text") -> str:
        """The table as `schedir compare --format` writes it; "csv" and "json" hold raw numbers.

        Raises ValueError for any other form.
        """
        return str(_render("tables").comparison_text(self, form))

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each schedule and the columns of "csv".

        Raises SchedirError if pandas is not installed.
        """
        return _render("tables").frame(self)


class DisplayedSearch(Displayed):
    """What a search found, which shows its figures."""

    __slots__ = ()
