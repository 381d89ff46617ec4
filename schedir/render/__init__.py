"""The forms in which commands write schedules, timelines, reports and comparisons: one table.

Objects also show themselves: `print(report)`, `timeline.svg()`. This package has every form that a
command writes, such as a report as JSON:

    written = schedir.render.outputs_of("check")["json"].write(report, schedir.render.Page())
    text = schedir.render.plain(written.blocks)
"""

from typing import TYPE_CHECKING

from schedir.lazy import on_demand
from schedir.render.diagnostics import explanation
from schedir.render.outputs import OUTPUTS, Output, Written, described, outputs_of
from schedir.render.pages import Page
from schedir.render.text import legible, plain

if TYPE_CHECKING:
    from schedir.render.tables import found_text
    from schedir.render.terminal_timeline import timeline_json, timeline_text

__all__ = [
    "OUTPUTS",
    "Output",
    "Page",
    "Written",
    "described",
    "explanation",
    "found_text",
    "legible",
    "outputs_of",
    "plain",
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
