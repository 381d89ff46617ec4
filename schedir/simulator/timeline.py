"""When every entry of a schedule ran, simulated or measured, and all that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np

from schedir.display import DisplayedTimeline
from schedir.errors import LoadError
from schedir.graph.alive import peak_activations, peak_versions
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, HOMES, Action, Bools, Schedule, flat
from schedir.simulator import files
from schedir.simulator.critical_path import critical_path
from schedir.simulator.idle import Idle, IdleColumns, Work, idle_columns, work_of
from schedir.simulator.memory import Held, host_bytes, live_activations, live_bytes
from schedir.simulator.moments import Moments, moments_of
from schedir.simulator.values import Measured, Numbers, Sizes, Unit, check_unit, factor, numbers


@attrs.frozen
class Span:
    """One action of a rank's list and the time that it took; `index` is that of its entry.

    The span of a send or receive is that of its transfer. The parts of a pair have the same one.
    """

    index: int
    action: Action
    start: float
    end: float


@attrs.frozen
class RankStats:
    """One rank's share of a timeline, in its unit of time.

    `busy` is the time in compute, `idle` the rest of the makespan, `span` the time from its first
    FORWARD to the end of its last compute. `peak_activations` counts (stage, microbatch) pairs,
    each from its FORWARD, or its RECOMPUTE where it has one, until its BACKWARD or BACKWARD_WEIGHT;
    `weight_versions` the most versions alive at once in any of its stages, the newest included;
    `peak_bytes` is the most memory that it holds, `peak_host_bytes` the most that it has copied to
    its host; None where sizes are not known, or nothing is copied.
    """

    rank: int
    busy: float
    idle: float
    span: float
    peak_activations: int
    weight_versions: int
    peak_bytes: float | None = None
    peak_host_bytes: float | None = None


def _one_of(kind: type) -> Callable[..., None]:
    return attrs.validators.optional(attrs.validators.instance_of(kind))


_SAME_TIMES = attrs.cmp_using(eq=partial(np.array_equal, equal_nan=True), class_name="Times")


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False, repr=False)
class Timeline(DisplayedTimeline):
    """When every entry of a schedule starts and ends: plain data, from which all else follows.

    `starts` and `ends` hold one time per action, rank after rank in list order, shape [actions]:
    0 is the beginning of the step, NaN stands for what is not known, and the unit is the caller's.
    What is not known counts as nothing: it makes no rank busy and no step longer. Of a transfer
    whose start alone is known nobody has waited for the end.

    `sizes` are the bytes of what is kept, where they are known; `unit` is the unit of time, None
    for any; `measured` says of which step it is, None for a simulated one.

    Raises ValueError where the times do not fit the schedule: another number of them, one that is
    negative or infinite, an entry that ends before it starts; or where there is no such unit.
    TypeError for `sizes` or `measured` that are none.
    """

    schedule: Schedule
    starts: Numbers = attrs.field(converter=numbers, eq=_SAME_TIMES, hash=False)
    ends: Numbers = attrs.field(converter=numbers, eq=_SAME_TIMES, hash=False)
    sizes: Sizes | None = attrs.field(default=None, validator=_one_of(Sizes))
    unit: Unit | None = attrs.field(default=None, validator=check_unit)
    measured: Measured | None = attrs.field(default=None, validator=_one_of(Measured))

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

        Raises what `load_timelines` does, and LoadError where the file holds several, or none.
        """
        found = load_timelines(path)
        if len(found) != 1:
            raise LoadError(
                f"{path} holds {len(found)} timelines and not one; "
                "schedir.simulator.load_timelines reads them all"
            )
        return found[0]

    @cached_property
    def known(self) -> Bools:
        """Where both times of an action are known, shape [actions]."""
        return ~np.isnan(self.starts) & ~np.isnan(self.ends)

    @cached_property
    def makespan(self) -> float:
        """When the last entry ends."""
        last: float = np.fmax.reduce(self.ends, initial=0).item()
        return last

    @cached_property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        busy = sum(rank.busy for rank in self.ranks)
        return 1 - busy / (self.schedule.ranks * self.makespan) if self.makespan else 0.0

    @cached_property
    def span_bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute, where steps follow each other
        without a flush: a step then takes no longer than the longest span of a rank, since ranks
        that are done begin with the next one (zero bubble, arXiv 2401.10241, section 4)."""
        busy = sum(rank.busy for rank in self.ranks)
        span = max((rank.span for rank in self.ranks), default=0.0)
        return 1 - busy / (self.schedule.ranks * span) if span else 0.0

    @cached_property
    def ranks(self) -> tuple[RankStats, ...]:
        """What each rank does with its time, and the most that it holds."""
        columns = self.schedule.columns
        forwards = columns.is_kind(*HOMES)
        # The parts of a pair take the same time.
        computes = columns.is_kind(*COMPUTE) & ~columns.joined
        graph = graph_of(self.schedule)
        peaks, versions = peak_activations(graph), peak_versions(graph)
        held = None if self.sizes is None else self._live_bytes.peaks()
        copied = self.sizes is not None and columns.is_kind(*COPIES).any()
        on_host = self._host_bytes.peaks() if copied else None
        found = []
        for rank, (begin, end) in enumerate(pairwise(columns.starts.tolist())):
            starts, ends = self.starts[begin:end], self.ends[begin:end]
            busy = self._work.busy[rank].item()
            until = np.fmax.reduce(ends[computes[begin:end]], initial=0).item()
            since = np.fmin.reduce(starts[forwards[begin:end]], initial=until).item()
            found.append(
                RankStats(
                    rank=rank,
                    busy=busy,
                    idle=self.makespan - busy,
                    span=until - since,
                    peak_activations=peaks[rank][0],
                    weight_versions=versions.get(rank, 1),
                    peak_bytes=held[rank] if held else None,
                    peak_host_bytes=on_host[rank] if on_host else None,
                )
            )
        return tuple(found)

    @cached_property
    def _work(self) -> Work:
        return work_of(self.schedule.columns, self.starts, self.ends)

    @cached_property
    def _moments(self) -> Moments:
        return moments_of(self.schedule, self.starts, self.ends)

    @cached_property
    def _live_activations(self) -> Held:
        return live_activations(self._moments)

    @cached_property
    def _live_bytes(self) -> Held:
        return live_bytes(self._moments, self._known_sizes)

    @cached_property
    def _host_bytes(self) -> Held:
        return host_bytes(self._moments, self._known_sizes)

    @property
    def _known_sizes(self) -> Sizes:
        if self.sizes is None:
            raise ValueError("the timeline has no sizes, so its bytes are not known")
        return self.sizes

    def live(self, rank: int) -> tuple[Numbers, Numbers]:
        """How many (stage, microbatch) activations the rank holds: `amounts[n]` from `times[n]` on.

        Of two arrays of one shape; the times ascend, from 0, and are equal where several changes
        follow each other at once.
        """
        return self._live_activations.curve(rank)

    def memory(self, rank: int) -> tuple[Numbers, Numbers]:
        """How many bytes the rank holds, as `live`; `schedir.simulator.memory` says of what.

        Raises ValueError where the sizes are not known, or are those of other stages.
        """
        return self._live_bytes.curve(rank)

    def host_memory(self, rank: int) -> tuple[Numbers, Numbers]:
        """How many bytes of the rank are on its host, as `memory`. Raises what that raises."""
        return self._host_bytes.curve(rank)

    @cached_property
    def idle_columns(self) -> IdleColumns:
        """Why each rank is idle, as columns. Raises UnsoundError where the schedule's lists are too
        wrong to tell what waits for what."""
        return idle_columns(self.schedule, self._work, self._moments, self.makespan)

    @cached_property
    def idle(self) -> tuple[tuple[Idle, ...], ...]:
        """`idle[rank]`: the time in which the rank does not compute, in stretches of one cause."""
        return tuple(map(self.idle_columns.of_rank, range(self.schedule.ranks)))

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The places of the compute, transfers and collectives that the makespan consists of, in
        the order of time; see `schedir.simulator.critical_path`. A transfer is at its receive.

        Raises UnsoundError where the schedule's lists are too wrong to tell what waits for what.
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
    """Write timelines, such as those of a run's steps, to one file: JSON, see `files`.

    Raises OSError where the file can't be written.
    """
    files.write_timelines(timelines, path)


def load_timelines(path: str | Path) -> list[Timeline]:
    """The timelines in a file that `save_timelines` or `Timeline.save` wrote, in its order.

    Raises LoadError, or ParseError with line and column, for a file that can't be read, is cut
    short or holds what is no timeline, with the place.
    """
    return files.read_timelines(path, Timeline)


def in_unit(timeline: Timeline, unit: Unit) -> Timeline:
    """The same in another unit of time. One of no unit is taken to be in that one already."""
    times = factor(timeline.unit, unit)
    if times == 1:
        return attrs.evolve(timeline, unit=unit)
    measured = timeline.measured
    if measured is not None:
        measured = attrs.evolve(measured, clock_error=measured.clock_error * times)
    return attrs.evolve(
        timeline,
        starts=timeline.starts * times,
        ends=timeline.ends * times,
        unit=unit,
        measured=measured,
    )


def median_step(timelines: Sequence[Timeline]) -> Timeline:
    """The one of the median makespan, of an even number the quicker of the two in the middle.

    Raises ValueError where there is none.
    """
    if not timelines:
        raise ValueError("there is no timeline to choose from")
    return sorted(timelines, key=lambda line: line.makespan)[(len(timelines) - 1) // 2]
