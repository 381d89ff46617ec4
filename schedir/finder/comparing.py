"""Runs schedules side by side, in several shapes: `compare`. What a full pipeline costs:
`steady_state`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from schedir.checker import CHANNELS, delays, prove
from schedir.display import DisplayedComparison
from schedir.errors import LoadError, SchedirError
from schedir.ir import DEFAULT_CHANNEL, Schedule, channel_model
from schedir.library import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    Costs,
    Generator,
    GeneratorFunction,
    Parameter,
    generator_of,
    is_list,
    load,
    name_of,
)
from schedir.passes import append_steps
from schedir.simulator import (
    UNITS,
    CostModel,
    Timeline,
    Unit,
    factor,
    load_timelines,
    median_step,
    recut,
    simulate,
    unmeasured,
)
from schedir.simulator.steady_state import SteadyState, full_pipeline, steady_in_unit

Target: TypeAlias = str | Path | Generator | GeneratorFunction | Schedule | Timeline
"""What names, or is, something to compare."""
SWEPT = ("microbatches", "chunks")
"""The arguments that a comparison may try several values of."""


def compare(
    targets: Iterable[Target],
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs = None,
    memory_limit: float | None = None,
    channel: str | None = None,
    sweep: Mapping[str, Sequence[int]] | None = None,
    add_steps: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **parameters: Parameter,
) -> Comparison:
    """Compare schedules that do the same work, the quickest first.

    `targets` are anything that `build` takes (names, files, generators), schedules, timelines, and
    files of measured timelines (`.json`; the step of the median makespan counts). `sweep` tries all
    combinations of several `microbatches` and `chunks`: {"microbatches": [8, 16, 32]}; lists and
    timelines keep their shape. Each of the `parameters` goes to the generators that have one of
    that name. With `add_steps`, schedules that list no OPTIM_STEP, such as torch's CSVs, get theirs
    (`append_steps`).

    All schedules train the same model, however they cut it. So a cost that is one number is the
    cost of one of as many stages as there are ranks, unless others are by stage. An interleaved
    schedule of 2 stages per rank has stages half as long, and at the textbook's costs its
    makespan is half the one that `simulate` gives. Costs by stage are summed if a schedule has
    fewer stages, and divided evenly if it has more (`recut`). `costs` may also be a function
    from a number of stages to costs.

    With a `channel` model, or a transport that stands for one, times are those under it
    (`simulate`). The table also holds each schedule that does not run under the model (by default
    `rank`), exceeds the `memory_limit` (bytes per rank), or can't be made in this shape, with its
    `problem`. `table.best` is the quickest of the others. If costs were fitted and a schedule has
    costs that no run has shown, its row names them (`unmeasured`); `table.measured` is the best of
    the other rows.

    `progress(done, total)` is called after each schedule.

    Raises LoadError or ParseError if a target can't be found or read. Raises SchedirError if a
    measured timeline has a unit of time and the costs have none; if a memory limit is given and no
    sizes are known; or if schedules have different numbers of ranks and a cost is one number, which
    is then of no known share of the model. Raises TypeError or ValueError for a bad argument.

    >>> import schedir
    >>> print(schedir.compare(["1f1b", "fill-drain"], ranks=2, microbatches=4))
    schedule          makespan  ratio  bubble  peak activations  delay
    1f1b        best        15  1.000   20.0%                 2      0
    fill-drain              15  1.000   20.0%                 4      0
    """
    costs = costs or CostModel()
    channel = None if channel is None else channel_model(channel)
    if memory_limit is not None and not memory_limit >= 0:
        raise ValueError(f"memory_limit must be a number of bytes >= 0, not {memory_limit}")
    shape = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    tried = [*_rows(targets, shape, sweep or {}, costs, parameters)]
    if add_steps:
        tried = [attrs.evolve(row, make=partial(_with_steps, row.make)) for row in tried]
    rows = []
    for done, row in enumerate(tried, 1):
        rows.append(_with_figures(row, costs, channel, memory_limit))
        if progress is not None:
            progress(done, len(tried))
    return _ranked(rows, costs, channel, memory_limit)


def steady_state(
    target: str | Path | Generator | GeneratorFunction | Schedule,
    costs: Costs = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    channel: str | None = None,
    **parameters: Parameter,
) -> SteadyState | None:
    """The cost of an asynchronous schedule once its pipeline is full: time per microbatch, bubble.

    An asynchronous schedule computes for a stage again after the stage's OPTIM_STEP, as `pipedream`
    does, so a pipeline that is never drained stays full. `target` and its shape are as for `build`,
    or a Schedule. `costs` are those of `simulate`, by default the textbook's, or a function from a
    number of stages to them. Times are in their unit. `channel` is that of `simulate`.

    A generator is built with more and more microbatches, up to about 200,000 actions, until the
    ends of all its actions repeat exactly one period later (up to rounding). A Schedule, a `.sched`
    or a `.csv` file must show that as it is.

    Returns None for a synchronous schedule, which drains at its update, and if no period shows. The
    result is never an estimate.

    Raises what `build` and `simulate` raise for the schedule in the requested shape.

    >>> import schedir
    >>> steady = schedir.steady_state("pipedream", ranks=4)
    >>> steady.time_per_microbatch, steady.bubble_fraction
    (3.0, 0.0)
    """
    if isinstance(target, Schedule):
        schedule, longer = target, None
    else:
        schedule = load(
            target, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=costs, **parameters
        )
        longer = schedule.rebuild
    model = costs(schedule.stages) if callable(costs) else costs
    return full_pipeline(simulate(schedule, model, channel=channel), model, longer, channel)[1]


@attrs.frozen
class Problem:
    """Why a schedule can't be chosen: a sentence, and the code of the rule that it breaks.

    `code` is None if the schedule could not be made in this shape.

    >>> import schedir
    >>> table = schedir.compare(["1f1b", "zbv"], ranks=2, microbatches=4, chunks=1)
    >>> table.rows[1].problem.code is None, table.best.target
    (True, '1f1b')
    """

    code: str | None
    message: str


@attrs.frozen(kw_only=True)
class Row:
    """One schedule of a comparison in one shape; None stands for anything unknown.

    `target` is the name that you gave, `timeline` the timeline, if you gave one. `chunks`, the
    stages per rank, is None for a list or a timeline, which has a shape already. `edge_makespan` is
    that of `Timeline`. `peak_activations` is the most (stage, microbatch) activations of any rank,
    `peak_bytes` the most that a rank keeps. `delay` is the most updates between the weight version
    that a gradient is computed at and the version that it is applied to. `fits` says whether the
    peak is within the memory limit. `problem` says why there is no time; a schedule that deadlocks
    under the chosen channel model has both, the time without a model. `unmeasured` names the costs
    that no run has shown, if costs were fitted: the row's time is only as good as what was used for
    them. `steady` is the cost of an asynchronous schedule while its pipeline is full, if it shows
    one. All other figures are of a single call, which fills the pipeline and drains it.

    >>> import schedir
    >>> row = schedir.compare(["1f1b"], ranks=2, microbatches=4).rows[0]
    >>> row.target, row.makespan, row.peak_activations, row.time_per_microbatch
    ('1f1b', 15, 2, 3.75)
    """

    target: str
    microbatches: int
    chunks: int | None = None
    timeline: Timeline | None = None
    ranks: int | None = None
    stages: int | None = None
    unit: Unit | None = None
    makespan: float | None = None
    edge_makespan: float | None = None
    bubble_fraction: float | None = None
    span_bubble_fraction: float | None = None
    peak_activations: int | None = None
    peak_bytes: float | None = None
    delay: int | None = None
    fits: bool | None = None
    problem: Problem | None = None
    unmeasured: tuple[str, ...] = ()
    steady: SteadyState | None = None
    make: Callable[[], Schedule] = attrs.field(repr=False, eq=False)

    @property
    def time_per_microbatch(self) -> float | None:
        """The makespan divided by the number of microbatches."""
        return None if self.makespan is None else self.makespan / self.microbatches

    @property
    def share(self) -> Fraction:
        """The size of a stage, relative to a stage of a model cut into as many stages as there are
        ranks."""
        return Fraction(self.ranks or 1, self.stages or 1)  # both are known, or neither

    def build(self) -> Schedule:
        """The complete schedule, made again: a comparison of many would not fit in memory.

        Raises LoadError or ScheduleError if it can't be made.
        """
        return prove(self.make(), CHANNELS[-1]).proved()


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False, repr=False)
class Comparison(DisplayedComparison):
    """Schedules compared, the quickest first: what `schedir.compare` returns.

    `rows` are sorted by makespan, or by time per microbatch if the numbers of microbatches differ.
    Rows without a time come last. Equally quick schedules are sorted by memory, then by delay.
    `channel` is the model that they must run under; if they are `timed`, times are those under it.
    `memory_limit` is the most bytes that a rank may keep, None for no limit.

    >>> import schedir
    >>> table = schedir.compare(["fill-drain", "1f1b"], ranks=2, microbatches=4)
    >>> table.best.target, [row.peak_activations for row in table.rows]
    ('1f1b', [2, 4])
    """

    rows: tuple[Row, ...]
    channel: str
    memory_limit: float | None
    unit: Unit | None = None
    timed: bool = False

    @cached_property
    def per_microbatch(self) -> bool:
        """True if the schedules have different numbers of microbatches: then time per microbatch
        counts."""
        return len({row.microbatches for row in self.rows}) > 1

    @cached_property
    def beside_edge(self) -> bool:
        """True if some row has an `edge_makespan` as well."""
        return any(row.edge_makespan is not None for row in self.rows)

    @cached_property
    def best(self) -> Row | None:
        """The quickest that runs under the channel model and is within the memory limit, if any."""
        runs = [row for row in self.rows if row.problem is None]
        return next((row for row in runs if row.fits or self.memory_limit is None), None)

    @cached_property
    def measured(self) -> Row | None:
        """The best of the rows whose costs are all given or measured."""
        rows = tuple(row for row in self.rows if not row.unmeasured)
        return attrs.evolve(self, rows=rows).best

    def time(self, row: Row) -> float | None:
        """The time that rows are compared by: the makespan, or the time per microbatch."""
        return row.time_per_microbatch if self.per_microbatch else row.makespan

    def ratio(self, row: Row) -> float | None:
        """The row's time as a multiple of the best one's, or of the quickest one's if there is no
        best."""
        time, least = self.time(row), self.time(self.best or self.rows[0])
        return time / least if time is not None and least else None


def _rows(
    targets: Iterable[Target],
    shape: dict[str, Any],
    sweep: Mapping[str, Sequence[int]],
    costs: Costs,
    parameters: Mapping[str, Parameter],
) -> Iterator[Row]:
    """All targets in all shapes, without figures. A list or a timeline keeps its shape; if all of
    them agree, the other targets take from it what is left open.

    Raises LoadError or ParseError if a target can't be found or read, or if no generator has one of
    the parameters. Raises TypeError if `targets` is a single target, ValueError for what can't be
    swept.
    """
    for name, values in sweep.items():
        if name not in SWEPT:
            raise ValueError(f"{name!r} can't be swept; there are {', '.join(SWEPT)}")
        if shape[name] is not None:
            raise ValueError(f"{name} has one value and is swept too: leave one of them out")
        if not values or len(set(values)) < len(values):
            raise ValueError(f"sweep of {name}: give some values, each once, not {values!r}")
    if isinstance(targets, (str, Path)):
        raise TypeError(f"targets must be a list: [{str(targets)!r}]")
    found = [_found(target) for target in targets]
    if not found:
        raise LoadError("there is nothing to compare: name some schedules")
    for name in parameters:
        if not any(generator and _has(generator, name) for _, generator in found):
            raise LoadError(f"no schedule here has a parameter {name!r}")
    lists = [row.make() for row, generator in found if generator is None]
    for name in ("ranks", "microbatches"):
        had = {getattr(each, name) for each in lists} or {getattr(costs, name, None)}
        if shape[name] is None and name not in sweep and len(had) == 1:
            shape[name] = had.pop()
    seen = costs
    if isinstance(costs, CostModel):  # of the same model, whatever the number of stages
        seen = partial(recut, costs, of=shape["ranks"] or DEFAULT_RANKS)
    for row, generator in found:
        if generator is None:
            yield attrs.evolve(row, make=partial(_as_it_is, row, shape))
            continue
        own = {name: value for name, value in parameters.items() if _has(generator, name)}
        for microbatches, chunks in product(*(sweep.get(name, [shape[name]]) for name in SWEPT)):
            asked = {**shape, **own, "microbatches": microbatches, "chunks": chunks}
            yield attrs.evolve(
                row,
                microbatches=row.microbatches if microbatches is None else microbatches,
                chunks=chunks or row.chunks,
                make=partial(load, generator, costs=seen, **asked),
            )


def _found(target: Target) -> tuple[Row, Generator | None]:
    """The row of a target in its usual shape, and its generator, if it has one."""
    file = str(target) if isinstance(target, (str, Path)) else ""
    made: Schedule | Timeline
    if isinstance(target, (Schedule, Timeline)):
        made = target
    elif file.endswith(".json"):
        timelines = load_timelines(file)
        if not timelines:
            raise LoadError(f"{file} holds no timeline")
        made = median_step(timelines)
    elif is_list(file):
        made = load(file)
    else:
        generator = generator_of(target)
        row = Row(
            target=name_of(file) or generator.name,
            microbatches=DEFAULT_MICROBATCHES,
            chunks=generator.chunks,
            make=partial(load, generator),
        )
        return row, generator
    line, schedule = (made, made.schedule) if isinstance(made, Timeline) else (None, made)
    row = Row(
        target=name_of(file) or schedule.name,
        microbatches=schedule.microbatches,
        timeline=line,
        make=lambda: schedule,
    )
    return row, None


def _has(generator: Generator, parameter: str) -> bool:
    return generator.takes_any_parameter or parameter in generator.parameters


def _as_it_is(row: Row, shape: Mapping[str, Any]) -> Schedule:
    """The schedule of a list or a timeline. Raises LoadError if another shape is asked for."""
    schedule = row.make()
    for what in ("ranks", "microbatches"):
        asked, has = shape[what], getattr(schedule, what)
        if asked not in (None, has):
            raise LoadError(f"{row.target} has {has} {what}, not {asked}")
    return schedule


def _with_steps(make: Callable[[], Schedule]) -> Schedule:
    return append_steps(make())


def _with_figures(
    row: Row,
    costs: CostModel | Callable[[int], CostModel],
    channel: str | None,
    limit: float | None,
) -> Row:
    """The row with all that is known of its schedule, which is simulated unless it is a timeline's
    already."""
    line = row.timeline
    try:
        schedule = row.make()
        if line is None or line.measured is None:  # what has run is not judged
            report = prove(schedule, channel or DEFAULT_CHANNEL)
            if not report.ok:
                worst = report.errors[0]
                row = attrs.evolve(row, problem=Problem(worst.code, worst.message))
                # What blocks under this model has no time under it.
                report, channel = prove(schedule, CHANNELS[-1]), None
            if report.schedule is None:
                return row
            schedule = report.schedule
        if line is None:
            if isinstance(costs, CostModel):
                model = recut(costs, schedule.stages, of=schedule.ranks)
                missing = unmeasured(schedule, costs)
            else:
                model, missing = costs(schedule.stages), ()
            line = simulate(schedule, model, channel=channel)
            longer = None if row.chunks is None else schedule.rebuild
            steady = full_pipeline(line, model, longer, channel)[1]
            row = attrs.evolve(row, steady=steady, unmeasured=missing)
    except SchedirError as error:
        return attrs.evolve(row, problem=Problem(None, str(error)))
    sizes = [rank.peak_bytes for rank in line.ranks if rank.peak_bytes is not None]
    peak = max(sizes, default=None)
    return attrs.evolve(
        row,
        ranks=line.schedule.ranks,
        stages=line.schedule.stages,
        unit=line.unit,
        makespan=line.makespan,
        edge_makespan=line.edge_makespan,
        bubble_fraction=line.bubble_fraction,
        span_bubble_fraction=line.span_bubble_fraction,
        peak_activations=max(rank.peak_activations for rank in line.ranks),
        peak_bytes=peak,
        delay=int(delays(line.schedule).max(initial=0)),
        fits=None if peak is None or limit is None else peak <= limit,
    )


def _ranked(rows: list[Row], costs: Costs, channel: str | None, limit: float | None) -> Comparison:
    """The rows in one unit of time, the quickest first."""
    _expect_one_model(costs, {row.ranks for row in rows if row.ranks and row.timeline is None})
    if limit is not None and all(row.fits is None for row in rows):
        raise SchedirError(
            "a memory limit needs bytes to compare with: give the costs activation_bytes, "
            "weight_bytes and the other sizes"
        )
    units = {row.unit for row in rows if row.makespan is not None}
    if len(units) > 1 and None in units and costs == CostModel():
        raise SchedirError(
            "a measured timeline has a unit of time, and the textbook's costs have none: "
            "give costs for the other schedules"
        )
    unit = next((unit for unit in UNITS if unit in units), None)
    if unit is not None:
        rows = [_in_unit(row, unit) for row in rows]
    rows = sorted(rows, key=_order)
    return Comparison(tuple(rows), channel or DEFAULT_CHANNEL, limit, unit, channel is not None)


def _expect_one_model(costs: Costs, ranks: set[int]) -> None:
    """Raise SchedirError if each cost is one number for all stages, and numbers of ranks differ."""
    if len(ranks) > 1 and isinstance(costs, CostModel) and costs.stages is None:
        many = " and ".join(map(str, sorted(ranks)))
        raise SchedirError(
            f"the schedules have {many} ranks, and with one number for all stages each would train "
            "another model: give costs by stage, or compare schedules of the same number of ranks"
        )


def _in_unit(row: Row, unit: Unit) -> Row:
    if row.makespan is None:
        return row
    times, least, steady = factor(row.unit, unit), row.edge_makespan, row.steady
    return attrs.evolve(
        row,
        makespan=row.makespan * times,
        edge_makespan=None if least is None else least * times,
        steady=None if steady is None else steady_in_unit(steady, unit),
        unit=unit,
    )


def _order(row: Row) -> tuple[float, ...]:
    """The sort key of a row."""
    time = row.time_per_microbatch
    if time is None:
        return (math.inf,)
    activations = (row.peak_activations or 0) * float(row.share)
    # Sums of floats in another order are no reason to be before another.
    return float(f"{time:.9g}"), row.peak_bytes or 0, activations, row.delay or 0
