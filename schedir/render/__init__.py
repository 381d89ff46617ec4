"""Schedules, timelines, findings and comparisons in text, data and pictures.

Objects show themselves: `print(report)`, `timeline.svg()`, `comparison.table("csv")`. This package
has what commands write beside that, such as a report or a timeline as JSON.
"""

from typing import TYPE_CHECKING

from schedir.lazy import on_demand
from schedir.render.diagnostics import explanation, report_data
from schedir.render.text import legible

if TYPE_CHECKING:
    from schedir.render.tables import found_text
    from schedir.render.terminal_timeline import timeline_json, timeline_text

__all__ = [
    "explanation",
    "found_text",
    "legible",
    "report_data",
    "timeline_json",
    "timeline_text",
]

_ON_DEMAND = {
    "schedir.render.tables": ("found_text",),
    "schedir.render.terminal_timeline": ("timeline_json", "timeline_text"),
}

if not TYPE_CHECKING:  # to which a misspelt name is an error
    __getattr__ = on_demand(__name__, _ON_DEMAND)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
