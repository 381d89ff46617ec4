"""What pictures of a timeline have to leave out: what is not known when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from schedir.ir import Kind
from schedir.simulator import Timeline


def left_out(timelines: Iterable[Timeline | None], kinds: Iterable[Kind]) -> Iterator[str]:
    """A sentence for each timeline that has actions of these kinds without a time."""
    for timeline in filter(None, timelines):
        columns = timeline.schedule.columns
        asked = columns.is_kind(*kinds)
        without = np.flatnonzero(asked & (np.isnan(timeline.starts) | np.isnan(timeline.ends)))
        if len(without):
            rank, index = columns.position(int(without[0]))
            yield (
                f"{len(without)} of {asked.sum()} actions are left out, as it is not known when "
                f"they ran: rank {rank} #{index} {columns.action(int(without[0]))}"
                + (" is the first" if len(without) > 1 else "")
            )
