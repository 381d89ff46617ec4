"""Any schedule → one whose stages run forwards again instead of keeping what these leave behind.

    0F0 0F1 0B0 0F2 0I1 0W1          0F0 0F1 0R0 0B0 0F2 0R1 0I1 0W1

Each forward then keeps its input alone (Chen et al. 2016, arXiv 1604.06174). An R may stand as far
ahead as the author lists it, to fill a bubble; here it stands where it keeps its activation for the
shortest time.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from schedir.errors import UnsoundError
from schedir.ir import COMMUNICATION, Kind, Schedule, expect_schedule
from schedir.passes.communication import insert_communication, strip_communication
from schedir.passes.insertion import expect_stages, inserted


def recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with an R directly before the B or I of every microbatch of these stages.

    Before the entry of an overlapped pair. Where a microbatch has its R already it is left as it
    is. Each R reads the weight version of its F, and has the line of Python of its B or I.
    Communication stays where it is, but where it is what `insert_communication` makes: then it is
    made anew, as it goes by when things are done. Raises TypeError for what is no Schedule or no
    collection of stages, ValueError for a stage that there is none of.
    """
    expect_schedule(schedule)
    expect_stages(schedule, stages, "recompute")
    listed = _listed(schedule, stages)
    if listed is schedule or not _as_inserted(schedule):
        return listed
    return insert_communication(strip_communication(listed))


def _as_inserted(schedule: Schedule) -> bool:
    """Whether the communication is listed, and listed as schedir would."""
    if not schedule.columns.is_kind(*COMMUNICATION).any():
        return False
    try:
        return insert_communication(strip_communication(schedule)) == schedule
    except UnsoundError:
        return False


def _listed(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with its Rs and nothing else changed; itself where there are none to list."""
    columns = schedule.columns
    backwards = columns.where(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    backwards = backwards[np.isin(columns.stage[backwards], [*stages])]
    known = columns.alike(backwards, columns.where(Kind.RECOMPUTE))
    backwards = backwards[~known]
    if not len(backwards):
        return schedule
    return inserted(
        schedule,
        Kind.RECOMPUTE,
        columns.stage[backwards],
        columns.microbatch[backwards],
        columns.rank[backwards],
        columns.heads[columns.entry[backwards]],
        like=backwards,
    )
