"""What timelines are called, so that nobody takes one for the other, and what their bubbles are."""

from __future__ import annotations

from schedir.simulator import Timeline


def captions(timeline: Timeline, against: Timeline | None) -> tuple[str, ...]:
    """A caption for each timeline: predicted or measured, its schedule, or which of the two."""
    if against is None:
        return (caption(timeline),)
    both = timeline, against
    origins = [caption(one) for one in both]
    if len(set(origins)) == 2:
        return tuple(origins)
    named = [f"{origin}, {one.schedule.name}" for origin, one in zip(origins, both, strict=True)]
    if len(set(named)) == 2:
        return tuple(named)
    return tuple(
        f"{origin}, {turn}" for origin, turn in zip(origins, ("first", "second"), strict=True)
    )


def caption(timeline: Timeline) -> str:
    """Predicted, or measured in which step."""
    if timeline.measured is None:
        return "predicted"
    return f"measured, step {timeline.measured.step}"


def bubble(timeline: Timeline) -> str:
    """The bubble of the makespan, and that of the longest span where it is another."""
    whole, span = (
        f"{fraction:.1%}" for fraction in (timeline.bubble_fraction, timeline.span_bubble_fraction)
    )
    return whole if whole == span else f"{whole} ({span} of the longest span)"
