"""The graph's answers, against slow ones that walk down the lists."""

from __future__ import annotations

import gc
import random
import weakref
from typing import TypeAlias

import numpy as np
import pytest

import schedir
from schedir import CHANNELS, Action, Kind, Schedule
from schedir.checker.structure import structure
from schedir.graph.alive import faults
from schedir.graph.compile import graph_of
from schedir.graph.paths import HAPPENS, finish, textbook, textbook_prices, waits
from schedir.ir import COMMUNICATION, VALUES
from schedir.ir.kinds import Use
from schedir.library import load
from schedir.passes import insert_communication, offload
from tests.built_in import EVERY
from tests.joined import drawn_joined, joined
from tests.literals import CROSSING, listed
from tests.sweeps import sweep
from tests.test_random import drawn, scattered

Value: TypeAlias = tuple[str, int, int]


def naive_faults(schedule: Schedule) -> set[tuple[int, str]]:
    """The places with a fault of each label, found by walking down each list with the set of what
    is alive in hand."""
    columns = schedule.columns
    home = {
        (a.stage, a.microbatch): columns.rank[p]
        for p in range(len(columns))
        if (a := columns.action(p)).kind.meaning.home and a.microbatch is not None
    }
    listed = {(a.kind, a.stage, a.microbatch) for own in schedule.flat for a in own}

    def value(name: str, stage: int, microbatch: int) -> Value:
        link = VALUES[name].link
        if link:
            other = stage + link[1], microbatch
            if home.get(other, -1) == home.get((stage, microbatch), -2):
                return link[0], *other
        return name, stage, microbatch

    def takes_place(use: Use, stage: int, microbatch: int) -> bool:
        last = schedule.stages - 1
        where = {
            "any": True,
            "first": stage == 0,
            "not first": stage > 0,
            "last": stage == last,
            "not last": stage < last,
        }
        return (
            where[use.where]
            and (not use.beside or (Kind(use.beside), stage, microbatch) in listed)
            and (not use.without or (Kind(use.without), stage, microbatch) not in listed)
        )

    given: set[Value] = {value("input", 0, m) for m in range(schedule.microbatches)}
    if not schedule.is_complete:
        for name, of in VALUES.items():
            for stage, m in home:
                if of.link and 0 <= stage + of.link[1] < schedule.stages:
                    given |= {value(name, stage, m)} & {(name, stage, m)}
    found: set[tuple[int, str]] = set()
    for rank in range(schedule.ranks):
        places = range(int(columns.starts[rank]), int(columns.starts[rank + 1]))
        rows = []
        for place in places:
            action = columns.action(place)
            for use in action.kind.meaning.uses:
                if VALUES[use.value].per != "microbatch" or action.microbatch is None:
                    continue
                if takes_place(use, action.stage, action.microbatch):
                    key = value(use.value, action.stage, action.microbatch)
                    rows.append((int(columns.entry[place]), use.does, key, place, use.value))
        # What an entry reads comes before what it makes; of two ends the first is right.
        rows.sort(key=lambda row: (row[0], row[1] == "make", row[1] == "end"))
        alive = set(given)
        ever: set[Value] = set()
        for at, (_, does, key, place, name) in enumerate(rows):
            if does == "make":
                if key in alive or (key in ever and not VALUES[name].again):
                    found.add((place, "twice"))
                alive.add(key)
                ever.add(key)
                continue
            if key not in alive:
                later = any(d == "make" and k == key for _, d, k, *_ in rows[at:])
                was = key in ever or key in given
                found.add((place, "late" if later else "gone" if was else "missing"))
            if does == "end":
                alive.discard(key)
    return found


def shuffled(schedule: Schedule, chance: random.Random) -> Schedule:
    """A few entries of the lists moved within them."""
    lists = [[*entries] for entries in schedule.actions]
    for _ in range(chance.randint(1, 4)):
        own = chance.choice([entries for entries in lists if entries] or [[]])
        if own:
            own.insert(chance.randrange(len(own) + 1), own.pop(chance.randrange(len(own))))
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, lists)


@sweep("seed", range(6), quick=range(2))
def test_faults_are_those_that_walking_finds(seed: int) -> None:
    chance = random.Random(seed)
    wrong = 0
    for turn in range(120):
        schedule = drawn_joined(chance) if turn % 3 else drawn(chance)
        if turn % 2:
            schedule = offload(schedule, range(schedule.stages), ahead=chance.choice([1, 2]))
        if turn % 5:
            schedule = shuffled(schedule, chance)
        if any(each.many for each in structure(schedule)):
            continue
        found = {
            (place, fault.label)
            for fault in faults(graph_of(schedule))
            for place in fault.places.tolist()
            if fault.label != "unended"
        }
        assert found == naive_faults(schedule), schedir.dumps(schedule)
        wrong += bool(found)
    assert wrong > 20


@pytest.mark.parametrize("name", EVERY)
def test_what_insertion_remembers(name: str) -> None:
    """One order of all that happens, and when it does: as worked out afresh."""
    for ranks, microbatches in ((2, 5), (4, 8)):
        complete = schedir.build(name, ranks=ranks, microbatches=microbatches)
        fresh = schedir.loads(schedir.dumps(complete))
        assert HAPPENS not in fresh.memo
        for channel in CHANNELS:
            assert (waits(complete, channel).stuck == waits(fresh, channel).stuck).all()
        for ahead in (False, True):
            exists = waits(fresh, "edge").exists
            remembered, worked_out = (textbook(each, ahead=ahead) for each in (complete, fresh))
            assert remembered[exists].tolist() == worked_out[exists].tolist()


@sweep("seed", range(4), quick=[0])
def test_the_order_of_insertion_proves_every_model(seed: int) -> None:
    chance = random.Random(seed)
    certified = inserted = 0
    for _ in range(60):
        complete = insert_communication(drawn(chance))
        if HAPPENS in complete.memo:
            waiting = waits(complete, "host")
            happens = complete.memo[HAPPENS]
            assert isinstance(happens, np.ndarray)
            inserted += 1
            certified += bool((happens[waiting.waiter] > happens[waiting.awaited]).all())
    assert certified == inserted > 20


def test_a_wrong_order_proves_nothing() -> None:
    """What is remembered is only believed where it agrees with every wait."""
    complete = schedir.build("1f1b", ranks=3, microbatches=4)
    happens = complete.memo[HAPPENS]
    assert isinstance(happens, np.ndarray)
    complete.memo[HAPPENS] = happens[::-1].copy()
    assert not waits(complete, "rank").stuck.any()
    blocked = schedir.loads(schedir.dumps(CROSSING))
    blocked.memo[HAPPENS] = np.arange(len(blocked.columns))
    assert waits(blocked, "rank").stuck.any()
    assert not waits(blocked, "edge").stuck.any()


def test_what_never_happens_begins_never() -> None:
    first, second = "0RECV_GRAD0 0F0 0SEND_ACT0 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0"
    blocked = listed(1, "0 1", first, second)
    waiting = waits(blocked, "rank")
    begins = finish(waiting, np.ones(waiting.nodes, np.int64))
    assert (begins[waiting.stuck] == -1).all()
    assert waiting.stuck.any()


def test_what_is_remembered_goes_with_its_schedule() -> None:
    """Large lists are freed as soon as nobody has them, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        schedules = [load("1f1b"), schedir.build("1f1b")]
        for schedule in schedules:
            assert schedir.check(schedule).ok
            assert schedir.simulate(schedule).makespan == 33
        left = [weakref.ref(schedule) for schedule in schedules]
        del schedule, schedules
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


@sweep("seed", range(3), quick=[0])
def test_times_under_a_stricter_model_are_those_of_its_own_waits(seed: int) -> None:
    """Though they are taken over from `edge` where its queues hold nothing up."""
    chance = random.Random(seed)
    alike = other = 0
    for turn in range(200):
        schedule = scattered(insert_communication(drawn(chance)), chance)
        if turn % 4:
            schedule = joined(schedule, chance, 0.5)
        for channel in ("rank", "pair"):
            waiting = waits(schedule, channel)
            takes = textbook_prices(schedule.columns).takes
            begins = finish(waiting, takes)
            own = waiting.exists[: len(schedule.columns)]
            places = np.flatnonzero(own)
            assert textbook(schedule, channel)[places].tolist() == begins[places].tolist()
            same = begins[places].tolist() == textbook(schedule)[places].tolist()
            alike, other = alike + same, other + (not same)
    assert min(alike, other) > 10


@sweep("seed", range(3), quick=[0])
def test_the_transfers_of_a_channel_and_those_that_meet_nobody(seed: int) -> None:
    chance = random.Random(seed)
    lone = 0
    for _ in range(60):
        schedule = insert_communication(drawn(chance))
        lists = [[*entries] for entries in schedule.actions]
        for _ in range(3):
            kind = chance.choice(sorted(COMMUNICATION))
            pair = chance.randrange(schedule.stages), chance.randrange(schedule.microbatches)
            chance.choice(lists).append(Action(kind, *pair))
            own = chance.choice(lists)
            sent = [e for e in own if isinstance(e, Action) and e.kind in COMMUNICATION]
            if sent:
                own.remove(chance.choice(sent))
        schedule = Schedule("more", schedule.microbatches, schedule.placement, lists)
        if any(each.many for each in structure(schedule)):
            continue
        graph, columns = graph_of(schedule), schedule.columns
        alone = []
        for place in columns.where(*COMMUNICATION).tolist():
            action, rank = columns.action(place), int(columns.rank[place])
            peer = graph.peer(action)
            runs = graph.runs[action.stage, action.microbatch]
            if peer is None or peer == rank or runs != rank:
                alone.append(place)
        assert graph.lone.tolist() == alone
        lone += len(alone)
        transfers = graph.transfers
        for number in range(len(transfers)):
            channel = transfers.source[number], transfers.target[number]
            both = (transfers.source == channel[0]) & (transfers.target == channel[1])
            sends = np.sort(transfers.send[both & transfers.matched])
            assert transfers.send[transfers.beside(number)].tolist() == sends.tolist()
    assert lone > 5
