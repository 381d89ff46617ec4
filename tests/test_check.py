"""check: each fault has its own code, at the right place, and the verdict is what happens."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, Diagnostic, Kind, Schedule
from schedir.checker import CHANNELS, RULES
from schedir.ir import (
    COMMUNICATION,
    NAMES_VERSION,
    RECEIVES,
    parse_action,
    recv_act,
    recv_grad,
    send_act,
    send_grad,
)
from schedir.passes import strip_communication
from tests import literals
from tests.built_in import NAMES, variants
from tests.oracle import happens
from tests.sweeps import sweep

schedule = literals.listed


def edit(base: Schedule, rank: int, change: list[Action]) -> Schedule:
    lists = [list(actions) for actions in base.flat]
    lists[rank] = change
    return Schedule(base.name, base.microbatches, base.placement, lists)


def drop(base: Schedule, rank: int, token: str) -> Schedule:
    return edit(base, rank, [a for a in base.flat[rank] if str(a) != token])


def double(base: Schedule, rank: int, token: str) -> Schedule:
    index = place(base, rank, token)
    actions = list(base.flat[rank])
    return edit(base, rank, [*actions[: index + 1], *actions[index:]])


def swap(base: Schedule, rank: int, one: str, other: str) -> Schedule:
    exchange = {one: parse_action(other), other: parse_action(one)}
    return edit(base, rank, [exchange.get(str(a), a) for a in base.flat[rank]])


def place(base: Schedule, rank: int, token: str) -> int:
    return [str(a) for a in base.flat[rank]].index(token)


def listed(base: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, actions in enumerate(base.flat):
        for action in actions:
            yield rank, action


def naive(base: Schedule) -> Schedule:
    """Each send right after the compute that makes its payload, each receive right before use."""
    compute = strip_communication(base)
    runs = {(a.stage, a.microbatch): rank for rank, a in listed(compute) if a.kind is Kind.FORWARD}
    lists = []
    for rank, actions in enumerate(compute.flat):
        lowered = []
        for action in actions:
            stage, m = action.stage, action.microbatch or 0
            below, above = (runs.get((s, m), rank) != rank for s in (stage - 1, stage + 1))
            if action.kind is Kind.FORWARD:
                need, send = below and recv_act(stage, m), above and send_act(stage, m)
            elif action.kind is Kind.OPTIM_STEP:
                need = send = False
            else:
                need, send = above and recv_grad(stage, m), below and send_grad(stage, m)
            lowered += [x for x in (need, action, send) if x]
        lists.append(lowered)
    return Schedule(base.name, base.microbatches, base.placement, lists)


ONE_F = schedir.build("1f1b", ranks=2, microbatches=2)


def found(checked: Schedule, channel: str = "edge") -> list[tuple[str, str]]:
    """The errors: what each is, and where."""
    report = schedir.check(checked, channel=channel)
    return [(d.code, str(d.locations[0])) for d in report.errors]


@pytest.mark.parametrize(
    ("rank", "token", "expected"),
    [
        (0, "0F1", ("S105", "rank 0 0F1")),
        (1, "1B0", ("S105", "rank 1 1B0")),
        (0, "0SEND_ACT1", ("S302", "rank 1 #2 1RECV_ACT1")),
        (1, "1RECV_ACT1", ("S302", "rank 0 #3 0SEND_ACT1")),
        (1, "1RECV_ACT1", ("S304", "rank 1 #4 1F1")),  # its consumer misses it too
    ],
)
def test_missing(rank: int, token: str, expected: tuple[str, str]) -> None:
    assert expected in found(drop(ONE_F, rank, token))


@pytest.mark.parametrize(
    ("rank", "token"), [(0, "0F1"), (1, "1B0"), (0, "0SEND_ACT1"), (1, "1RECV_ACT1")]
)
def test_doubled(rank: int, token: str) -> None:
    index = place(ONE_F, rank, token) + 1
    assert found(double(ONE_F, rank, token)) == [("S104", f"rank {rank} #{index} {token}")]


def test_two_receives_of_a_channel_swapped() -> None:
    base = schedir.build("fill-drain", ranks=2, microbatches=3)
    findings = found(swap(base, 0, "0RECV_GRAD1", "0RECV_GRAD2"))
    assert ("S303", f"rank 0 #{place(base, 0, '0RECV_GRAD1')} 0RECV_GRAD2") in findings


def test_a_send_under_the_wrong_rank() -> None:
    moved = edit(ONE_F, 1, [*ONE_F.flat[1], schedir.send_act(0, 1)])
    moved = drop(moved, 0, "0SEND_ACT1")
    assert found(moved) == [("S103", "rank 1 #9 0SEND_ACT1")]


@pytest.mark.parametrize(
    ("wrong", "stages"),
    [
        ("2 1 0 3", "s 0 and 2"),
        ("0 1 3 3", " 2"),
        ("3 0 1 2", "s 0, 1, 2 and 3"),
    ],
)
def test_a_wrong_placement_is_one_finding(wrong: str, stages: str) -> None:
    right = schedir.build("1f1b", ranks=4, microbatches=8)
    text = schedir.dumps(right).replace("placement 0 1 2 3", f"placement {wrong}")
    (finding,) = [d for d in schedir.check(schedir.loads(text)).errors if d.code == "S103"]
    assert finding.message == f"the lists have stage{stages} on other ranks than the placement"
    assert finding.help is not None
    _, _, placement = finding.help.partition("write the placement ")
    text = text.replace(f"placement {wrong}", f"placement {placement.partition(', or')[0]}")
    assert schedir.check(schedir.loads(text)).ok


def test_a_cross_rank_compute_cycle() -> None:
    """Stage 2 is listed before stage 0 on rank 0: nothing on the ranks can start."""
    cycle = schedule(1, "0 1 0", "2F0 0F0 2B0 0B0", "1F0 1B0")
    (finding,) = schedir.check(cycle).diagnostics
    assert (finding.code, str(finding.locations[0])) == ("S301", "rank 0 #0 2F0")
    assert finding.help == "move rank 0 #1 before rank 0 #0"
    three_stages = schedir.schedule("cycle", placement=lambda pipe: [0, 1, 0])
    with pytest.raises(schedir.ScheduleError, match="S301"):
        schedir.build(three_stages(lambda pipe, rank: cycle.flat[rank]), ranks=2, microbatches=1)


def test_stage_and_microbatch_out_of_range() -> None:
    wrong = schedule(1, "0", "0F0 0B0 3F0 0F7")
    assert found(wrong) == [("S101", "rank 0 #2 3F0"), ("S102", "rank 0 #3 0F7")]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("1f1b", 2, 2), ("1f1b", 4, 8), ("interleaved-1f1b", 4, 8)]
)
def test_naive_lists_deadlock_with_blocking_sends_only(
    name: str, ranks: int, microbatches: int
) -> None:
    lowered = naive(schedir.build(name, ranks=ranks, microbatches=microbatches))
    assert {code for code, _ in found(lowered, "host")} == {"S301"}
    assert found(lowered, "async") == []


def test_naive_fill_drain_is_clean_under_host() -> None:
    lowered = naive(schedir.build("fill-drain", ranks=4, microbatches=8))
    assert schedir.check(lowered).clean_channels == CHANNELS


def test_structural_faults_hide_their_echoes() -> None:
    assert {code for code, _ in found(drop(ONE_F, 0, "0F1"))} == {"S105"}


def test_a_deadlock_is_not_hidden_by_other_findings() -> None:
    late = schedule(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1@3 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
    )
    assert {code for code, _ in found(late, "pair")} == {"S301", "S206", "S401"}


@pytest.mark.parametrize(
    ("placement", "lists", "expected"),
    [
        (
            *("0,1", [f"0F{m} 0B{m} 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP" for m in (0, 1)]),
            ("S210", "rank 0 #3 0REDUCE_GRAD"),
        ),
        (
            "0,1",
            [
                "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP",
                "0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
            ],
            ("S211", "rank 0 #7 0OPTIM_STEP"),
        ),
        # What is summed already, or applied, over a data-parallel group that the lists don't show.
        (
            *("0", ["0F0 0B0 0F1 0B1 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP"]),
            ("S210", "rank 0 #5 0REDUCE_GRAD"),
        ),
        ("0", ["0F0 0B0 0F1 0B1 0OPTIM_STEP 0REDUCE_GRAD"], ("S210", "rank 0 #5 0REDUCE_GRAD")),
        ("0,1", ["0F0 0B0", "0F1 0B1"], ("S209", "rank 0 #1 0B0")),
        ("0 0", ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 1REDUCE_GRAD"], ("S209", "rank 0 #7 0B1")),
    ],
)
def test_sums_over_replicas(placement: str, lists: list[str], expected: tuple[str, str]) -> None:
    assert expected in found(schedule(2, placement, *lists))


def test_all_findings_are_reported() -> None:
    broken = schedule(2, "0", "0B0 0F0 0F1@3 0OPTIM_STEP 0B1")
    assert [code for code, _ in found(broken)] == ["S201", "S401", "S204"]


def test_a_file_that_claims_a_billion_microbatches_is_answered() -> None:
    report = schedir.check(schedule(999_999_999, "0", "0F0 0B0"))
    assert len(report.diagnostics) == 4000
    # Each of the others lacks its F and its B.
    assert sum(1 + d.more for d in report.diagnostics) == 2 * 999_999_998
    assert report.diagnostics[-1].headline.endswith("; and 1,999,995,996 more of S105")
    with pytest.raises(schedir.ScheduleError, match="and 1999999995 more"):
        report.raise_if_errors()


def test_what_is_wrong_too_often_is_said_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every receive after its user: the first faults of the first rank are said."""
    monkeypatch.setattr("schedir.checker.run._MOST_OF_A_CODE", 40)
    base = schedir.build("fill-drain", ranks=2, microbatches=60)
    late = [sorted(actions, key=lambda a: a.kind in RECEIVES) for actions in base.flat]
    report = schedir.check(Schedule("late", 60, base.placement, late))
    assert Counter(d.code for d in report.diagnostics) == {"S304": 40}
    assert [d.more for d in report.diagnostics] == [0] * 39 + [80]
    assert {d.locations[0].rank for d in report.diagnostics} == {0}


@pytest.mark.parametrize(
    ("microbatches", "said"),
    [
        ((), "none"),
        ((3, 4), "3, 4"),
        ((0, 1, 2, 3, 5), "0-3, 5"),
        (range(1000), "0-999"),
        (range(0, 2000, 2), "0, 2, 4, 6, 8, 10, 12, 14, … and 992 more"),
    ],
)
def test_microbatches_are_said_as_ranges(microbatches: Sequence[int], said: str) -> None:
    rule = RULES["S207"]
    report = schedir.check(schedir.loads(rule.example), **dict(rule.options))
    place = report.diagnostics[0].locations
    facts = {"step": 0, "applied": tuple(microbatches), "expected": (0,)}
    finding = Diagnostic(rule, place, facts)
    assert finding.message == (
        f"OPTIM_STEP 0 of stage 1 applies microbatches {said}, but that of the tied stage 0 "
        "applies 0"
    )


@pytest.mark.parametrize("code", RULES)
def test_a_finding_is_plain_data(code: str) -> None:
    rule = RULES[code]
    report = schedir.check(schedir.loads(rule.example), **dict(rule.options))
    for finding in report.diagnostics:
        same = pickle.loads(pickle.dumps(finding))
        assert (same, hash(same)) == (finding, hash(finding))
        assert (same.message, same.help) == (finding.message, finding.help)
        for name, fact in finding.facts.items():
            assert getattr(same, name) == fact
        assert getattr(same, "why") == RULES[finding.code].why  # noqa: B009
        assert not hasattr(same, "when")


def test_a_missing_backward_is_said_once() -> None:
    (finding,) = schedir.check(schedule(2, "0", "0F0 0B0 0F1 0I1")).diagnostics
    assert (finding.code, finding.locations[0].index) == ("S105", None)


@pytest.mark.parametrize(
    ("placement", "lists", "expected"),
    [
        ("0", ("0F0 0R0 0R0 0B0 0F1 0B1",), ("S104", "rank 0 #2 0R0")),
        ("0", ("0R0 0F0 0B0 0F1 0B1",), ("S214", "rank 0 #0 0R0")),
        ("0", ("0F0 0B0 0R0 0F1 0B1",), ("S215", "rank 0 #1 0B0")),
        ("0", ("0F0 0I0 0R0 0W0 0F1 0B1",), ("S215", "rank 0 #1 0I0")),
        ("0", ("0F0 0R0@1 0B0 0F1 0B1",), ("S408", "rank 0 #1 0R0@1")),
        ("0", ("0F0 0R2 0B0 0F1 0B1",), ("S102", "rank 0 #1 0R2")),
        ("0", ("0F0 0R1 0F1 0B1 0B0",), ("S214", "rank 0 #1 0R1")),
        # One that stands elsewhere is missing where its forward counts on it.
        ("0,1", ("0F0 0B0 0REDUCE_GRAD", "0R0 0F1 0B1 0REDUCE_GRAD"), ("S107", "rank 1 #0 0R0")),
        # Without a backward it is for nothing, without a forward of nothing.
        ("0", ("0F0 0R0 0F1 0B1",), ("S105", "rank 0 0B0")),
        ("0", ("0R0 0B0 0F1 0B1",), ("S105", "rank 0 0F0")),
    ],
)
def test_a_forward_that_runs_again(
    placement: str, lists: tuple[str, ...], expected: tuple[str, str]
) -> None:
    wrong = schedule(2, placement, *lists)
    assert found(wrong) == [expected]
    assert happens(wrong, "edge") == "wrong"


def test_a_version_to_come_is_said_of_the_forward_alone() -> None:
    both = schedule(1, "0", "0F0@3 0R0@3 0B0 0OPTIM_STEP")
    assert found(both) == [("S401", "rank 0 #0 0F0@3")]


def test_versions_agree_by_what_they_have_seen() -> None:
    """The first stage has stepped once, the other twice, after the same microbatches."""
    both = "1B0 1OPTIM_STEP 1B1 1OPTIM_STEP 0B0 0B1 0OPTIM_STEP"
    later = "0F2 1F2 1B2 1OPTIM_STEP 0B2 0OPTIM_STEP"
    (note,) = schedir.check(schedule(3, "0 0", f"0F0 1F0 0F1 1F1 {both} {later}")).diagnostics
    assert note.code == "S216"


def test_a_list_without_steps_is_told_that_the_caller_steps() -> None:
    (finding,) = schedir.check(schedule(1, "0 1", "0F0 0B0", "1F0 1B0")).diagnostics
    assert (finding.code, finding.severity) == ("S213", "note")
    assert str(finding.locations[0]) == "rank 1 #1 1B0"
    # Not where an error is to be fixed first, nor where any stage steps.
    assert [d.code for d in schedir.check(schedule(1, "0", "0B0 0F0")).diagnostics] == ["S201"]
    assert schedir.check(schedule(1, "0", "0F0 0B0 0OPTIM_STEP")).diagnostics == ()


def test_raise_if_errors_carries_the_diagnostics() -> None:
    report = schedir.check(schedule(1, "0", "0B0 0F0"))
    with pytest.raises(schedir.ScheduleError, match="S201 backward-before-forward") as error:
        report.raise_if_errors()
    assert error.value.diagnostics == report.diagnostics


@sweep(
    "shapes",
    [[(1, 1), (2, 3), (3, 2), (5, 8)], [*product(range(1, 7), range(1, 10))]],
    quick=lambda shapes: len(shapes) < 9,
    ids=["few", "many"],
)
@pytest.mark.parametrize("name", NAMES)
def test_built_in_schedules_are_clean_and_without_a_lint_under_every_model(
    name: str, shapes: list[tuple[int, int]]
) -> None:
    for ranks, microbatches in shapes:
        for parameters in (*variants(name), {"chunks": 1}):
            built = schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)
            for channel in CHANNELS:
                report = schedir.check(built, channel)
                assert report.clean_channels == CHANNELS
                assert {d.code for d in report.diagnostics} <= {"S406"}, (parameters, channel)


# The verdict against what happens.


def verdict(checked: Schedule, channel: str) -> bool:
    return schedir.check(checked, channel=channel).ok


def mutate(base: Schedule, chance: random.Random) -> Schedule:
    """One small fault: swap, drop, double or move an action, retarget it, change its version, split
    a backward, run a forward again."""
    rank = chance.choice([r for r, actions in enumerate(base.flat) if actions])
    actions = list(base.flat[rank])
    index = chance.randrange(len(actions))
    action = actions[index]
    how = chance.choice(["swap", "drop", "double", "move", "retarget", "kind", "split", "again"])
    if how == "swap":
        other = chance.randrange(len(actions))
        actions[index], actions[other] = actions[other], actions[index]
    elif how == "drop":
        del actions[index]
    elif how == "double":
        actions.insert(chance.randrange(len(actions) + 1), action)
    elif how == "move":
        actions.insert(chance.randrange(len(actions)), actions.pop(index))
    elif how == "retarget" and action.microbatch is not None:
        actions[index] = attrs.evolve(action, microbatch=chance.randrange(base.microbatches))
    elif how == "kind" and action.kind in NAMES_VERSION:
        actions[index] = attrs.evolve(action, version=chance.randrange(3))
    elif how == "split" and action.kind is Kind.BACKWARD:
        actions[index] = Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch)
        weight = Action(Kind.BACKWARD_WEIGHT, action.stage, action.microbatch)
        actions.insert(chance.randint(index, len(actions)), weight)
    elif how == "again" and action.microbatch is not None:
        again = Action(Kind.RECOMPUTE, action.stage, action.microbatch)
        actions.insert(chance.randint(0, len(actions)), again)
    return edit(base, rank, actions)


BASES = [
    schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)
    for ranks, microbatches in ((2, 2), (2, 3), (3, 2))
    for name in NAMES
    for parameters in variants(name)
    if parameters.get("chunks", 2) == 2
]
BASES += [naive(base) for base in BASES]


def with_steps(base: Schedule, *ending: str) -> Schedule:
    """The schedule with each OPTIM_STEP replaced by other actions of its stage."""
    lists = []
    for actions in base.flat:
        ends = [[parse_action(f"{a.stage}{kind}") for kind in ending] for a in actions]
        pairs = zip(actions, ends, strict=True)
        lists.append([x for a, end in pairs for x in (end if a.kind is Kind.OPTIM_STEP else [a])])
    return Schedule(base.name, base.microbatches, base.placement, lists)


# Without updates, and with a sum over data-parallel ranks before each.
BASES += [with_steps(base) for base in BASES[:10]]
BASES += [with_steps(base, "REDUCE_GRAD", "OPTIM_STEP") for base in BASES[:10]]
BASES.append(schedule(2, "0,1", "0F0 0B0 0REDUCE_GRAD", "0F1 0B1 0REDUCE_GRAD"))
BASES.append(
    schedule(
        4,
        "0,1 2",
        "0F0 0SEND_ACT0 0F2 0SEND_ACT2 0RECV_GRAD0 0B0 0RECV_GRAD2 0B2 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0SEND_ACT1 0F3 0SEND_ACT3 0RECV_GRAD1 0B1 0RECV_GRAD3 0B3 0REDUCE_GRAD 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 "
        "1RECV_ACT2 1F2 1B2 1SEND_GRAD2 1RECV_ACT3 1F3 1B3 1SEND_GRAD3 1OPTIM_STEP",
    )
)
BASES.append(  # backwards in two parts, over two steps
    schedule(
        4,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0I0 0RECV_GRAD1 0I1 0W0 0W1 0OPTIM_STEP "
        "0F2 0SEND_ACT2 0F3 0SEND_ACT3 0RECV_GRAD2 0I2 0RECV_GRAD3 0I3 0W2 0W3 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1I0 1SEND_GRAD0 1RECV_ACT1 1F1 1I1 1SEND_GRAD1 1W0 1W1 1OPTIM_STEP "
        "1RECV_ACT2 1F2 1I2 1SEND_GRAD2 1RECV_ACT3 1F3 1I3 1SEND_GRAD3 1W2 1W3 1OPTIM_STEP",
    )
)
BASES.append(  # forwards that run again: early, in a gap, at the version of their F
    schedule(
        3,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0R0 0RECV_GRAD0 0B0 0OPTIM_STEP 0F2 0SEND_ACT2 0R1@0 "
        "0RECV_GRAD1 0B1 0OPTIM_STEP 0RECV_GRAD2 0B2 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1R0 1I0 1SEND_GRAD0 1W0 1OPTIM_STEP 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 "
        "1OPTIM_STEP 1RECV_ACT2 1F2 1R2 1I2 1SEND_GRAD2 1W2 1OPTIM_STEP",
    )
)
BASES.append(  # and on replicas
    schedule(
        3,
        "0,1 2",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0R1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0REDUCE_GRAD "
        "0OPTIM_STEP",
        "0F2 0SEND_ACT2 0R2 0RECV_GRAD2 0I2 0W2 0REDUCE_GRAD 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1RECV_ACT2 1F2 1R1 1R2 1B1 1SEND_GRAD1 1B2 "
        "1SEND_GRAD2 1OPTIM_STEP",
    )
)


@given(
    base=st.sampled_from(BASES),
    faults=st.integers(0, 2),
    seed=st.integers(0, 1 << 32),
    channel=st.sampled_from(CHANNELS),
)
def test_the_verdict_is_what_happens(base: Schedule, faults: int, seed: int, channel: str) -> None:
    chance = random.Random(seed)
    mutant = base
    for _ in range(faults):
        mutant = mutate(mutant, chance)
    if mutant.is_complete:
        outcome = happens(mutant, channel, seed)
        report = schedir.check(mutant, channel=channel)
        assert report.ok == (outcome == "completes"), (outcome, schedir.dumps(mutant))


def test_the_shortest_cycle_is_found_among_longer_ones() -> None:
    """Three ranks in a ring of blocked sends, and two of them in a shorter one."""
    lowered = naive(schedir.build("1f1b", ranks=3, microbatches=4))
    (finding,) = schedir.check(lowered, channel="pair").errors
    assert len(finding.trace) == 4
    assert {location.rank for location in finding.locations} == {0, 1}
    assert all(location.action.kind in COMMUNICATION for location in finding.locations)
