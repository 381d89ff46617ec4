"""Weight versions: which one every FORWARD reads, and how long each one lives.

A stage's weights start at version 0 and each OPTIM_STEP makes the next. FORWARD reads `@version`
if given, else the newest at its place in the list; the backward of the same microbatch reads the
version of its FORWARD (weight stashing, PipeDream, SOSP 2019, section 3.3). A version lives until
the last action listed that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from schedir.ir.actions import BACKWARDS, Action, Kind


@attrs.frozen
class StageVersions:
    """The weight versions of one stage on one rank.

    `reads[microbatch]` is the version that its FORWARD reads; `steps[v]` the index of the
    OPTIM_STEP that ends version v's time as the newest; `last_read[v]` the index of the last
    action that reads version v.
    """

    reads: dict[int, int] = attrs.field(factory=dict)
    steps: list[int] = attrs.field(factory=list)
    last_read: dict[int, int] = attrs.field(factory=dict)

    def outlives_its_step(self, version: int) -> bool:
        """True where `version` is still read after the OPTIM_STEP that replaces it."""
        return version < len(self.steps) and self.last_read.get(version, -1) > self.steps[version]

    def peak(self) -> int:
        """The most versions alive at once, the newest included.

        An OPTIM_STEP whose old version nobody reads any more updates in place and adds none.
        """
        # The number alive only grows at an OPTIM_STEP, so it is enough to look right after each.
        deaths = sorted(
            self.last_read[v] for v in range(len(self.steps)) if self.outlives_its_step(v)
        )
        born = dead = 0
        peak = 1
        for version, step in enumerate(self.steps):
            born += self.outlives_its_step(version)
            while dead < len(deaths) and deaths[dead] < step:
                dead += 1
            peak = max(peak, 1 + born - dead)
        return peak


def weight_versions(actions: Sequence[Action]) -> dict[int, StageVersions]:
    """The weight versions of every stage in one rank's list, keyed by stage."""
    stages: dict[int, StageVersions] = {}
    for index, action in enumerate(actions):
        kind = action.kind
        if kind is Kind.FORWARD:
            stage = stages.setdefault(action.stage, StageVersions())
            version = len(stage.steps) if action.version is None else action.version
            assert action.microbatch is not None  # FORWARD always names one
            stage.reads[action.microbatch] = version
            stage.last_read[version] = index
        elif kind in BACKWARDS:
            stage = stages.setdefault(action.stage, StageVersions())
            assert action.microbatch is not None  # so do all backwards
            if action.microbatch in stage.reads:
                stage.last_read[stage.reads[action.microbatch]] = index
        elif kind is Kind.OPTIM_STEP:
            stages.setdefault(action.stage, StageVersions()).steps.append(index)
    return stages
