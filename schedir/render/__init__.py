"""What a person or a tool reads of schedules, timelines and reports: one table of outputs."""

from schedir.render.explanation import explanation
from schedir.render.found import found_text
from schedir.render.legible import legible
from schedir.render.outputs import OUTPUTS, Output, Page, described, outputs_of
from schedir.render.timeline import timeline_json, timeline_text

__all__ = [
    "OUTPUTS",
    "Output",
    "Page",
    "described",
    "explanation",
    "found_text",
    "legible",
    "outputs_of",
    "timeline_json",
    "timeline_text",
]
