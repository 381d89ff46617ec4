"""Weight versions: which one every FORWARD reads, and how long each one lives.

A stage's weights start at version 0 and each OPTIM_STEP makes the next. FORWARD reads `@version`
if given, else the newest at its place in the list; the backward of the same microbatch reads the
version of its FORWARD (weight stashing, PipeDream, SOSP 2019, section 3.3). A version lives until
the last action listed that reads it.
"""

from __future__ import annotations

import attrs
import numpy as np

from schedir.ir.columns import KIND_INDEX, Columns, Ints
from schedir.ir.kinds import READS_WEIGHTS, Kind


@attrs.frozen
class StageVersions:
    """The weight versions of one stage on one rank.

    `reads[microbatch]` is the version that its FORWARD reads; `steps[v]` the place of the
    OPTIM_STEP that ends version v's time as the newest; `last_read[v]` that of the last action that
    reads version v. Places are counted from the start of the rank's list, in actions.
    """

    reads: dict[int, int] = attrs.field(factory=dict)
    steps: list[int] = attrs.field(factory=list)
    last_read: dict[int, int] = attrs.field(factory=dict)

    def outlives_its_step(self, version: int) -> bool:
        """True where `version` is still read after the OPTIM_STEP that replaces it."""
        return version < len(self.steps) and self.last_read.get(version, -1) > self.steps[version]

    def peak(self) -> tuple[int, int | None]:
        """The most versions alive at once, the newest included, and the place of the OPTIM_STEP
        that makes the last of them (None where there is never more than one).

        An OPTIM_STEP whose old version nobody reads any more updates in place and adds none.
        """
        # The number alive only grows at an OPTIM_STEP, so it is enough to look right after each.
        deaths = sorted(
            self.last_read[v] for v in range(len(self.steps)) if self.outlives_its_step(v)
        )
        born = dead = 0
        peak, place = 1, None
        for version, step in enumerate(self.steps):
            born += self.outlives_its_step(version)
            while dead < len(deaths) and deaths[dead] < step:
                dead += 1
            if 1 + born - dead > peak:
                peak, place = 1 + born - dead, step
        return peak, place


def steps_before(columns: Columns) -> Ints:
    """For every place, how many OPTIM_STEPs of its stage stand before it on its rank."""
    counts = np.zeros(len(columns), np.int64)
    if not columns.is_kind(Kind.OPTIM_STEP).any():
        return counts
    order = np.lexsort((columns.stage, columns.rank))  # stable: within a stage by place
    step = columns.is_kind(Kind.OPTIM_STEP)[order]
    so_far: Ints = np.cumsum(step) - step
    stage, rank = columns.stage[order], columns.rank[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (stage[1:] != stage[:-1]) | (rank[1:] != rank[:-1])
    starts = np.flatnonzero(first)
    counts[order] = so_far - np.repeat(so_far[starts], np.diff([*starts, len(order)]))
    return counts


def weight_versions(columns: Columns, rank: int) -> dict[int, StageVersions]:
    """The weight versions of every stage in one rank's list, keyed by stage."""
    start, end = columns.starts[rank : rank + 2].tolist()
    own = start + np.flatnonzero(np.isin(columns.kind[start:end], _CONCERNED))
    stages: dict[int, StageVersions] = {}
    for place, code, number, microbatch, version in zip(
        own.tolist(),
        columns.kind[own].tolist(),
        columns.stage[own].tolist(),
        columns.microbatch[own].tolist(),
        columns.version[own].tolist(),
        strict=True,
    ):
        stage = stages.get(number)
        if stage is None:
            stage = stages[number] = StageVersions()
        if code == _FORWARD:
            read = len(stage.steps) if version < 0 else version
            stage.reads[microbatch] = read
            stage.last_read[read] = place - start
        elif code == _STEP:
            stage.steps.append(place - start)
        elif microbatch in stage.reads:
            stage.last_read[stage.reads[microbatch]] = place - start
    return stages


_CONCERNED = [KIND_INDEX[kind] for kind in (*READS_WEIGHTS, Kind.OPTIM_STEP)]
_FORWARD, _STEP = KIND_INDEX[Kind.FORWARD], KIND_INDEX[Kind.OPTIM_STEP]
