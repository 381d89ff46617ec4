"""What a person or a tool reads of timelines, reports and rules: one module per output."""

from schedir.render.diagnostics import OUTPUT_FORMATS
from schedir.render.explanation import explanation
from schedir.render.legible import legible
from schedir.render.timeline import timeline_json, timeline_text

__all__ = ["OUTPUT_FORMATS", "explanation", "legible", "timeline_json", "timeline_text"]
