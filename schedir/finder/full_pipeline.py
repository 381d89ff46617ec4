"""Makes a schedule longer until it shows its steady state: its cost once the pipeline is full.

A generator is asked for more and more microbatches, as long as its list continues the list for
fewer microbatches. A list without a generator must show the steady state as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import Kind, Schedule
from schedir.library import Costs, Generator, GeneratorFunction, Parameter, load
from schedir.simulator import CostModel, Timeline, simulate
from schedir.simulator.steady_state import SteadyState, steady_state_of

_MOST_ACTIONS = 200_000  # of a list, about a second
_MULTIPLES = 8  # tried of each length: where updates come once a batch, it may divide few


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
        schedule = target
    else:
        shape: dict[str, Any] = {"ranks": ranks, "chunks": chunks, "costs": costs, **parameters}
        schedule = load(target, microbatches=microbatches, **shape)
    if not schedule.is_asynchronous:
        model = costs(schedule.stages) if callable(costs) else costs
        simulate(schedule, model, channel=channel)  # raises what is wrong with either
        return None
    grows = not isinstance(target, Schedule)
    return look(schedule, costs, grows=grows, channel=channel).steady


@attrs.frozen
class Look:
    """A search for a steady state: the `timeline` of the longest list tried, and the steady state
    that it shows, None if it shows none."""

    timeline: Timeline
    steady: SteadyState | None


def look(schedule: Schedule, costs: Costs, *, grows: bool, channel: str | None = None) -> Look:
    """Look for the steady state of an asynchronous schedule: in its list, and if it `grows`, in its
    generator's lists for more microbatches.

    Raises what `simulate` raises for the schedule itself.
    """
    model = costs(schedule.stages) if callable(costs) else costs
    found = _looked_at(schedule, model, channel)
    for each in _lengthened(schedule) if grows else ():
        if found.steady is not None:
            break
        try:
            found = _looked_at(each, model, channel)
        except SchedirError:  # the list asked for runs, this one doesn't: there is no more to see
            break
    return found


def _looked_at(schedule: Schedule, costs: CostModel | None, channel: str | None) -> Look:
    line = simulate(schedule, costs, channel=channel)
    return Look(line, steady_state_of(line))


def _lengthened(schedule: Schedule) -> Iterator[Schedule]:
    """The same schedule, longer each time, up to the most actions."""
    # Sends and receives may have to be added to what is written, one of each for a compute.
    most = _MOST_ACTIONS // (1 if schedule.is_complete else 2) // max(len(schedule.columns), 1)
    times = 2
    while times <= most:
        tries = range(times, min(times + _MULTIPLES, most + 1))
        made = ((each, _made(schedule, each * schedule.microbatches)) for each in tries)
        found = next(((n, one) for n, one in made if one and _goes_on(one, schedule)), None)
        if found is None:
            return
        times = 2 * found[0]
        yield found[1]


def _made(schedule: Schedule, microbatches: int) -> Schedule | None:
    """The same schedule for this many microbatches; None if it can't be made."""
    try:
        return None if schedule.rebuild is None else schedule.rebuild(microbatches)
    except SchedirError:
        return None


def _goes_on(longer: Schedule, schedule: Schedule) -> bool:
    """True if every rank lists the same in both, up to its last forward in the shorter one."""
    if longer.placement != schedule.placement:
        return False
    here, there = schedule.columns, longer.columns
    forward = here.is_kind(Kind.FORWARD)
    for rank in range(schedule.ranks):
        begin, end = here.starts[rank], here.starts[rank + 1]
        upto = int(np.flatnonzero(forward[begin:end]).max(initial=-1)) + 1
        first = there.starts[rank]
        if upto > there.starts[rank + 1] - first:
            return False
        for name in ("kind", "stage", "microbatch", "version", "joined"):
            mine, other = getattr(here, name), getattr(there, name)
            if not np.array_equal(mine[begin : begin + upto], other[first : first + upto]):
                return False
    return True
