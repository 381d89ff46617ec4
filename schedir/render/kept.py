"""What each rank keeps over time, as every picture shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from schedir.simulator import Timeline
from schedir.simulator.values import Numbers

Curve: TypeAlias = tuple[Numbers, Numbers]
"""The times, and the amounts from then on."""


@attrs.frozen
class Kept:
    """`curves[timeline][rank]`, in bytes where `sized`, else in live activations; `most` is the
    most that any of them reaches, so that all can be drawn to one scale."""

    sized: bool
    curves: Sequence[Sequence[Curve]]
    most: float


def kept_by(timelines: Sequence[Timeline]) -> Kept:
    """The curves of bytes where all timelines know their sizes, else those of activations."""
    sized = all(line.sizes is not None for line in timelines)
    curves = [
        [(line.memory if sized else line.live)(rank) for rank in range(line.schedule.ranks)]
        for line in timelines
    ]
    return Kept(sized, curves, max(most_of(curve) for ranks in curves for curve in ranks))


def most_of(curve: Curve) -> float:
    """The most that is kept, 0 where nothing is known."""
    most: float = curve[1].max(initial=0).item()
    return most
