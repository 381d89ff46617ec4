"""What a search has found."""

from __future__ import annotations

import attrs

from schedir.finder.bounds import Objective
from schedir.ir import Kind, Schedule
from schedir.simulator import Timeline


@attrs.frozen(kw_only=True)
class Found:
    """The best schedule of a search: what `schedir.finder.find` returns.

    `schedule` is complete and proved, `timeline` its simulated run. `value` is what was to be
    least, the `objective`, and `lower_bound` what no schedule of this work can be below, on any of
    the placements tried. `placement` is the name of the one chosen, `origin` that of the built-in
    schedule whose order it is, None where it was made here. So many `candidates` were tried with
    the random `seed`; `cut` is True where the clock or the user has ended the search before its
    work was done, so that the same seed may find another schedule.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    value: float
    lower_bound: float
    placement: str
    origin: str | None
    candidates: int
    seed: int
    cut: bool = False

    @property
    def distance(self) -> float:
        """How far above the lower bound it is, as a part of that: 0 for one that is the best there
        can be."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def split(self) -> int:
        """How many backwards are split."""
        return len(self.schedule.columns.where(Kind.BACKWARD_WEIGHT))

    @property
    def recomputed(self) -> int:
        """How many forwards are run again."""
        return len(self.schedule.columns.where(Kind.RECOMPUTE))
