"""The simulator against one that steps through time."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import attrs
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import schedir
import schedir.checker
from schedir import CostModel, Kind, Schedule, Timeline, Together
from schedir.ir import COMMUNICATION, COPIES, Entry
from schedir.passes import offload
from tests.joined import drawn_joined, joined
from tests.stepped import Stepped, of_stage
from tests.sweeps import examples
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
        activation_bytes=_doubled(by_stage(4)),
        host_bandwidth=chance.choice([1, 2, float("inf")]),
    )


def _doubled(value: Any) -> Any:
    return tuple(2 * one for one in value) if isinstance(value, tuple) else 2 * value


Durations = dict[tuple[int, int], int]
Spans = dict[tuple[int, str], list[tuple[float, float]]]


def some_durations(schedule: Schedule, chance: random.Random) -> Durations:
    share = chance.choice([0, 0, 0.1, 0.5])
    return {
        (rank, index): chance.randint(0, 9)
        for rank, entries in enumerate(schedule.actions)
        for index in range(len(entries))
        if chance.random() < share
    }


def spans_of(line: Timeline) -> Spans:
    found: Spans = {}
    for rank, spans in enumerate(line.spans):
        for span in spans:
            found.setdefault((rank, str(span.action)), []).append((span.start, span.end))
    return found


def stepped(schedule: Schedule, durations: Durations, costs: CostModel, receives: str) -> Any:
    """The times of the other simulator. What blocks under `edge`, and not where posts never block,
    is run as its parts."""
    whole = "edge" in schedir.check(schedule, "async").clean_channels
    listed = (schedule, durations) if whole else apart(schedule, durations)
    return Stepped(*listed, costs, receives).run()


def apart(schedule: Schedule, durations: Durations) -> tuple[Schedule, Durations]:
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
    assert spans_of(line) == stepped(schedule, durations, costs, receives)


def as_posted(schedule: Schedule, costs: CostModel, receives: str, channel: str) -> Schedule:
    """The list with its receives where the executor posts them; under `host`, which knows no
    batches, with their parts."""
    if channel == "host":
        return apart(schedule, {})[0]
    if receives == "listed":
        return schedule
    sizes = costs.boundary_bytes
    largest = max(sizes, default=0) if isinstance(sizes, tuple) else sizes
    return schedir.advance_receives(schedule, channel, int(2**20 // max(largest, 1)))


def agrees_under(channel: str, seed: int, receives: Any) -> None:
    """One list, its transfers large and small, under a channel model."""
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    if chance.random() < 0.3:
        schedule = copied(schedule, chance)
    assume(channel in schedir.check(schedule, channel).clean_channels)
    costs = some_costs(schedule, chance)
    large = chance.choice([1, 2**18])  # of which few receive buffers fit into a mebibyte
    costs = attrs.evolve(
        costs,
        boundary_bytes=scaled(costs.boundary_bytes, large),
        bandwidth=scaled(costs.bandwidth, large),
    )
    costs = chance.choice([costs, costs, CostModel()])  # whose times may be known already
    line = schedir.simulate(schedule, costs, receives=receives, channel=channel)
    posted = as_posted(schedule, costs, receives, channel)
    assert line.starts.dtype.kind == "i"
    assert spans_of(line) == Stepped(posted, {}, costs, "listed", channel).run()


def scaled(value: Any, by: int) -> Any:
    if isinstance(value, dict):
        return {link: one * by for link, one in value.items()}
    return tuple(one * by for one in value) if isinstance(value, tuple) else value * by


@pytest.mark.parametrize("channel", schedir.checker.CHANNELS)
@examples(400)
@given(SEEDS, st.sampled_from(["ahead", "listed"]))
@example(717, "ahead")  # two sends of one batch to one rank
def test_a_channel_model_agrees_with_stepping_through_time(
    channel: str, seed: int, receives: Any
) -> None:
    agrees_under(channel, seed, receives)


def copied(schedule: Schedule, chance: random.Random) -> Schedule:
    """The schedule with activations copied to the host and back, not all as the pass lists it."""
    stages = [stage for stage in range(schedule.stages) if chance.random() < 0.8]
    found = offload(schedule, stages, ahead=chance.randint(1, 3))
    for _ in range(4):
        lists = [[*entries] for entries in found.actions]
        own = chance.choice(lists)
        places = [i for i, entry in enumerate(own) if "LOAD" in str(entry)]
        if places:
            entry = own.pop(chance.choice(places))
            own.insert(chance.randrange(len(own) + 1), entry)
        moved = Schedule(found.name, found.microbatches, found.placement, lists)
        found = moved if schedir.check(moved, "async").ok else found
    return found


def held_at_most(line: Timeline, rank: int, costs: CostModel) -> list[float]:
    """The most bytes of activations on a rank, and on its host: all changes one after the other in
    the order of time, and of the list at one time."""
    again = {
        (s.action.stage, s.action.microbatch)
        for spans in line.spans
        for s in spans
        if s.action.kind is Kind.RECOMPUTE
    }
    changes: list[tuple[float, int, bool, float, float]] = []
    for span in line.spans[rank]:
        kind, stage = span.action.kind, span.action.stage
        size, rest = (
            of_stage(each, stage) for each in (costs.activation_bytes, costs.deferred_bytes)
        )
        made = 0 if (stage, span.action.microbatch) in again else size
        at_start = {Kind.FORWARD: made, Kind.RECOMPUTE: size, Kind.RELOAD: size}
        at_end = {
            Kind.BACKWARD: (-size, 0),
            Kind.BACKWARD_INPUT: (rest - size, 0),
            Kind.BACKWARD_WEIGHT: (-rest, 0),
            Kind.OFFLOAD: (-size, size),
            Kind.RELOAD: (0, -size),
        }
        changes.append((span.start, span.index, False, at_start.get(kind, 0), 0))
        changes.append((span.end, span.index, True, *at_end.get(kind, (0, 0))))
    now, most = [0.0, 0.0], [0.0, 0.0]
    for *_, device, host in sorted(changes):
        now = [now[0] + device, now[1] + host]
        most = [max(most[0], now[0]), max(most[1], now[1])]
    return most


@given(SEEDS, st.sampled_from(["ahead", "listed"]))
def test_copies_to_the_host_agree_with_stepping_through_time(seed: int, receives: Any) -> None:
    chance = random.Random(seed)
    schedule = copied(some_schedule(chance), chance)
    costs, durations = some_costs(schedule, chance), some_durations(schedule, chance)
    engines = {rank: rank // 2 for rank in range(schedule.ranks) if chance.random() < 0.7}
    costs = attrs.evolve(
        costs,
        copy_engine=chance.choice([None, engines]),
        deferred_bytes=chance.choice([costs.activation_bytes, 1]),
        boundary_bytes=0,
    )
    line = schedir.simulate(schedule, costs, durations=durations, receives=receives)
    assert line.starts.dtype.kind == "i"
    expected = stepped(schedule, durations, costs, receives)
    assume(expected is not None)  # two copies that are posted at once may wait for each other
    assert spans_of(line) == expected
    copies = any(action.kind in COPIES for action in chain.from_iterable(schedule.flat))
    for rank, stats in enumerate(line.ranks if costs.sizes.known else ()):
        device, host = held_at_most(line, rank, costs)
        assert stats.peak_bytes == device
        assert stats.peak_host_bytes == (host if copies else None)


def dearer(costs: CostModel, chance: random.Random) -> CostModel:
    """One of the costs, of one stage or link where it has several, is higher."""
    names = ["forward", "backward", "backward_input", "backward_weight", "recompute", "overlapped"]
    names += ["reduce_grad", "optim_step", "latency", "bandwidth", "boundary_bytes"]
    name = chance.choice([name for name in names if getattr(costs, name) not in (None, {})])
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
def test_nothing_ends_sooner_where_something_costs_more_or_is_posted_later(
    seed: int, receives: Any
) -> None:
    chance = random.Random(seed)
    schedule = some_schedule(chance)
    costs, durations = some_costs(schedule, chance), some_durations(schedule, chance)
    line = schedir.simulate(schedule, costs, durations=durations, receives=receives)
    changes: list[dict[str, Any]] = [{"costs": dearer(costs, chance)} for _ in range(4)]
    changes.append({"receives": "listed"})
    for key in chance.choices([*durations], k=4) if durations else []:
        changes.append({"durations": {**durations, key: durations[key] + chance.choice([0.5, 3])}})
    given = {"costs": costs, "durations": durations, "receives": receives}
    for change in changes:
        longer = schedir.simulate(schedule, **(given | change))
        assert (longer.starts >= line.starts).all()
        assert (longer.ends >= line.ends).all()
