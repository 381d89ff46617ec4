"""Makes a schedule longer until it shows its steady state: what it costs once its pipeline is full.

A generator is asked for more and more microbatches, as long as what it then lists goes on from what
it lists for fewer; a list that is what it is has to show it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from schedir.checker import CHANNELS, prove
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
    **parameters: Parameter,
) -> SteadyState | None:
    """What an asynchronous schedule costs once its pipeline is full: time per microbatch, bubble.

    An asynchronous schedule goes on with a stage after an OPTIM_STEP of it, as `pipedream` does, so
    a pipeline that is never drained stays full. `target` and what shapes it are as for `build`, or
    a Schedule; `costs` are those of `simulate`, by default the textbook's, or a function from a
    number of stages to them. Times are in their unit.

    A generator is built with more and more microbatches, up to some 200,000 actions, until the ends
    of all its actions repeat a period later, exactly but for the rounding of floats. A Schedule, a
    `.sched` or a `.csv` file has to show that as it is.

    None where there is no steady state: for a synchronous schedule, which drains at its update, and
    where no period shows in so many microbatches. It is never estimated.

    Raises what `build` and `simulate` raise, for the schedule of the shape that is asked for.
    """
    if isinstance(target, Schedule):
        schedule = target
    else:
        shape: dict[str, Any] = {"ranks": ranks, "chunks": chunks, "costs": costs, **parameters}
        schedule = load(target, microbatches=microbatches, **shape)
    if not schedule.is_asynchronous:
        model = costs(schedule.stages) if callable(costs) else costs
        simulate(schedule, model)  # raises what is wrong with either
        return None
    return look(schedule, costs, grows=not isinstance(target, Schedule)).steady


@attrs.frozen
class Look:
    """A look for a steady state: at the `timeline` of a list, the longest that was tried, and what
    it shows; None where that is nothing."""

    timeline: Timeline
    steady: SteadyState | None


def look(schedule: Schedule, costs: Costs, *, grows: bool) -> Look:
    """Look for the steady state of an asynchronous schedule: in its list, and where it `grows` in
    what its generator, if it has one, writes for more microbatches.

    Raises what `simulate` raises for the schedule itself.
    """
    model = costs(schedule.stages) if callable(costs) else costs
    found = _looked_at(schedule, model)
    for each in _lengthened(schedule) if grows else ():
        if found.steady is not None:
            break
        try:
            found = _looked_at(each, model)
        except SchedirError:  # the list asked for runs, this one doesn't: there is no more to see
            break
    return found


def _looked_at(schedule: Schedule, costs: CostModel | None) -> Look:
    line = simulate(prove(schedule, CHANNELS[-1]).proved(), costs)
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
    """The same for so many microbatches; None where that can't be made."""
    try:
        return None if schedule.rebuild is None else schedule.rebuild(microbatches)
    except SchedirError:
        return None


def _goes_on(longer: Schedule, schedule: Schedule) -> bool:
    """Whether every rank lists the same in both until its last forward in the shorter one."""
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
