"""S506: communication that makes the step longer, against brute force over the simulated lists."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

import schedir
from schedir import Action, Diagnostic, Kind, Schedule
from schedir.checker import CHANNELS, changed, prove
from schedir.checker.diagnostics import Move
from schedir.ir import COMMUNICATION, SENDS
from tests.built_in import NAMES
from tests.sweeps import sweep
from tests.test_check import edit, naive, schedule


@cache
def bases() -> list[Schedule]:
    shapes = [(name, 3, 4) for name in NAMES]
    shapes += [("1f1b", 2, 2), ("1f1b", 3, 5), ("1f1b", 4, 8), ("interleaved-1f1b", 2, 4)]
    built = [schedir.build(name, ranks=r, microbatches=m) for name, r, m in shapes]
    return built + [naive(base) for base in built]


def delayed(base: Schedule, many: int, chance: random.Random) -> Schedule:
    """Some sends moved after the next few entries, though after no other send or OPTIM_STEP."""
    for _ in range(many):
        rank = chance.choice([r for r in range(base.ranks) if sends_of(base, r)])
        actions = list(base.flat[rank])
        index = chance.choice(sends_of(base, rank))
        last = index
        while last + 1 < len(actions) and actions[last + 1].kind not in SENDS | {Kind.OPTIM_STEP}:
            last += 1
        actions.insert(chance.randint(index, last), actions.pop(index))
        later = edit(base, rank, actions)
        if schedir.check(later, "edge").ok:  # what waits for it may stand between
            base = later
    return base


def sends_of(base: Schedule, rank: int) -> list[int]:
    return [index for index, action in enumerate(base.flat[rank]) if action.kind in SENDS]


def sooner(base: Schedule) -> Iterator[Schedule]:
    """Each send as soon as its payload is made, and the send before it is posted; not where it
    would pass one of the other kind on its channel."""
    for rank, actions in enumerate(base.flat):
        for index in sends_of(base, rank):
            send = actions[index]
            kind = Kind.FORWARD if send.kind is Kind.SEND_ACT else Kind.BACKWARD
            makes = Action(kind, send.stage, send.microbatch)
            before = enumerate(actions[:index])
            first = max(at for at, a in before if a.kind is send.kind or a == makes)
            others = [*actions[:index], *actions[index + 1 :]]
            found = edit(base, rank, [*others[: first + 1], send, *others[first + 1 :]])
            if schedir.check(found, "edge").ok:
                yield found


def elsewhere(base: Schedule, many: int, chance: random.Random) -> Iterator[Schedule]:
    """Some sends and receives anywhere else in their lists."""
    for _ in range(many):
        rank = chance.choice([r for r in range(base.ranks) if sends_of(base, r)])
        actions = list(base.flat[rank])
        moves = [at for at, action in enumerate(actions) if action.kind in COMMUNICATION]
        actions.insert(chance.randrange(len(actions)), actions.pop(chance.choice(moves)))
        yield edit(base, rank, actions)


def listed(schedule: Schedule, channel: str = "edge") -> float:
    """How long the step takes as the lint judges it: receives are posted where they are listed."""
    under = None if channel == "edge" else channel
    return schedir.simulate(schedule, receives="listed", channel=under).makespan


def exposed(checked: Schedule, channel: str) -> Diagnostic | None:
    return next((d for d in schedir.check(checked, channel).diagnostics if d.code == "S506"), None)


@sweep("seed", range(80), quick=[0, 1, 2, 14, 18, 20, 22, 23, 28])
def test_the_entry_that_is_named_saves_the_most(seed: int) -> None:
    chance = random.Random(seed)
    late = delayed(chance.choice(bases()), chance.randint(1, 12), chance)
    channel = chance.choice(("rank", "edge"))
    if not schedir.check(late, channel).ok:
        channel = "edge"
    finding = exposed(late, channel)
    makespan = listed(late, channel)
    others = [*sooner(late), *elsewhere(late, 40, chance)]
    right = (other for other in others if prove(other, channel).ok)
    best = min((listed(other, channel) for other in right), default=makespan)
    if finding is None:
        assert best >= makespan
        return
    assert finding.facts["makespan"] == makespan
    assert finding.change is not None
    better = changed(late, finding.change)
    assert schedir.check(better, channel).ok
    shortest = listed(prove(better, channel).proved(), channel)
    assert finding.facts["shortest"] == shortest < makespan
    if isinstance(finding.change, Move):
        assert shortest <= best
    else:  # several are late at once, which none regains alone
        assert best >= makespan
        assert "and others are posted late" in finding.message


@pytest.mark.parametrize("base", range(3))
def test_moving_what_is_named_leads_to_the_shortest_step(base: int) -> None:
    late = delayed(bases()[base], 6, random.Random(0))
    while (finding := exposed(late, "edge")) is not None and finding.change is not None:
        late = prove(changed(late, finding.change), "edge").proved()
    assert finding is None
    assert listed(late) == schedir.simulate(bases()[base]).makespan


def test_a_single_late_send_in_a_clean_list() -> None:
    late = schedule(
        2,
        "0 1",
        "0F0 0F1 0SEND_ACT0 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
    )
    (finding,) = schedir.check(late, "rank").diagnostics
    assert finding.message == "0SEND_ACT0 is posted late: the step takes 10 rather than 9"
    assert finding.help == "post rank 0 #2 before rank 0 #1"


def test_late_sends_are_not_blamed_on_receives() -> None:
    """Every gradient of one rank is sent an entry late; its receivers are as they should be."""
    base = schedir.build("1f1b", ranks=4, microbatches=8)
    actions = list(base.flat[2])
    for index in reversed([i for i, a in enumerate(actions) if a.kind is Kind.SEND_GRAD]):
        forwards = (i for i in range(index, len(actions)) if actions[i].kind is Kind.FORWARD)
        if following := next(forwards, 0):
            actions.insert(following, actions.pop(index))
    late = edit(base, 2, actions)
    assert listed(late) > schedir.simulate(base).makespan
    assert {d.code for d in schedir.check(late, "edge").diagnostics} == {"S506"}


def test_a_send_that_is_late_for_another_one_is_named_with_it() -> None:
    """What the last rank waits for can't pass the late send before it on its channel."""
    late = schedule(
        2,
        "0 1",
        "0F1 0SEND_ACT1 0F0 0SEND_ACT0 0RECV_GRAD0 0RECV_GRAD1 0B1 0B0",
        "1RECV_ACT1 1RECV_ACT0 1F1 1F0 1I1 1I0 1W1 1SEND_GRAD0 1SEND_GRAD1 1W0",
    )
    finding = exposed(late, "rank")
    assert finding is not None
    assert finding.message == (
        "1SEND_GRAD0 and others are posted late: the step takes 10 rather than 8"
    )
    assert finding.help == "leave the communication out, and schedir inserts it"


def test_a_late_receive_alone_costs_nothing() -> None:
    """Without a model, and under `rank`, where the send of microbatch 1 waits for a gradient, whose
    send is listed first: rank 1 needs its activation only after that."""
    held = schedule(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0RECV_GRAD0 0SEND_ACT1 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1",
    )
    for channel in ("rank", "edge"):
        assert [d.code for d in schedir.check(held, channel).diagnostics] == ["S213"]


def test_what_schedir_inserts_is_never_blamed() -> None:
    """Nor is a copy of it, whatever transfers cost."""
    built = schedir.build("1f1b", ranks=4, microbatches=8)
    for channel, costs in product(CHANNELS, (None, schedir.CostModel(latency=2))):
        for each in (built, schedir.loads(schedir.dumps(built))):
            assert schedir.check(each, channel, costs=costs).diagnostics == ()


def test_a_difference_of_rounding_is_none() -> None:
    """Two ways to the same end add up the same times in another order."""
    built = schedule(
        3,
        "0 1",
        "0F0 0SEND_ACT0 0F1 (0SEND_ACT1;0RECV_GRAD0) 0B0 0OPTIM_STEP 0F2@1 "
        "(0RECV_GRAD1;0SEND_ACT2) 0B1 0OPTIM_STEP 0RECV_GRAD2 0B2 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1OPTIM_STEP 1F1@0 1B1 "
        "(1SEND_GRAD1;1RECV_ACT2) 1OPTIM_STEP 1F2@1 1B2 1SEND_GRAD2 1OPTIM_STEP",
    )
    costs = schedir.CostModel(
        forward=0.3,
        backward=1 / 3,
        optim_step=1.1,
        latency=1.1,
        bandwidth=3.3,
        boundary_bytes=1 / 3,
    )
    found = schedir.check(built, "host", costs=costs).diagnostics
    assert "S506" not in {d.code for d in found}
