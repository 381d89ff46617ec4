"""The moves that help lines propose do fix the fault, and the limits and lints say what is so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, Kind, Schedule
from schedir.checker import CHANNELS, Batch, Change, Diagnostic, LeaveOut, Move, changed
from schedir.ir import COMMUNICATION, RECEIVES
from tests.oracle import happens
from tests.sweeps import sweep
from tests.test_check import BASES, edit, mutate, schedule


def about(finding: Diagnostic) -> tuple[object, ...]:
    """What a finding is about, however much is wrong there."""
    places = finding.locations
    if finding.code == "S301":
        return (finding.code,)
    if finding.code == "S303":
        return finding.code, places[0].rank, places[1].rank
    return finding.code, places[0].rank, places[0].action


def errors(checked: Schedule, channel: str) -> Counter[tuple[object, ...]]:
    return Counter(map(about, schedir.check(checked, channel).errors))


@given(
    base=st.sampled_from(BASES),
    faults=st.integers(1, 2),
    seed=st.integers(0, 1 << 32),
    channel=st.sampled_from(CHANNELS),
)
def test_every_proposed_move_fixes(base: Schedule, faults: int, seed: int, channel: str) -> None:
    chance = random.Random(seed)
    mutant = base
    for _ in range(faults):
        mutant = mutate(mutant, chance)
    report = schedir.check(mutant, channel)
    for finding in report.diagnostics:
        if finding.change is not None:
            assert (finding.help or "").startswith(str(finding.change))
        if finding.change is not None and finding.tried:
            fixed = changed(mutant, finding.change)
            after = schedir.check(fixed, channel)
            if finding.severity == "error":
                assert errors(fixed, channel) <= errors(mutant, channel) - Counter([about(finding)])
                assert after.ok or len(report.errors) > 1
            else:
                assert after.ok
                assert (finding.code, finding.message) not in {
                    (d.code, d.message) for d in after.diagnostics
                }


# Sends, receives and what else is displaced, against brute force over all single moves.


def displaced(base: Schedule, kinds: Iterable[Kind], many: int, chance: random.Random) -> Schedule:
    """Some actions of these kinds moved to anywhere in their lists."""
    lists = [list(actions) for actions in base.flat]
    for _ in range(many):
        rank, index = chance.choice(
            [(r, i) for r, own in enumerate(lists) for i, a in enumerate(own) if a.kind in kinds]
        )
        action = lists[rank].pop(index)
        lists[rank].insert(chance.randrange(len(lists[rank]) + 1), action)
    return Schedule(base.name, base.microbatches, base.placement, lists)


def single_moves(base: Schedule) -> Iterator[Schedule]:
    for rank, actions in enumerate(base.flat):
        for index, action in enumerate(actions):
            others = [*actions[:index], *actions[index + 1 :]]
            for to in range(len(actions)):
                if to != index:
                    yield edit(base, rank, [*others[:to], action, *others[to:]])


SMALL = [base for base in BASES if sum(map(len, base.flat)) <= 24 and base.is_complete]
CROSSED = [
    # The sums of two replicated stages, with their steps after both, and after each.
    schedule(
        2,
        "0,1 0,1",
        "0F0 1F0 1B0 0B0 1REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP",
        "0F1 1F1 1B1 0B1 1REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP",
    ),
    schedule(
        2,
        "0,1 0,1",
        "0F0 1F0 1B0 1REDUCE_GRAD 1OPTIM_STEP 0B0 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 1F1 1B1 0B1 1REDUCE_GRAD 1OPTIM_STEP 0REDUCE_GRAD 0OPTIM_STEP",
    ),
]


@sweep("seed", range(60), quick=range(15))
@pytest.mark.parametrize(
    ("bases", "kinds"),
    [(SMALL, COMMUNICATION), (CROSSED, {Kind.REDUCE_GRAD}), ([*SMALL, *CROSSED], set(Kind))],
    ids=["communication", "sums", "anything"],
)
def test_what_a_single_move_fixes_is_offered_one(
    bases: list[Schedule], kinds: Iterable[Kind], seed: int
) -> None:
    chance = random.Random(seed)
    channel = chance.choice(CHANNELS)
    wrong = displaced(chance.choice(bases), kinds, chance.randint(1, 3), chance)
    found = schedir.check(wrong, channel).errors
    if len(found) == 1:  # of several, each may need its own
        change = found[0].change
        if found[0].tried and not isinstance(change, Batch | LeaveOut | None):
            assert happens(changed(wrong, change), channel) == "completes"
        else:
            better = (x for x in single_moves(wrong) if happens(x, channel) == "completes")
            assert next(better, None) is None, (found[0].help, schedir.dumps(wrong))


@sweep("seed", range(40), quick=range(12))
def test_advice_that_is_followed_leads_to_a_clean_list(seed: int) -> None:
    chance = random.Random(seed)
    channel = chance.choice(CHANNELS)
    wrong = displaced(chance.choice(BASES[:20]), COMMUNICATION, chance.randint(1, 6), chance)
    seen = set()
    while not (report := schedir.check(wrong, channel)).ok:
        assert wrong not in seen
        seen.add(wrong)
        first = report.errors[0].change
        assert first is not None, (report.errors[0], schedir.dumps(wrong))
        wrong = changed(wrong, first)


def test_advice_followed_on_both_ranks_at_once_pairs_no_channel_wrongly_for_good() -> None:
    """Each of two channels has its own finding; all of their help is followed in one go."""
    wrong = schedule(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD1 0RECV_GRAD0 0B0 0B1",
        "1RECV_ACT1 1RECV_ACT0 1F0 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1",
    )
    found = schedir.check(wrong, "rank").errors
    assert [d.code for d in found] == ["S303", "S303"]
    for finding in found:
        assert isinstance(finding.change, Move)
        wrong = changed(wrong, finding.change)
    assert schedir.check(wrong, "rank").ok


@sweep("ranks", [2, 8], quick=[2])
def test_trials_and_findings_in_words_are_few_however_much_is_wrong(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = schedir.build("1f1b", ranks=ranks, microbatches=3000)
    chance = random.Random(0)
    lists = []
    for actions in base.flat:
        places = [i for i, a in enumerate(actions) if a.kind in RECEIVES]
        order = dict(zip(places, chance.sample(places, len(places)), strict=True))
        lists.append([actions[order.get(i, i)] for i in range(len(actions))])
    wrong = Schedule("shuffled", 3000, base.placement, lists)
    tried = 0

    def counted(judged: Schedule, change: Change) -> Schedule:
        nonlocal tried
        tried += 1
        return changed(judged, change)

    monkeypatch.setattr(import_module("schedir.checker.run"), "changed", counted)
    report = schedir.check(wrong)
    # A trial costs as much as the list is long, and the last is without any communication.
    assert 2 <= tried <= 400_000 // len(wrong.columns) + 1
    assert len(report.diagnostics) <= 4000 + 2 * ranks
    assert sum(1 + each.more for each in report.diagnostics) > 2900
    assert {str(d.change) for d in report.errors if isinstance(d.change, LeaveOut)}


FIXED = {
    # One fault each, which a single move fixes.
    "S201": ("0", "0B0 0F0"),
    "S202": ("0", "0F0 0W0 0I0"),
    "S203": ("0 0", "0F0 1F0 0B0 1B0"),
    "S204": ("0", "0F0 0OPTIM_STEP 0B0"),
    "S208": ("0", "0F0 0REDUCE_GRAD 0B0 0OPTIM_STEP"),
    "S301": ("0 1", "0F0 0RECV_GRAD0 0SEND_ACT0 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0"),
    "S304": ("0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1F0 1RECV_ACT0 1B0 1SEND_GRAD0"),
    "S305": ("0 1", "0SEND_ACT0 0F0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0 1SEND_GRAD0"),
}


@pytest.mark.parametrize("code", FIXED)
def test_a_single_move_is_found(code: str) -> None:
    broken = schedule(1, *FIXED[code])
    found = {d.code: d for d in schedir.check(broken, "rank").errors}
    assert code in found
    change = found[code].change
    assert found[code].help == str(change)
    assert isinstance(change, Move)
    assert schedir.check(changed(broken, change), "rank").ok


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_swapped_ends_of_a_channel_are_swapped_back(rank: int, other: int) -> None:
    base = schedir.build("fill-drain", ranks=2, microbatches=3)
    lists = [list(actions) for actions in base.flat]
    kind = Kind.SEND_ACT if rank == 0 else Kind.RECV_ACT
    first, _, third = (i for i, a in enumerate(lists[rank]) if a.kind is kind)
    lists[rank][first], lists[rank][third] = lists[rank][third], lists[rank][first]
    report = schedir.check(Schedule("swapped", 3, base.placement, lists), "async")
    assert {d.code for d in report.errors} <= {"S303", "S304", "S305"}


# The limits, against brute force.


def delays(built: Schedule) -> dict[tuple[int, int], int]:
    """By (stage, microbatch): the updates between the version read and the one applied to."""
    found = {}
    for actions in built.flat:
        done: Counter[int] = Counter()
        read: dict[tuple[int, int | None], int] = {}
        waiting: dict[int, list[int]] = {}
        for action in actions:
            stage = action.stage
            if action.kind is Kind.FORWARD:
                newest = done[stage] if action.version is None else action.version
                read[stage, action.microbatch] = newest
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                waiting.setdefault(stage, []).append(action.microbatch or 0)
            elif action.kind is Kind.OPTIM_STEP:
                for m in waiting.pop(stage, []):
                    found[stage, m] = done[stage] - read[stage, m]
                done[stage] += 1
    return found


def worst(built: Schedule) -> dict[int, int]:
    by_stage: dict[int, int] = {}
    for (stage, _), delay in delays(built).items():
        by_stage[stage] = max(by_stage.get(stage, 0), delay)
    return by_stage


@pytest.mark.parametrize("parameters", [{}, {"vertical_sync": True}])
@pytest.mark.parametrize("limit", range(4))
def test_delays_above_the_limit(parameters: dict[str, bool], limit: int) -> None:
    built = schedir.build("pipedream", ranks=4, microbatches=8, **parameters)
    found = [d for d in schedir.check(built, max_delay=limit).errors if d.code == "S403"]
    expected = {stage: delay for stage, delay in worst(built).items() if delay > limit}
    assert {d.locations[0].action.stage for d in found} == set(expected)
    for finding in found:
        stage = finding.locations[0].action.stage
        assert f" {expected[stage]} updates late; the limit is {limit}" in finding.message


def test_versions_and_activations_above_the_limit() -> None:
    built = schedir.build("pipedream", ranks=4, microbatches=8)
    line = schedir.simulate(built)
    for limit in range(1, 5):
        report = schedir.check(built, max_versions=limit, max_activations=limit)
        over = [r.rank for r in line.ranks if r.weight_versions > limit]
        assert [d.locations[0].rank for d in report.errors if d.code == "S404"] == over
        over = [r.rank for r in line.ranks if r.peak_activations > limit]
        assert [d.locations[0].rank for d in report.errors if d.code == "S405"] == over


@pytest.mark.parametrize("name", ["max_delay", "max_versions", "max_activations"])
@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_limits_are_whole_numbers(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an int"):
        schedir.check(BASES[0], **{name: value})  # type: ignore[arg-type]


# The lints.


def test_lints_on_compute_are_located_as_it_was_given() -> None:
    given = schedule(1, "0 1", "0F0 0I0 0W0", "1F0 1I0 1W0")
    report = schedir.check(given)
    # Stage 1's input gradient leaves before its W, which is what the split is for.
    assert [[str(p) for p in d.locations] for d in report.diagnostics if d.code == "S503"] == [
        ["rank 0 #1 0I0", "rank 0 #2 0W0"]
    ]


def test_one_version_for_all_stages_is_no_note() -> None:
    for vertical_sync in (False, True):
        built = schedir.build("pipedream", ranks=3, microbatches=4, vertical_sync=vertical_sync)
        codes = [d.code for d in schedir.check(built).diagnostics]
        assert codes == ([] if vertical_sync else ["S406"])


def test_the_columns_hold_the_actions() -> None:
    lists = [[schedir.forward(0, 3, 2), schedir.backward(0, 3)], [], [schedir.optim_step(1)]]
    built = Schedule("columns", 4, [0, 2], lists)
    assert built.flat == tuple(map(tuple, lists))
    assert built == Schedule("columns", 4, [0, 2], built.columns)
    assert hash(built) == hash(Schedule("columns", 4, [0, 2], [list(a) for a in lists]))
    assert built != Schedule("columns", 4, [0, 2], [lists[0], lists[2], []])
    with pytest.raises(TypeError, match="rank 0 #1 is not an Action but '0F0'"):
        Schedule("columns", 4, [0], [[Action(Kind.FORWARD, 0, 0), "0F0"]])  # type: ignore[list-item]
