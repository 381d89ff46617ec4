"""Runs schedules side by side, in several shapes: `compare`. What a full pipeline costs:
`steady_state`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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
from schedir.simulator.costs import OF_A_PART

if TYPE_CHECKING:
    from schedir.simulator.steady_state import SteadyState


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
    cost of one of as many stages as there are ranks. An interleaved schedule of 2 stages per rank
    has stages half as long, and at the textbook's costs its makespan is half the one that
    `simulate` gives. Costs by stage are summed if a schedule has fewer stages, and divided evenly
    if it has more (`recut`). `costs` may also be a function from a number of stages to costs.

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
        shape: dict[str, Any] = {"ranks": ranks, "chunks": chunks, "costs": costs, **parameters}
        schedule = load(target, microbatches=microbatches, **shape)
        longer = schedule.rebuild
    model = costs(schedule.stages) if callable(costs) else costs
    if not schedule.is_asynchronous:
        simulate(schedule, model, channel=channel)  # raises what is wrong with either
        return None
    from schedir.simulator.steady_state import full_pipeline  # which few schedules need

    return full_pipeline(schedule, model, longer, channel)[1]


@attrs.frozen
class _Job:
    """What all rows share."""

    costs: CostModel | Callable[[int], CostModel]
    channel: str | None = attrs.field(converter=attrs.converters.optional(channel_model))
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
            channel = None if problem else self.channel  # what blocks there has no time there
            line = simulate(complete, self._of(complete), channel=channel)
            if isinstance(self.costs, CostModel):
                row = attrs.evolve(row, unmeasured=unmeasured(complete, self.costs))
            steady = self._steady(_schedule_of(made), variant.grows, channel)
            row = attrs.evolve(row, steady=steady)
        except SchedirError as error:
            return attrs.evolve(row, problem=Problem(None, str(error)))
        return self._figures(row, line)

    def _figures(self, row: Row, line: Timeline) -> Row:
        """The row with the figures of a timeline, and whether it is within the limit."""
        schedule, sizes = line.schedule, [rank.peak_bytes for rank in line.ranks]
        peak = max((size for size in sizes if size is not None), default=None)
        limit = self.memory_limit
        return attrs.evolve(
            row,
            ranks=schedule.ranks,
            stages=schedule.stages,
            unit=line.unit,
            makespan=line.makespan,
            edge_makespan=line.edge_makespan,
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
                "weight_bytes and the other sizes"
            )
        units = {row.unit for row in timed}
        if len(units) > 1:
            if None in units and self.costs == CostModel():
                raise SchedirError(
                    "a measured timeline has a unit of time, and the textbook's costs have none: "
                    "give costs for the other schedules"
                )
            largest = next(unit for unit in UNITS if unit in units)
            rows = [_in_unit(row, largest) for row in rows]
        unit = next((row.unit for row in rows if row.unit is not None), None)
        model = self.channel or DEFAULT_CHANNEL
        is_timed = self.channel is not None
        found = Comparison(tuple(rows), model, self.memory_limit, unit, is_timed)
        return attrs.evolve(found, rows=tuple(sorted(rows, key=partial(_order, found))))

    def _expect_one_model(self) -> None:
        """Raise SchedirError if a cost of each stage is one number, and numbers of ranks differ."""
        if len(self._ranks) < 2 or not isinstance(self.costs, CostModel):
            return
        costs = {name: getattr(self.costs, name) for name in OF_A_PART}
        single = [name for name, cost in costs.items() if cost and not isinstance(cost, tuple)]
        if single:
            ranks = " and ".join(map(str, sorted(self._ranks)))
            raise SchedirError(
                f"the schedules have {ranks} ranks, and with one number for {', '.join(single)} "
                "each would train another model: give these costs by stage, or compare schedules "
                "of the same number of ranks"
            )

    def _of(self, schedule: Schedule) -> CostModel:
        if isinstance(self.costs, CostModel):
            self._ranks.add(schedule.ranks)
            return recut(self.costs, schedule.stages, of=schedule.ranks)
        return self.costs(schedule.stages)

    def _steady(self, schedule: Schedule, grows: bool, channel: str | None) -> SteadyState | None:
        if not schedule.is_asynchronous:
            return None
        from schedir.simulator.steady_state import full_pipeline  # which few schedules need

        longer = schedule.rebuild if grows else None
        return full_pipeline(schedule, self._of(schedule), longer, channel)[1]

    def _proved(self, schedule: Schedule) -> tuple[Schedule | None, Problem | None]:
        """The complete form, if it runs under any model, and why it does not under this one."""
        report = prove(schedule, self.channel or DEFAULT_CHANNEL)
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


def _order(comparison: Comparison, row: Row) -> tuple[float, ...]:
    """The sort key of a row."""
    time = comparison.time(row)
    if time is None:
        return (math.inf,)
    activations = (row.peak_activations or 0) * float(row.share)
    # Sums of floats in another order are no reason to be before another.
    return float(f"{time:.9g}"), row.peak_bytes or 0, activations, row.delay or 0


def _in_unit(row: Row, unit: Unit) -> Row:
    if row.makespan is None:
        return row
    times, steady = factor(row.unit, unit), row.steady
    if steady is not None:
        from schedir.simulator.steady_state import steady_in_unit  # which few schedules need

        steady = steady_in_unit(steady, unit)
    least = None if row.edge_makespan is None else row.edge_makespan * times
    return attrs.evolve(
        row, makespan=row.makespan * times, edge_makespan=least, steady=steady, unit=unit
    )


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

    `target` is the name that you gave. `chunks`, the stages per rank, is None for a list or a
    timeline, which has a shape already. `edge_makespan` is that of `Timeline`. `peak_activations`
    is the most (stage, microbatch) activations of any rank, `peak_bytes` the most that a rank
    keeps. `delay` is the most updates between the weight version that a gradient is computed at and
    the version that it is applied to. `fits` says whether the peak is within the memory limit.
    `problem` says why there is no time; a schedule that deadlocks under the chosen channel model
    has both, the time without a model. `unmeasured` names the costs that no run has shown, if costs
    were fitted: the row's time is only as good as what was used for them. `steady` is the cost of
    an asynchronous schedule while its pipeline is full, if it shows one. All other figures are of a
    single call, which fills the pipeline and drains it.

    >>> import schedir
    >>> row = schedir.compare(["1f1b"], ranks=2, microbatches=4).rows[0]
    >>> row.target, row.makespan, row.peak_activations, row.time_per_microbatch
    ('1f1b', 15, 2, 3.75)
    """

    target: str
    microbatches: int
    chunks: int | None = None
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
        return Fraction(self.ranks, self.stages) if self.ranks and self.stages else Fraction(1)

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
        allowed = (True,) if self.memory_limit is not None else (None, True)
        return next((row for row in self.rows if row.problem is None and row.fits in allowed), None)

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


Target: TypeAlias = str | Path | Generator | GeneratorFunction | Schedule | Timeline
"""What names, or is, something to compare."""
SWEPT = ("microbatches", "chunks")
"""The arguments that a comparison may try several values of."""
_RUN = ".json"


@attrs.frozen
class Shapes:
    """The shapes to try: `swept` maps a name to several values; the others have one value or none.

    Raises ValueError or TypeError for a name or values that can't be swept.
    """

    ranks: int | None
    microbatches: int | None
    chunks: int | None
    swept: Mapping[str, Sequence[int]]
    parameters: Mapping[str, Parameter]
    costs: Costs = None

    def __attrs_post_init__(self) -> None:
        for name, values in self.swept.items():
            if name not in SWEPT:
                raise ValueError(f"{name!r} can't be swept; there are {', '.join(SWEPT)}")
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has one value and is swept too: leave one of them out")
            if not values or len(set(values)) < len(values):
                raise ValueError(f"sweep of {name}: give some values, each once, not {values!r}")
            for value in values:
                if type(value) is not int or value < 1:
                    raise ValueError(f"sweep of {name}: {value!r} is not an int >= 1")

    def several(self, name: str) -> Sequence[int | None]:
        """The values of `microbatches` or `chunks` to try."""
        return self.swept.get(name, [getattr(self, name)])


@attrs.frozen
class Variant:
    """A target in one shape. `make` makes it, or raises LoadError or ParseError. A target that
    `grows` has a generator, which may be asked for more microbatches."""

    name: str
    microbatches: int
    chunks: int | None
    make: Callable[[], Schedule | Timeline]
    grows: bool = False


def variants(targets: Iterable[Target], shapes: Shapes) -> list[Variant]:
    """All targets in all shapes. A list or a timeline keeps its shape; if all of them agree, the
    other targets take from it what is left open.

    Raises LoadError or ParseError if a target can't be found or read, or if no generator has one of
    the parameters. Raises TypeError if `targets` is a single target.
    """
    if isinstance(targets, (str, Path)):
        raise TypeError(f"targets must be a list: [{str(targets)!r}]")
    found = [(target, _found(target)) for target in targets]
    if not found:
        raise LoadError("there is nothing to compare: name some schedules")
    generators = [each for _, each in found if isinstance(each, Generator)]
    lists = [_schedule_of(each) for _, each in found if not isinstance(each, Generator)]
    shapes = _completed(shapes, lists)
    for name in shapes.parameters:
        if not any(_has(generator, name) for generator in generators):
            raise LoadError(f"no schedule here has a parameter {name!r}")
    return [variant for target, each in found for variant in _shaped(target, each, shapes)]


def _completed(shapes: Shapes, fixed: Sequence[Schedule]) -> Shapes:
    for name in ("ranks", "microbatches"):
        had = {getattr(each, name) for each in fixed} or {getattr(shapes.costs, name, None)}
        if getattr(shapes, name) is None and name not in shapes.swept and len(had) == 1:
            shapes = attrs.evolve(shapes, **{name: had.pop()})
    return shapes


def _found(target: Target) -> Generator | Schedule | Timeline:
    if isinstance(target, (Schedule, Timeline)):
        return target
    if isinstance(target, (str, Path)):
        if str(target).endswith(_RUN):
            timelines = load_timelines(target)
            if not timelines:
                raise LoadError(f"{target} holds no timeline")
            return median_step(timelines)
        if is_list(target):
            return load(target)
    return generator_of(target)


def _shaped(
    target: Target, found: Generator | Schedule | Timeline, shapes: Shapes
) -> Iterator[Variant]:
    named = name_of(target) if isinstance(target, (str, Path)) else None
    if not isinstance(found, Generator):
        schedule = _schedule_of(found)
        name = named or schedule.name
        yield Variant(name, schedule.microbatches, None, partial(_as_it_is, name, found, shapes))
        return
    own = {key: value for key, value in shapes.parameters.items() if _has(found, key)}
    seen = shapes.costs
    if isinstance(seen, CostModel):  # of the same model, whatever the number of stages
        seen = partial(recut, seen, of=shapes.ranks or DEFAULT_RANKS)
    for microbatches, chunks in product(*map(shapes.several, SWEPT)):
        make = partial(
            load,
            found,
            ranks=shapes.ranks,
            microbatches=microbatches,
            chunks=chunks,
            costs=seen,
            **own,
        )
        many = DEFAULT_MICROBATCHES if microbatches is None else microbatches
        yield Variant(named or found.name, many, chunks or found.chunks, make, grows=True)


def _as_it_is(name: str, found: Schedule | Timeline, shapes: Shapes) -> Schedule | Timeline:
    for what in ("ranks", "microbatches"):
        asked, has = getattr(shapes, what), getattr(_schedule_of(found), what)
        if asked not in (None, has):
            raise LoadError(f"{name} has {has} {what}, not {asked}")
    return found


def _has(generator: Generator, parameter: str) -> bool:
    return generator.takes_any_parameter or parameter in generator.parameters
