"""The simulator against one that steps through time, and against what no timeline can be."""

from __future__ import annotations

import random
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Kind, Schedule, Timeline, Together
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, COMPUTE, Entry
from tests.joined import drawn_joined, joined
from tests.stepped import Stepped, cost_of, of_link, of_stage
from tests.test_random import drawn, scattered

SEEDS = st.integers(0, 1 << 32)


def some_schedule(chance: random.Random) -> Schedule:
    """One that runs on some transport: built in or drawn, its communication inserted or scattered,
    with pairs and batches or without."""
    while True:
        made = _made(chance)
        if schedir.check(made, "async").ok:
            return schedir.insert_communication(made)


def _made(chance: random.Random) -> Schedule:
    how = chance.randrange(4)
    if how == 0:
        name = chance.choice(["fill-drain", "1f1b", "interleaved-1f1b", "pipedream"])
        return schedir.build(name, ranks=chance.randint(1, 4), microbatches=chance.randint(1, 6))
    if how == 1:
        return drawn_joined(chance)
    if how == 2:
        return scattered(schedir.insert_communication(drawn(chance)), chance)
    return joined(drawn(chance), chance, 0.3)


def some_costs(schedule: Schedule, chance: random.Random) -> CostModel:
    """Whole costs; bytes that take whole times."""

    def number(most: int) -> int:
        return chance.choice([0, 1, chance.randint(0, most)])

    def by_stage(most: int, number_of: int = schedule.stages) -> Any:
        if number_of and chance.random() < 0.5:
            return tuple(number(most) for _ in range(number_of))
        return number(most)

    def by_link(some: Any) -> Any:
        if chance.random() < 0.5:
            ranks = range(schedule.ranks)
            return {(s, t): some() for s in ranks for t in ranks if s != t}
        return some()

    return CostModel(
        forward=by_stage(5),
        backward=by_stage(9),
        backward_input=by_stage(5),
        backward_weight=by_stage(5),
        recompute=chance.choice([None, by_stage(5)]),
        reduce_grad=by_stage(4),
        optim_step=by_stage(3),
        overlapped=chance.choice([None, by_stage(12)]),
        latency=by_link(lambda: number(6)),
        bandwidth=by_link(lambda: chance.choice([1, 2, float("inf")])),
        boundary_bytes=_doubled(by_stage(4, schedule.stages - 1)),
    )


def _doubled(value: Any) -> Any:
    return tuple(2 * one for one in value) if isinstance(value, tuple) else 2 * value


def some_durations(schedule: Schedule, chance: random.Random) -> dict[tuple[int, int], int]:
    share = chance.choice([0, 0, 0.1, 0.5])
    return {
        (rank, index): chance.randint(0, 9)
        for rank, entries in enumerate(schedule.actions)
        for index in range(len(entries))
        if chance.random() < share
    }


def spans_of(line: Timeline) -> dict[tuple[int, str], list[tuple[float, float]]]:
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for rank, spans in enumerate(line.spans):
        for span in spans:
            found.setdefault((rank, str(span.action)), []).append((span.start, span.end))
    return found


def apart(
    schedule: Schedule, durations: dict[tuple[int, int], int]
) -> tuple[Schedule, dict[tuple[int, int], int]]:
    """The schedule with its batches as their parts, which take as long as was given for them."""
    lists: list[list[Entry]] = []
    given = {}
    for rank, entries in enumerate(schedule.actions):
        lists.append([])
        for index, entry in enumerate(entries):
            batch = isinstance(entry, Together) and entry.actions[0].kind in COMMUNICATION
            for part in entry.actions if batch and isinstance(entry, Together) else (entry,):
                if (rank, index) in durations:
                    given[rank, len(lists[-1])] = durations[rank, index]
                lists[-1].append(part)
    parts = Schedule(schedule.name, schedule.microbatches, schedule.placement, lists)
    return parts, given


@given(SEEDS, st.sampled_from(["ahead", "listed"]))
def test_the_simulator_agrees_with_one_that_steps_through_time(seed: int, receives: Any) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    costs, durations = some_costs(schedule, chance), some_durations(schedule, chance)
    line = schedir.simulate(schedule, costs, durations=durations, receives=receives)
    assert line.starts.dtype.kind == "i"
    # What blocks under `edge`, and not where posts never block, is run as its parts.
    whole = "edge" in schedir.check(schedule, "async").clean_channels
    listed = (schedule, durations) if whole else apart(schedule, durations)
    assert spans_of(line) == Stepped(*listed, costs, receives).run()


# What no timeline can be.


@given(SEEDS, st.sampled_from(["ahead", "listed"]))
def test_no_step_is_shorter_than_its_longest_path_or_its_busiest_rank(
    seed: int, receives: Any
) -> None:
    """A microbatch passes all stages forwards and backwards, each at its full cost; and before a
    rank's first compute, and after its last, others have to run theirs."""
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    costs = attrs.evolve(some_costs(schedule, chance), overlapped=None)
    line = schedir.simulate(schedule, costs, receives=receives)
    flow = graph_of(schedule)
    paths = []
    for m in range(schedule.microbatches):
        path: Any = 0
        at: int | None = None
        passes = [(Kind.FORWARD, s) for s in range(schedule.stages)]
        passes += [(Kind.BACKWARD, s) for s in reversed(range(schedule.stages))]
        for kind, stage in passes:
            rank = int(flow.runs[stage, m])
            if at is not None and at != rank:
                path += crossing(costs, (at, rank), stage - (kind is Kind.FORWARD))
            whole = kind is Kind.FORWARD or flow.of(Kind.BACKWARD)[stage, m] >= 0
            path += of_stage(
                getattr(costs, (kind if whole else Kind.BACKWARD_INPUT).name.lower()), stage
            )
            at = rank
        paths.append(path)
    assert line.makespan >= max(paths)
    for rank, stats in enumerate(line.ranks):
        work = sum(cost_of(costs, a) for a in schedule.flat[rank] if a.kind in COMPUTE)
        assert stats.busy == work <= line.makespan
        assert stats.busy + stats.idle == line.makespan


def crossing(costs: CostModel, link: tuple[int, int], boundary: int) -> Any:
    sent = of_stage(costs.boundary_bytes, boundary) / of_link(costs.bandwidth, link)
    return of_link(costs.latency, link) + sent


def dearer(costs: CostModel, chance: random.Random) -> CostModel:
    """One of the costs, of one stage or link where it has several, is higher."""
    names = [
        name
        for name in (
            "forward",
            "backward",
            "backward_input",
            "backward_weight",
            "recompute",
            "reduce_grad",
            "optim_step",
            "overlapped",
            "latency",
            "bandwidth",
            "boundary_bytes",
        )
        if getattr(costs, name) not in (None, {})
    ]
    name = chance.choice(names)
    value = getattr(costs, name)
    more = chance.choice([0.25, 1, 7])

    def raised(one: Any) -> Any:
        if name == "bandwidth":
            return min(one, 4) / (1 + more)
        return one + more

    if isinstance(value, tuple):
        at = chance.randrange(len(value))
        value = (*value[:at], raised(value[at]), *value[at + 1 :])
    elif isinstance(value, dict):
        link = chance.choice([*value])
        value = {**value, link: raised(value[link])}
    else:
        value = raised(value)
    return attrs.evolve(costs, **{name: value})


@given(SEEDS, st.sampled_from(["ahead", "listed"]))
def test_nothing_ends_sooner_where_something_costs_more(seed: int, receives: Any) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    costs, durations = some_costs(schedule, chance), some_durations(schedule, chance)
    line = schedir.simulate(schedule, costs, durations=durations, receives=receives)
    for _ in range(4):
        more = dearer(costs, chance)
        longer = schedir.simulate(schedule, more, durations=durations, receives=receives)
        assert (longer.starts >= line.starts).all()
        assert (longer.ends >= line.ends).all()
        if durations:
            key = chance.choice([*durations])
            lasting = {**durations, key: durations[key] + chance.choice([0.5, 3])}
            longer = schedir.simulate(schedule, costs, durations=lasting, receives=receives)
            assert (longer.ends >= line.ends).all()


@given(SEEDS)
def test_nothing_ends_sooner_where_receives_are_posted_as_listed(seed: int) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    costs = some_costs(schedule, chance)
    ahead = schedir.simulate(schedule, costs)
    listed = schedir.simulate(schedule, costs, receives="listed")
    assert (listed.ends >= ahead.ends).all()
