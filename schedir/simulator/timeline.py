"""When every entry of a schedule ran, simulated or measured, and everything derived from that.

A file of timelines has the `.sched` text of each schedule, once, and the times, in JSON:

    {"schedir timelines": 1,
    "schedules": ["schedir 1\\nname 1f1b\\n..."],
    "timelines": [
    {"schedule": 0, "unit": "s", "measured": {"step": 3, "clock_error": 2e-05}, "sizes": null,
    "starts": [0, 1, null],
    "ends": [1, 2, null]}]}

`schedule` is an index into `schedules`. A timeline simulated under a channel model also has its
`posting` and `edge_makespan`; of these objects, what is left out has its default. `starts` and
`ends` have one time per action, rank after rank in list order, null for what is not known. What is
written is read back exactly: integers stay integers, and floats have all their digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np

from schedir.display import DisplayedTimeline
from schedir.errors import LoadError, SchedirError
from schedir.files import replacing
from schedir.graph.alive import later_versions, peak_activations
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, HOMES, Action, Bools, Schedule, dumps, flat, loads
from schedir.ir.tokens import clip
from schedir.simulator.idle import Idle, IdleColumns, Work, idle_columns, work_of
from schedir.simulator.memory import Curve, live_activations, live_bytes
from schedir.simulator.moments import Moments, Posting, critical_path, moments_of
from schedir.simulator.values import (
    TIMELINES,
    Measured,
    Numbers,
    Sizes,
    Unit,
    check_number,
    check_unit,
    expect_stages,
    factor,
    kind_of,
    numbers,
    read_json,
)

T = TypeVar("T", bound=attrs.AttrsInstance)
_VERSION = 1
_BEYOND = 2**63  # what no int64 holds


@attrs.frozen
class Span:
    """One action of a rank's list with its start and end; `index` is the index of its entry.

    The span of a send or receive is that of its transfer. Both parts of a pair have the same span.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> span = line.spans[1][1]
    >>> print(span.action, span.start, span.end)
    1F0 1 2
    """

    index: int
    action: Action
    start: float
    end: float


@attrs.frozen
class RankStats:
    """One rank's share of a timeline, in the timeline's unit of time.

    `busy` is the time in compute, `idle` the rest of the makespan, `span` the time from the rank's
    first FORWARD to the end of its last compute. `peak_activations` is the most (stage, microbatch)
    activations held at once, each from its FORWARD (or its RECOMPUTE, if it has one) to its
    BACKWARD or BACKWARD_WEIGHT. `weight_versions` is the most versions alive at once in any of its
    stages, the newest included. `peak_bytes` is the most memory that the rank holds,
    `peak_host_bytes` the most that it has copied to its host. They are None if sizes are not known;
    `peak_host_bytes` is also None if nothing is copied.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> line.ranks[0].busy, line.ranks[0].idle, line.ranks[0].peak_activations
    (6, 3, 2)
    """

    rank: int
    busy: float
    idle: float
    span: float
    peak_activations: int
    weight_versions: int
    peak_bytes: float | None = None
    peak_host_bytes: float | None = None


def _peak(curve: Curve) -> float:
    return float(curve[1].max())


def _one_of(kind: type) -> Callable[..., None]:
    return attrs.validators.optional(attrs.validators.instance_of(kind))


_SAME_TIMES = attrs.cmp_using(eq=partial(np.array_equal, equal_nan=True), class_name="Times")


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False, repr=False)
class Timeline(DisplayedTimeline):
    """When every entry of a schedule starts and ends. Everything else is derived from these times.

    `starts` and `ends` hold one time per action, rank after rank in list order, shape [actions]. 0
    is the beginning of the step, NaN stands for an unknown time, and the unit is the caller's.
    Unknown times count as nothing: they make no rank busy and no step longer. A transfer with a
    start but no end is one whose end nobody waited for.

    `sizes` are the bytes of what is kept, if they are known. `unit` is the unit of time, None for
    any. `measured` describes the measured step, None for a simulated one. `posting` says under
    which channel model the timeline was simulated, and where its receives were posted; None if no
    transport's order was counted, and if it was measured. `edge_makespan` is, of one simulated
    under `rank`, how soon the same lists end under `edge`: if no stream hinders another one.

    Raises ValueError if the times do not fit the schedule: a wrong number of times, a negative or
    infinite time, an entry that ends before it starts. Also raises ValueError for an unknown unit,
    and TypeError for a wrong type of `sizes` or `measured`. Raises SchedirError if the sizes belong
    to another number of stages.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> line
    <Timeline 1f1b: 2 ranks, 2 stages, 2 microbatches; predicted, makespan 9>
    >>> round(line.bubble_fraction, 3)
    0.333
    """

    schedule: Schedule
    starts: Numbers = attrs.field(converter=numbers, eq=_SAME_TIMES, hash=False)
    ends: Numbers = attrs.field(converter=numbers, eq=_SAME_TIMES, hash=False)
    sizes: Sizes | None = attrs.field(default=None, validator=_one_of(Sizes))
    unit: Unit | None = attrs.field(default=None, validator=check_unit)
    measured: Measured | None = attrs.field(default=None, validator=_one_of(Measured))
    posting: Posting | None = attrs.field(default=None, validator=_one_of(Posting))
    edge_makespan: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(check_number)
    )

    def __attrs_post_init__(self) -> None:
        shape = (len(self.schedule.columns),)
        for name, times in (("starts", self.starts), ("ends", self.ends)):
            if times.shape != shape:
                raise ValueError(
                    f"{name} must hold one time for each of the {shape[0]} actions, not an array "
                    f"of shape {times.shape}"
                )
            self._refuse(
                np.isinf(times) | (times < 0), f"{name}: a time must be finite and at least 0"
            )
        self._refuse(self.ends < self.starts, "an entry ends before it starts")
        if self.sizes is not None:
            expect_stages(self.sizes, self.schedule)

    def _refuse(self, wrong: Bools, why: str) -> None:
        """Raise ValueError with the first place that is wrong, if there is one."""
        if wrong.any():
            place = int(wrong.argmax())
            columns = self.schedule.columns
            rank, index = columns.position(place)
            raise ValueError(
                f"{why}: rank {rank} #{index} {columns.action(place)} is said to run from "
                f"{self.starts[place]} to {self.ends[place]}"
            )

    def save(self, path: str | Path) -> None:
        """Write the timeline to a file, as `save_timelines` does several."""
        save_timelines([self], path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """The timeline in a file that `save` or `save_timelines` wrote.

        Raises what `load_timelines` raises, and LoadError if the file does not hold exactly one
        timeline.
        """
        found = load_timelines(path)
        if len(found) != 1:
            raise LoadError(
                f"{path} holds {len(found)} timelines, not one; "
                "schedir.simulator.load_timelines reads them all"
            )
        return found[0]

    @property
    def channel(self) -> str | None:
        """The channel model that it was simulated under."""
        return None if self.posting is None else self.posting.channel

    @cached_property
    def known(self) -> Bools:
        """True where both times of an action are known, shape [actions]."""
        return ~np.isnan(self.starts) & ~np.isnan(self.ends)

    @cached_property
    def makespan(self) -> float:
        """When the last entry ends."""
        last: float = np.fmax.reduce(self.ends, initial=0).item()
        return last

    @cached_property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        return self._idle_part(self.makespan)

    @cached_property
    def span_bubble_fraction(self) -> float:
        """The bubble fraction of steps that follow each other without a flush.

        Such a step takes no longer than the longest span of a rank, because ranks that are done
        begin the next step (zero bubble, arXiv 2401.10241, section 4).
        """
        return self._idle_part(max((rank.span for rank in self.ranks), default=0.0))

    def _idle_part(self, time: float) -> float:
        busy = sum(rank.busy for rank in self.ranks)
        return 1 - busy / (self.schedule.ranks * time) if time else 0.0

    @cached_property
    def ranks(self) -> tuple[RankStats, ...]:
        """How each rank spends its time, and the most that it holds."""
        columns, graph = self.schedule.columns, graph_of(self.schedule)
        peaks, versions = peak_activations(graph), later_versions(graph)
        sized, copied = self.sizes is not None, columns.is_kind(*COPIES).any()
        forwards, computes = columns.where(*HOMES), columns.computes
        until = np.zeros(columns.ranks, np.result_type(self.starts, self.ends))
        np.fmax.at(until, columns.rank[computes], self.ends[computes])
        since = until.copy()
        np.fmin.at(since, columns.rank[forwards], self.starts[forwards])
        return tuple(
            RankStats(
                rank=rank,
                busy=busy,
                idle=self.makespan - busy,
                span=span,
                peak_activations=peaks[rank][0],
                weight_versions=max(
                    (one.peak()[0] for one in versions.get(rank, {}).values()), default=1
                ),
                peak_bytes=_peak(self.memory(rank)) if sized else None,
                peak_host_bytes=_peak(self.host_memory(rank)) if sized and copied else None,
            )
            for rank, (busy, span) in enumerate(
                zip(self._work.busy.tolist(), (until - since).tolist(), strict=True)
            )
        )

    @cached_property
    def _work(self) -> Work:
        return work_of(self.schedule.columns, self.starts, self.ends)

    @cached_property
    def _moments(self) -> Moments:
        return moments_of(self.schedule, self.starts, self.ends, self.posting)

    @cached_property
    def _activations(self) -> list[Curve]:
        return live_activations(self._moments)

    @cached_property
    def _bytes(self) -> list[Curve]:
        return live_bytes(self._moments, self.sizes)

    @cached_property
    def _host_bytes(self) -> list[Curve]:
        return live_bytes(self._moments, self.sizes, host=True)

    def live(self, rank: int) -> Curve:
        """How many (stage, microbatch) activations the rank holds: `amounts[n]` from `times[n]` on.

        Returns two arrays of one shape. The times ascend from 0, and are equal if several changes
        happen at once.
        """
        return self._activations[rank]

    def memory(self, rank: int) -> Curve:
        """How many bytes the rank holds, in the form of `live`; `schedir.simulator.memory` lists
        what counts.

        Raises ValueError if the sizes are not known.
        """
        return self._bytes[rank]

    def host_memory(self, rank: int) -> Curve:
        """How many bytes the rank keeps on its host, in the form of `memory`. Raises what `memory`
        raises."""
        return self._host_bytes[rank]

    @cached_property
    def idle_columns(self) -> IdleColumns:
        """Why each rank is idle, as columns. Raises UnsoundError if the lists are too wrong to tell
        what waits for what."""
        return idle_columns(self._work, self._moments, self.makespan)

    @cached_property
    def idle(self) -> tuple[tuple[Idle, ...], ...]:
        """`idle[rank]`: the time in which the rank does not compute, in intervals of one cause
        each."""
        return tuple(map(self.idle_columns.of_rank, range(self.schedule.ranks)))

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The places of the compute, transfers and collectives that add up to the makespan, in the
        order of time; see `schedir.simulator.moments`. A transfer is at its receive.

        Raises UnsoundError if the lists are too wrong to tell what waits for what.
        """
        return critical_path(self._moments, self.measured.clock_error if self.measured else 0)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """`spans[rank]`: the entries of the rank's list with their times."""
        times = iter(zip(self.starts.tolist(), self.ends.tolist(), strict=True))
        return tuple(
            tuple(
                Span(index, action, *next(times))
                for index, entry in enumerate(entries)
                for action in flat([entry])
            )
            for entries in self.schedule.actions
        )


def save_timelines(timelines: Iterable[Timeline], path: str | Path) -> None:
    """Write timelines, such as those of a run's steps, to one JSON file.

    Raises OSError if the file can't be written.

    >>> import os, tempfile
    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "steps.json")
    ...     schedir.simulator.save_timelines([line, line], path)
    ...     len(schedir.simulator.load_timelines(path))
    2
    """
    numbers: dict[Schedule, int] = {}
    written = [_written(line, numbers) for line in timelines]
    with replacing(path) as file:
        file.write(f'{{"{TIMELINES}": {_VERSION},\n')
        file.write(f'"schedules": {_json([dumps(schedule) for schedule in numbers])},\n')
        file.write('"timelines": [\n' + ",\n".join(written) + "]}\n")


def load_timelines(path: str | Path) -> list[Timeline]:
    """The timelines in a file that `save_timelines` or `Timeline.save` wrote, in the file's order.

    Raises LoadError, or ParseError with line and column, for a file that can't be read, is cut
    short, or holds anything but timelines.

    >>> import os, tempfile
    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "step.json")
    ...     line.save(path)
    ...     schedir.simulator.load_timelines(path) == [line]
    True
    """
    content = read_json(path)
    try:
        return _timelines(content)
    except (ValueError, TypeError, SchedirError) as error:
        raise LoadError(f"{path}: {error}") from None


def in_unit(timeline: Timeline, unit: Unit) -> Timeline:
    """The timeline in another unit of time. Without a unit, its times count as that unit.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> line = schedir.simulate(schedule, schedir.CostModel(unit="s"))
    >>> schedir.simulator.in_unit(line, "ms").makespan
    9000.0
    """
    times, measured = factor(timeline.unit, unit), timeline.measured
    if measured is not None:
        measured = attrs.evolve(measured, clock_error=measured.clock_error * times)
    scaled = {
        name: value * times
        for name in ("starts", "ends", "edge_makespan")
        if (value := getattr(timeline, name)) is not None
    }
    return attrs.evolve(timeline, **scaled, unit=unit, measured=measured)


def path_times(timeline: Timeline) -> Numbers:
    """What each place on the critical path takes of the makespan; what is left over lies between
    entries of a measured timeline.

    Compute with an unknown time counts as zero; a transfer takes the time between its neighbours.
    """
    places, columns = np.array(timeline.critical_path, np.int64), timeline.schedule.columns
    starts, ends = timeline.starts[places], timeline.ends[places]
    computes = columns.is_kind(*COMPUTE)[places]
    ends = np.where(np.isnan(ends) & computes, starts, ends)
    starts = np.where(np.isnan(starts) & computes, ends, starts)
    before = np.append(0, np.where(np.isnan(ends), starts, ends))[:-1]
    begins = np.append(np.where(np.isnan(starts), before, starts), timeline.makespan)
    begins = np.fmax.accumulate(begins)  # the clocks of two ranks may differ a little
    over = np.clip(np.where(np.isnan(ends), begins[1:], ends), begins[:-1], begins[1:])
    takes: Numbers = over - begins[:-1]
    return takes


def median_step(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline of the median makespan; with an even number, the quicker of the two in the
    middle.

    Raises ValueError if there is no timeline.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> costs = [schedir.CostModel(forward=forward) for forward in (1, 2, 5)]
    >>> lines = [schedir.simulate(schedule, each) for each in costs]
    >>> [line.makespan for line in lines], schedir.simulator.median_step(lines).makespan
    ([9, 12, 21], 12)
    """
    if not timelines:
        raise ValueError("there is no timeline to choose from")
    return sorted(timelines, key=lambda line: line.makespan)[(len(timelines) - 1) // 2]


# In files.


def _written(line: Timeline, numbers: dict[Schedule, int]) -> str:
    head: dict[str, Any] = {
        "schedule": numbers.setdefault(line.schedule, len(numbers)),
        "unit": line.unit,
        "measured": line.measured and attrs.asdict(line.measured),
        "sizes": line.sizes and attrs.asdict(line.sizes),
    }
    if line.posting is not None:
        head |= {"posting": attrs.asdict(line.posting), "edge_makespan": line.edge_makespan}
    starts, ends = (
        _json([None if time != time else time for time in times.tolist()])
        for times in (line.starts, line.ends)
    )
    return f'{_json(head)[:-1]},\n"starts": {starts},\n"ends": {ends}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _timelines(content: object) -> list[Timeline]:
    """The timelines of the whole content. Raises ValueError, with the place, for any fault."""
    if not isinstance(content, dict) or TIMELINES not in content:
        what = kind_of(content) or f': it lacks the key "{TIMELINES}"'
        raise ValueError(f"no file of timelines{what}")
    if content[TIMELINES] != _VERSION:
        raise ValueError(f"format {clip(content[TIMELINES])} is unknown; this is format {_VERSION}")
    _expect_keys(content, "the file", dict.fromkeys((TIMELINES, "schedules", "timelines"), True))
    schedules = []
    for number, text in enumerate(_list(content["schedules"], "schedules")):
        if not isinstance(text, str):
            raise ValueError(f"schedule {number} is not text: {clip(text)}")
        schedules.append(loads(text, f"schedule {number}"))

    def schedule_of(number: object, _: str) -> Schedule:
        if type(number) is not int or not 0 <= number < len(schedules):
            raise ValueError(f"there is no schedule {clip(number)}")
        return schedules[number]

    return [
        _record(
            Timeline,
            one,
            f"timeline {number}",
            schedule=schedule_of,
            starts=_times,
            ends=_times,
            sizes=partial(_record, Sizes),
            measured=partial(_record, Measured),
            posting=partial(_record, Posting),
        )
        for number, one in enumerate(_list(content["timelines"], "timelines"))
    ]


def _record(kind: type[T], value: Any, where: str, **read: Callable[[Any, str], Any]) -> T:
    """An object of this kind, with the fields that an object of JSON has, and the defaults of those
    that it lacks. `read` says how to read a field, but for a null where there is a default. Raises
    ValueError, with the place, for any fault."""
    needed = {field.name: field.default is attrs.NOTHING for field in attrs.fields(kind)}
    _expect_keys(value, where, needed)
    try:
        found = {
            key: read[key](one, key) if key in read and (needed[key] or one is not None) else one
            for key, one in value.items()
        }
        return kind(**found)
    except (TypeError, ValueError, SchedirError) as error:
        raise ValueError(f"{where}: {error}") from None


def _times(value: object, where: str) -> list[float]:
    times = _list(value, where)
    for place, time in enumerate(times):
        # A bool is an int, but no time.
        if time is not None and not (type(time) in (float, int) and -_BEYOND < time < _BEYOND):
            raise ValueError(
                f"{where}[{place}] must be a finite number, or null where the time is not known, "
                f"not {clip(time)}"
            )
    return [math.nan if time is None else time for time in times] if None in times else times


def _expect_keys(value: object, where: str, keys: Mapping[str, bool]) -> None:
    """Raise ValueError if the value is no object that has no keys but these, and all of these for
    which the value is True."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {clip(value)}")
    for key in value:
        if key not in keys:
            raise ValueError(f"{where}: unknown key {clip(key)}; known: {', '.join(keys)}")
    for key, needed in keys.items():
        if needed and key not in value:
            raise ValueError(f"{where} lacks {key!r}")


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {clip(value)}")
    return value
