"""What `search` says of what it has found."""

from __future__ import annotations

from schedir.finder import Found
from schedir.render.captions import bubble
from schedir.render.comparison import size

_ENOUGH = 1e-9


def found_text(found: Found) -> str:
    """Its figures, how far it is above the lower bound, and what was chosen; a few lines."""
    line = found.timeline
    span = max(rank.span for rank in line.ranks)
    unit = f" {line.unit}" if line.unit else ""
    peaks = [f"{max(rank.peak_activations for rank in line.ranks)} activations"]
    held = [rank.peak_bytes for rank in line.ranks if rank.peak_bytes is not None]
    if held:
        peaks.append(size(max(held)))
    return "\n".join(
        (
            f"makespan {line.makespan:.10g}{unit}, longest span {span:.10g}{unit}, bubble "
            f"{bubble(line)}",
            f"peak {', '.join(peaks)}",
            f"lower bound of the {found.objective} {found.lower_bound:.10g}{unit}: "
            f"{_distance(found)}",
            f"{_chosen(found)}; {found.candidates} tried, seed {found.seed}"
            + (", cut short: the same seed may find another" if found.cut else ""),
        )
    )


def _distance(found: Found) -> str:
    if found.distance <= _ENOUGH:
        return "none can be quicker"
    return f"{found.distance:.2%} above it"


def _chosen(found: Found) -> str:
    pairs = found.schedule.stages * found.schedule.microbatches
    parts = [f"placement {found.placement}"] if found.schedule.stages > 1 else []
    parts.append(f"{found.split} of {pairs} backwards split")
    if found.recomputed:
        parts.append(f"{found.recomputed} forwards run again")
    parts.append(f"as {found.origin}" if found.origin else "its own order")
    return ", ".join(parts)
