"""Runs schedules beside each other: `compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import attrs

from schedir.checker import CHANNELS, delays, prove
from schedir.errors import SchedirError
from schedir.finder.comparison import Comparison, Problem, Row, ranked
from schedir.finder.variants import Shapes, Target, Variant, variants
from schedir.ir import DEFAULT_CHANNEL, Schedule, expect_channel
from schedir.library import Costs, Parameter
from schedir.passes import append_steps
from schedir.simulator import (
    UNITS,
    CostModel,
    Timeline,
    Unit,
    factor,
    recut,
    simulate,
    unmeasured,
)
from schedir.simulator.recut import OF_A_PART


def compare(
    targets: Iterable[Target],
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs = None,
    memory_limit: float | None = None,
    channel: str = DEFAULT_CHANNEL,
    sweep: Mapping[str, Sequence[int]] | None = None,
    add_steps: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **parameters: Parameter,
) -> Comparison:
    """Compare schedules that do the same work, the quickest first.

    `targets` are what `build` takes (names, files, generators), and schedules, timelines and files
    of measured timelines (`.json`; the step of the median makespan). `sweep` goes through several
    `microbatches` and `chunks`, all combinations: {"microbatches": [8, 16, 32]}; lists and
    timelines, which have a shape, are taken as they are. Each of the `parameters` goes to the
    generators that have one of that name. With `add_steps` schedules that list no OPTIM_STEP, as
    torch's CSVs don't, get theirs (`append_steps`).

    All have the same model to train, however they cut it. So a cost that is one number is that of
    one of as many stages as there are ranks: an interleaved schedule of 2 stages per rank has
    stages half as long, and its makespan at the textbook's costs, by default, is half the one that
    `simulate` gives it. Costs by stage are summed where a schedule has fewer stages, and shared out
    evenly where it has more (`recut`); `costs` may also be a function from a number of stages to
    costs, such as closed forms.

    A schedule that does not run under the `channel` model, that exceeds the `memory_limit`, in
    bytes per rank, or that can't be made in this shape is in the table as well, with its `problem`;
    `table.best` is the quickest of the others. Where costs were fitted and a schedule has some that
    no run has shown, its row names them, `unmeasured`; `table.measured` is the best of the rest.

    `progress(done, total)` is called after each.

    Raises LoadError or ParseError where a target can't be found or read, SchedirError where the
    costs have no unit of time and a measured timeline has, or where a memory limit is given and no
    sizes are known, or where schedules of unequal numbers of ranks have a cost that is one number,
    which is then of no known share of the model; TypeError or ValueError for a bad argument.
    """
    costs = costs or CostModel()
    job = _Job(costs, channel, memory_limit)
    tried = variants(targets, Shapes(ranks, microbatches, chunks, sweep or {}, parameters, costs))
    if add_steps:
        tried = [attrs.evolve(each, make=partial(_with_steps, each)) for each in tried]
    rows = []
    for done, variant in enumerate(tried, 1):
        rows.append(job.row(variant))
        if progress is not None:
            progress(done, len(tried))
    return job.comparison(rows)


@attrs.frozen
class _Job:
    """What all rows are made by."""

    costs: CostModel | Callable[[int], CostModel]
    channel: str = attrs.field(validator=lambda _, __, value: expect_channel(value))
    memory_limit: float | None = attrs.field()
    _ranks: set[int] = attrs.field(factory=set, init=False)  # of what the costs priced

    @memory_limit.validator
    def _check_limit(self, attribute: object, value: float | None) -> None:
        if value is not None and not value >= 0:
            raise ValueError(f"memory_limit must be a number of bytes >= 0, not {value}")

    def row(self, variant: Variant) -> Row:
        """The row of a target in a shape."""
        row = Row(
            target=variant.name,
            microbatches=variant.microbatches,
            chunks=variant.chunks,
            make=lambda: _schedule_of(variant.make()),
        )
        try:
            made = variant.make()
            if isinstance(made, Timeline) and made.measured is not None:
                return self._figures(row, made)  # it has run: what it is for is not asked
            complete, problem = self._proved(_schedule_of(made))
            row = attrs.evolve(row, problem=problem)
            if complete is None:
                return row
            if isinstance(made, Timeline):
                return self._figures(row, made)
            line = simulate(complete, self._of(complete))
            if isinstance(self.costs, CostModel):
                row = attrs.evolve(row, unmeasured=unmeasured(complete, self.costs))
        except SchedirError as error:
            return attrs.evolve(row, problem=Problem(None, str(error)))
        return self._figures(row, line)

    def _figures(self, row: Row, line: Timeline) -> Row:
        """The row with what a timeline shows, and whether that is within the limit."""
        schedule, sizes = line.schedule, [rank.peak_bytes for rank in line.ranks]
        peak = max((size for size in sizes if size is not None), default=None)
        limit = self.memory_limit
        return attrs.evolve(
            row,
            ranks=schedule.ranks,
            stages=schedule.stages,
            unit=line.unit,
            makespan=line.makespan,
            bubble_fraction=line.bubble_fraction,
            span_bubble_fraction=line.span_bubble_fraction,
            peak_activations=max(rank.peak_activations for rank in line.ranks),
            peak_bytes=peak,
            delay=int(delays(schedule).max(initial=0)),
            fits=None if peak is None or limit is None else peak <= limit,
        )

    def comparison(self, rows: list[Row]) -> Comparison:
        """All rows in one unit of time, ranked."""
        self._expect_one_model()
        timed = [row for row in rows if row.makespan is not None]
        if self.memory_limit is not None and all(row.peak_bytes is None for row in timed):
            raise SchedirError(
                "a memory limit needs bytes to compare with: give the costs activation_bytes, "
                "weight_bytes and what else is kept"
            )
        units = {row.unit for row in timed}
        if len(units) > 1:
            if None in units and self.costs == CostModel():
                raise SchedirError(
                    "a measured timeline has a unit of time, and the textbook's costs have none: "
                    "give the costs of the others"
                )
            unit = next(unit for unit in UNITS if unit in units)
            rows = [_in_unit(row, unit) for row in rows]
        return ranked(rows, self.channel, self.memory_limit)

    def _expect_one_model(self) -> None:
        """Raise SchedirError where a cost of each stage is one number, and ranks differ."""
        if len(self._ranks) < 2 or not isinstance(self.costs, CostModel):
            return
        costs = {name: getattr(self.costs, name) for name in OF_A_PART}
        single = [name for name, cost in costs.items() if cost and not isinstance(cost, tuple)]
        if single:
            ranks = " and ".join(map(str, sorted(self._ranks)))
            raise SchedirError(
                f"the schedules have {ranks} ranks, which at one number for {', '.join(single)} "
                "would each train another model: give those by stage, or all as many ranks"
            )

    def _of(self, schedule: Schedule) -> CostModel:
        if isinstance(self.costs, CostModel):
            self._ranks.add(schedule.ranks)
            return recut(self.costs, schedule.stages, of=schedule.ranks)
        return self.costs(schedule.stages)

    def _proved(self, schedule: Schedule) -> tuple[Schedule | None, Problem | None]:
        """The complete form, if it runs anywhere, and why not under the channel model."""
        report = prove(schedule, self.channel)
        if report.ok:
            return report.schedule, None
        worst = next(each for each in report.diagnostics if each.severity == "error")
        problem = Problem(worst.code, worst.message)
        return prove(schedule, CHANNELS[-1]).schedule, problem


def _with_steps(variant: Variant) -> Schedule | Timeline:
    made = variant.make()
    return made if isinstance(made, Timeline) else append_steps(made)


def _schedule_of(made: Schedule | Timeline) -> Schedule:
    return made.schedule if isinstance(made, Timeline) else made


def _in_unit(row: Row, unit: Unit) -> Row:
    if row.makespan is None:
        return row
    return attrs.evolve(row, makespan=row.makespan * factor(row.unit, unit), unit=unit)
