"""Random timelines, simulated and as if measured."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Schedule, Timeline
from schedir.checker import prove
from schedir.ir import COMPUTE
from schedir.simulator import Measured
from tests.built_in import NAMES
from tests.joined import joined
from tests.test_random import drawn, scattered


def simulated(
    name: str,
    ranks: int,
    microbatches: int,
    costs: CostModel | None = None,
    *,
    given: bool = False,
    **more: Any,
) -> Timeline:
    """The timeline of a schedule that is built by name, which is `given` the costs or not."""
    more |= {"costs": costs} if given else {}
    built = schedir.build(name, ranks=ranks, microbatches=microbatches, **more)
    return schedir.simulate(built, costs)


COSTS = st.none() | st.builds(
    CostModel,
    forward=st.floats(0.5, 4),
    backward=st.floats(0.5, 4),
    latency=st.just(0) | st.floats(0, 2),
    optim_step=st.just(0) | st.floats(0, 2),
    unit=st.sampled_from([None, "s", "ms", "us"]),
)


def lines(ranks: int, microbatches: int, costs: Any = COSTS) -> st.SearchStrategy[Timeline]:
    """Timelines of the core schedules on so many ranks, and of so many microbatches, at most."""
    numbers = st.integers(1, ranks), st.integers(1, microbatches)
    return st.builds(simulated, st.sampled_from(NAMES), *numbers, costs)


def drawn_costs(chance: random.Random, schedule: Schedule, whole: bool = True) -> CostModel:
    """Costs by stage and by link, many of them nothing."""

    def cost() -> float:
        return chance.choice([0, 1, 1, 2, 3, 5]) * (1 if whole else chance.random())

    def per_stage() -> tuple[float, ...]:
        return tuple(cost() for _ in range(schedule.stages))

    links = [(a, b) for a in range(schedule.ranks) for b in range(schedule.ranks) if a != b]
    boundaries = tuple(chance.choice([0, 4, 8]) for _ in range(schedule.stages - 1))
    return CostModel(
        forward=per_stage(),
        backward=per_stage(),
        backward_input=per_stage(),
        backward_weight=per_stage(),
        recompute=chance.choice([None, per_stage()]),
        reduce_grad=cost(),
        optim_step=cost(),
        latency={link: cost() for link in links},
        bandwidth=chance.choice([1, 2, 4]),
        boundary_bytes=boundaries or 0,
    )


def drawn_run(chance: random.Random, batches: bool) -> dict[str, Any]:
    """What to simulate: a random schedule, its costs, and how receives are posted."""
    schedule = schedir.insert_communication(drawn(chance))
    forms = [scattered(schedule, chance)]
    if batches and chance.random() < 0.5:
        forms.insert(0, joined(forms[0], chance, 0.5))
    runs = (form for form in forms if prove(form, schedir.CHANNELS[-1]).schedule)
    schedule = next(runs, schedule)
    return {
        "schedule": schedule,
        "costs": drawn_costs(chance, schedule, chance.random() < 0.7),
        "receives": chance.choice(["ahead", "listed"]),
    }


def drawn_timeline(chance: random.Random, batches: bool = True) -> Timeline:
    """A simulated timeline of a random schedule."""
    return schedir.simulate(**drawn_run(chance, batches))


def as_if_measured(line: Timeline, chance: random.Random, unknown: float = 0.0) -> Timeline:
    """The timeline with the clock of each rank a little wrong, with pauses before compute, and with
    a share of its times unknown. The compute of a rank still does not overlap."""
    columns = line.schedule.columns
    error = 0.01
    offset = np.array([chance.uniform(0, error) for _ in range(line.schedule.ranks)])
    shift = offset[columns.rank] + np.array([chance.choice([0, 0, 1e-3]) for _ in line.starts])
    starts, ends = line.starts + shift, line.ends + offset[columns.rank]
    starts = np.minimum(starts, ends)
    gone = np.array([chance.random() < unknown for _ in starts])
    starts[gone | np.roll(gone, 1)] = np.nan
    ends[gone] = np.nan
    # The parts of a pair have the same times.
    parts = np.flatnonzero(columns.joined & columns.is_kind(*COMPUTE))
    starts[parts], ends[parts] = starts[parts - 1], ends[parts - 1]
    return attrs.evolve(line, starts=starts, ends=ends, measured=Measured(0, error))
