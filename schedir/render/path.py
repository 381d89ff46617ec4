"""The critical path in short: how its time divides, and stretches of it that go on alike.

0..4     ranks 0 to 3: 0F0 → 1F0 → 2F0 → 3F0       one microbatch, from stage to stage
4..27    rank 3: 3B0 3F1 3B1 … 3F7 3B7             one rank, entry after entry
27..33   ranks 2 to 0: 2B7 → 1B7 → 0B7
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import attrs
import numpy as np

from schedir.ir import COMPUTE, COPIES, GROUPS, RECEIVES, Columns, Kind
from schedir.simulator import Timeline
from schedir.simulator.values import Numbers


@attrs.frozen
class Stretch:
    """Part of the path, from `start` to `end`: compute at `places`, which takes `compute`, and what
    follows each; `along` where it goes with a microbatch from rank to rank, else all is on one."""

    start: float
    end: float
    compute: float
    places: tuple[int, ...]
    along: bool


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class CriticalPath:
    """The path with its times: what stands at `places[n]` begins at `begins[n]`, is over at
    `ends[n]`, and the next begins at `begins[n + 1]`, where the makespan is the last."""

    columns: Columns
    places: tuple[int, ...]
    begins: Numbers
    ends: Numbers

    @classmethod
    def of(cls, timeline: Timeline) -> CriticalPath:
        """That of a timeline. Compute of which one time is not known counts as nothing; a transfer
        takes what is between its neighbours."""
        places, columns = timeline.critical_path, timeline.schedule.columns
        starts, ends = timeline.starts[list(places)], timeline.ends[list(places)]
        computes = columns.is_kind(*COMPUTE)[list(places)]
        ends = np.where(np.isnan(ends) & computes, starts, ends)
        starts = np.where(np.isnan(starts) & computes, ends, starts)
        before = np.append(0, np.where(np.isnan(ends), starts, ends))[:-1]
        begins = np.append(np.where(np.isnan(starts), before, starts), timeline.makespan)
        begins = np.fmax.accumulate(begins)  # clocks may be a little wrong
        over = np.clip(np.where(np.isnan(ends), begins[1:], ends), begins[:-1], begins[1:])
        return cls(columns, places, begins, over)

    @cached_property
    def _kinds(self) -> list[Kind]:
        return [self.columns.action(place).kind for place in self.places]

    @cached_property
    def _takes(self) -> list[float]:
        taken: list[float] = (self.ends - self.begins[:-1]).tolist()
        return taken

    def by_kind(self) -> dict[str, float]:
        """How much of the makespan is of what."""
        found = dict.fromkeys(("compute", "transfers", "copies", "sums of gradients"), 0.0)
        for kind, time in zip(self._kinds, self._takes, strict=True):
            found[_what(kind)] += time
        # What no entry explains: a measured run alone has it.
        between = float((self.begins[1:] - self.ends).sum() + self.begins[0])
        return {**found, "between entries": between}

    def by_stage(self) -> list[tuple[int, int, float, float]]:
        """For each stage and rank on the path, how long it computes there, and how long its
        payloads travel."""
        compute: dict[tuple[int, int], float] = defaultdict(float)
        travel: dict[tuple[int, int], float] = defaultdict(float)
        last = None
        for place, kind, time in zip(self.places, self._kinds, self._takes, strict=True):
            if kind in COMPUTE:
                last = int(self.columns.stage[place]), int(self.columns.rank[place])
                compute[last] += time
            elif kind in RECEIVES and last is not None:
                travel[last] += time
        return [(*key, time, travel[key]) for key, time in compute.items()]

    def stretches(self) -> list[Stretch]:
        """The compute on the path in as long stretches as go on alike."""
        numbers = [n for n, kind in enumerate(self._kinds) if kind in COMPUTE]
        found: list[Stretch] = []
        at = 0
        while at < len(numbers):
            along, stays = self._goes_on(numbers, at, True), self._goes_on(numbers, at, False)
            until = max(along, stays)
            own = [self.places[n] for n in numbers[at:until]]
            compute = sum(self._takes[n] for n in numbers[at:until])
            # It ends where the next one begins: transfers are of what comes before them.
            end = self.begins[numbers[until]] if until < len(numbers) else self.begins[-1]
            start = found[-1].end if found else 0
            found.append(Stretch(start, end.item(), compute, tuple(own), along > stays))
            at = until
        return found

    def _goes_on(self, numbers: list[int], at: int, along: bool) -> int:
        """How far what is at `at` goes on: as the same microbatch, or on the same rank."""
        columns, places = self.columns, [self.places[n] for n in numbers[at:]]
        until = 1
        while until < len(places):
            one, other = places[until - 1], places[until]
            alike = (
                columns.kind[one] == columns.kind[other]
                and columns.microbatch[one] == columns.microbatch[other]
                and columns.rank[one] != columns.rank[other]
                if along
                else columns.rank[one] == columns.rank[other]
            )
            if not alike:
                break
            until += 1
        return at + until


def _what(kind: Kind) -> str:
    if kind in COMPUTE:
        return "compute"
    if kind in COPIES:
        return "copies"
    return "sums of gradients" if kind in GROUPS else "transfers"
