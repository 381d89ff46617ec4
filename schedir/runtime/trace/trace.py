"""What a process records of its steps, and what rank 0 makes of what all have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from schedir.ir import Ints, Kind, Schedule
from schedir.runtime.accelerator import Mark
from schedir.runtime.call import Call
from schedir.runtime.plan import Plan
from schedir.runtime.processes.clocks import Alignment, Nanoseconds, Reading
from schedir.runtime.processes.control import Control
from schedir.runtime.program.observers import Observer
from schedir.runtime.stage.activations import Cells
from schedir.runtime.stage.stage import Stage
from schedir.runtime.trace.measured import timeline
from schedir.runtime.trace.recorder import COLUMNS, Anchor, Taken, recorder
from schedir.runtime.trace.sizes import Gauge, optimizer_bytes, weight_bytes
from schedir.simulator import Measured, Sizes, Timeline

_FEWEST_STEPS = 8
"""Are kept, however many actions they have."""

_MOST_SHAPES = 64


@attrs.frozen(eq=False)
class _Step:
    """A step that was made: its number, the list that was carried out, what it kept, and its
    stamps; `updates` where OPTIM_STEPs were carried out."""

    number: int
    schedule: Schedule
    gauge: Gauge
    updates: bool
    taken: Taken


@attrs.frozen(eq=False)
class _Report:
    """What a process has recorded, for rank 0.

    For each step the stamps of its ranks' places, by rank 0's clock within `error` nanoseconds; and
    what its stages keep, in bytes, as fields of `Sizes` by stage.
    """

    error: float
    stamps: Sequence[Nanoseconds]
    sizes: Sequence[Mapping[str, Mapping[int, int]] | None]


class Trace:
    """The steps of this process's ranks, until rank 0 asks for their timelines.

    Its `recorder` observes all instructions of the lists that train. All ranks of a pipeline make
    one together.
    """

    def __init__(self, plan: Plan, control: Control, stages: Mapping[int, Stage]) -> None:
        self._plan, self._control, self._stages = plan, control, stages
        self.recorder = recorder(plan.accelerator)
        self._gauges: dict[int, Gauge] = {}
        self._gauge = Gauge()
        self._measures = False
        self._steps: deque[_Step] = deque()
        self._actions = 0  # of these
        self._clocks = self._read_clocks()

    def observers(self, signature: int, first: bool) -> Iterable[Observer]:
        """Who watches a call that begins now, of another input signature than the one before. The
        first one of a signature holds copies that later ones do not: the second one is measured."""
        self._gauge = self._gauges.setdefault(signature, Gauge())
        self._measures = not first
        if len(self._gauges) > _MOST_SHAPES:
            del self._gauges[next(iter(self._gauges))]
        return () if first or self._gauge.finished else (self._gauge,)

    def keep(self, call: Call, schedule: Schedule, began: Mark, cells: Cells) -> None:
        """A step has been made, which began at a mark."""
        if self._measures and not self._gauge.finished:
            self._gauge.finish(self._stages, cells)
        taken = Taken(began, self.recorder.latest)
        self._steps.append(_Step(call.step, schedule, self._gauge, call.request.updates, taken))
        self._actions += len(schedule.columns)
        while self._actions > self.recorder.most and len(self._steps) > _FEWEST_STEPS:
            self._actions -= len(self._steps.popleft().schedule.columns)

    def timelines(self) -> list[Timeline]:
        """Those of the steps since this was asked last, on rank 0; none elsewhere. All ranks ask,
        and the device has come to the end of all steps."""
        steps = list(self._steps)
        report = self._report(steps)
        self._steps.clear()
        self._actions = 0
        if self._plan.grid.rank:
            self._control.send(report, 0)
            return []
        others = range(1, self._plan.grid.ranks) if len(self._plan.local_ranks) == 1 else ()
        reports = [report, *(self._control.receive(rank) for rank in others)]
        # Of any two ranks.
        error = 1e-9 * sum(sorted(report.error for report in reports)[-2:])
        return [
            timeline(
                step.schedule,
                np.concatenate([report.stamps[number] for report in reports]),
                _sizes([report.sizes[number] for report in reports], step.schedule.stages),
                Measured(step.number, error),
            )
            for number, step in enumerate(steps)
        ]

    def _report(self, steps: Sequence[_Step]) -> _Report:
        (first, begin), (last, end) = self._clocks, self._read_clocks()
        self._clocks = last, end
        alignment = Alignment(first, last)
        taken, error = self.recorder.read([step.taken for step in steps], begin, end)
        lists = {schedule: self._rows(schedule) for schedule in {s.schedule for s in steps}}
        kept = {gauge: self._kept(gauge) for gauge in {step.gauge for step in steps}}
        stamps = [
            self._placed(step, lists[step.schedule], alignment.aligned(times))
            for step, times in zip(steps, taken, strict=True)
        ]
        return _Report(
            alignment.error + error,
            stamps,
            [kept[step.gauge] for step in steps],
        )

    def _read_clocks(self) -> tuple[Reading, Anchor]:
        return self._control.read_clocks(), self.recorder.anchor()

    def _rows(self, schedule: Schedule) -> Ints:
        """Where the rows of the places of the ranks here begin."""
        lists = [self.recorder.of_list(schedule, rank) for rank in self._plan.local_ranks]
        return np.concatenate(lists)

    def _placed(self, step: _Step, rows: Ints, times: Nanoseconds) -> Nanoseconds:
        """The stamps of the places of the ranks here; shape [places, 4], 0 for none."""
        stamps: Nanoseconds = times[rows[:, None] + np.arange(COLUMNS)]
        stamps[rows < 0] = 0
        if self._plan.updates and not step.updates:
            columns = step.schedule.columns
            left_out = columns.is_kind(Kind.OPTIM_STEP, Kind.REDUCE_GRAD)
            here = np.isin(columns.rank, self._plan.local_ranks)
            stamps[left_out[here]] = 0
        return stamps

    def _kept(self, gauge: Gauge) -> dict[str, dict[int, int]] | None:
        """What the stages here keep; None where no call was measured yet."""
        if not gauge.finished:
            return None
        return {
            "boundary": gauge.boundary,
            "input": gauge.input,
            "activation": gauge.activation,
            "deferred": gauge.deferred,
            "gradient": gauge.gradient,
            "weight": {s: weight_bytes(stage) for s, stage in self._stages.items()},
            "optimizer": {s: optimizer_bytes(stage) for s, stage in self._stages.items()},
        }


def _sizes(found: Sequence[Mapping[str, Mapping[int, int]] | None], stages: int) -> Sizes | None:
    """Those of all stages; of a stage's replicas the largest. None where they are not known."""
    known = [sizes for sizes in found if sizes is not None]
    if len(known) < len(found):
        return None

    def of(name: str, stage: int) -> int:
        return max(sizes[name].get(stage, 0) for sizes in known)

    by_stage: dict[str, Any] = {
        name: tuple(of(name, stage) for stage in range(stages)) for name in known[0]
    }
    # All of an activation, where no I of a stage was seen.
    seen = {stage for sizes in known for stage in sizes["deferred"]}
    whole = zip(by_stage["deferred"], by_stage["activation"], strict=True)
    deferred = tuple(kept if s in seen else every for s, (kept, every) in enumerate(whole))
    by_stage["deferred"] = deferred if seen else None
    # There is a boundary after each stage but the last.
    return Sizes(**by_stage | {"boundary": by_stage["boundary"][:-1] or 0})
