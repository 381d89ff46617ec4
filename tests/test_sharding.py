"""Sharded stages: what the pass lists, what is wrong with lists, and what they cost."""

from __future__ import annotations

import random

import attrs
import pytest

import schedir
from schedir import Action, CostModel, Kind, Schedule
from schedir.passes import forward_only
from tests.built_in import EVERY
from tests.oracle import Oracle
from tests.sweeps import sweep

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
ON_SEVERAL = ("1f1b-rr", "chimera", "dualpipe")
QUICK = [(0, None), (1, 1)]
MEANT = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)


def most_gathered(schedule: Schedule, rank: int) -> int:
    held, most = 0, 0
    for action in schedule.flat[rank]:
        held += (action.kind is Kind.UNSHARD) - (action.kind is Kind.RESHARD)
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", [n for n in EVERY if n not in (*ASYNCHRONOUS, *ON_SEVERAL)])
@sweep("ranks", [2, 4], quick=[2])
@sweep(
    "ahead, limit",
    [(0, None), (1, None), (3, None), (1, 1), (0, 2), (2, 2)],
    quick=[(0, None), (1, 1)],
)
def test_a_sharded_list_is_clean_wherever_the_plain_one_is(
    name: str, ranks: int, ahead: int, limit: int | None
) -> None:
    plain = schedir.build(name, ranks=ranks, microbatches=2 * ranks)
    needs = max(len({a.stage for a in getattr(e, "actions", ())}) for r in plain.actions for e in r)
    if limit is not None and needs > limit:
        with pytest.raises(ValueError, match="bytes, but the limit is"):
            schedir.shard(plain, ahead=ahead, limit=0)
        return
    sharded = schedir.shard(plain, ahead=ahead, limit=limit)
    report = schedir.check(sharded)
    assert report.ok, report
    assert report.clean_channels == schedir.check(plain).clean_channels
    assert sharded == schedir.shard(sharded, ahead=ahead, limit=limit)
    assert schedir.loads(schedir.dumps(sharded)) == sharded
    if limit is not None:
        assert max(most_gathered(sharded, rank) for rank in range(sharded.ranks)) <= limit
    rest = [[a for a in own if a.kind not in MEANT] for own in sharded.flat]
    assert rest == [[a for a in own if a.kind not in MEANT] for own in plain.flat]
    assert Oracle(sharded, "async").run() == "completes"
    evaluated = forward_only(sharded)
    assert Oracle(evaluated, "async").run() != "blocks"  # it trains nothing, so not "completes"
    for own in evaluated.flat:  # each gathering is used
        kinds = [(a.stage, a.kind) for a in own if a.kind in (*MEANT, Kind.FORWARD)]
        for stage in {stage for stage, _ in kinds}:
            (first, *then) = [kind for s, kind in kinds if s == stage]
            assert first is Kind.UNSHARD
            assert (Kind.UNSHARD, Kind.RESHARD) not in [*zip([first, *then], then, strict=False)]


def mutant(schedule: Schedule, chance: random.Random) -> Schedule:
    """With one UNSHARD, RESHARD or REDUCE_GRAD left out, doubled or elsewhere."""
    lists = [list(own) for own in schedule.actions]
    places = [
        (rank, at)
        for rank, own in enumerate(lists)
        for at, entry in enumerate(own)
        if isinstance(entry, Action) and entry.kind in MEANT
    ]
    rank, at = chance.choice(places)
    how, own = chance.choice(("drop", "double", "move")), lists[rank]
    entry = own[at]
    if how != "double":
        del own[at]
    if how != "drop":
        own.insert(chance.randrange(len(own) + 1), entry)
    return attrs.evolve(schedule, actions=tuple(map(tuple, lists)), sources=None)


SMALL = ["1f1b", "zb-h1", "interleaved-1f1b", "zbv", "fill-drain"]


@sweep("seed", range(60 * len(SMALL)), quick=range(len(SMALL)))
def test_the_verdict_on_a_wrong_list_is_that_of_a_run(seed: int) -> None:
    chance = random.Random(seed)
    plain = schedir.build(SMALL[seed % len(SMALL)], ranks=2, microbatches=2)
    plain = schedir.shard(plain, ahead=chance.randrange(3), limit=chance.choice((None, 2)))
    for _ in range(5):
        wrong = mutant(plain, chance)
        for channel in ("async", "rank"):
            report = schedir.check(wrong, channel=channel)
            outcomes = {Oracle(wrong, channel, seed=number).run() for number in range(3)}
            assert report.ok == (outcomes == {"completes"}), (schedir.dumps(wrong), report)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP", [("S217", 0)]),
        ("0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD 0OPTIM_STEP", [("S218", 3)]),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", [("S409", 0)]),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP", [("S218", 2)]),
        ("0UNSHARD 0F0 0B0 0RESHARD 0OPTIM_STEP", [("S209", 4)]),
        ("0UNSHARD 0F0@0 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP", [("S410", 1)]),
        ("0UNSHARD 0F0 0I0 0RESHARD 0W0 0REDUCE_GRAD 0OPTIM_STEP", [("S218", 4)]),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0RESHARD", [("S218", 5), ("S409", 0)]),
    ],
)
def test_each_fault_has_its_rule(tokens: str, expected: list[tuple[str, int]]) -> None:
    found = schedir.check(Schedule.of("wrong", [0], [tokens])).diagnostics
    assert sorted((each.code, each.locations[0].index) for each in found) == expected


def test_a_gathering_runs_beside_compute_and_its_user_waits() -> None:
    end = "1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP"
    for gathers, takes in (
        ("0UNSHARD 0F0 1UNSHARD 1F0", 3 + 1 + 3 + 1),  # each F waits for its own
        ("0UNSHARD 1UNSHARD 0F0 1F0", 3 + 1 + 1),
    ):
        schedule = Schedule.of("mine", [0, 0], [f"{gathers} 1B0 {end}"])
        assert schedir.simulate(schedule, CostModel(unshard=3)).makespan == takes + 2 + 2


def test_bytes_of_shards_by_hand() -> None:
    tokens = "0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP"
    costs = CostModel(shard_ways=4, weight_bytes=100, gradient_bytes=80, optimizer_bytes=40)
    line = schedir.simulate(Schedule.of("mine", [0], [tokens]), costs)
    # A quarter of weights and state; all weights; all gradients from the backward on.
    assert line.ranks[0].peak_bytes == 25 + 10 + 100 + 80


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ahead": -1}, "ahead must be"),
        ({"limit": 0.5}, r"needs the weights of stages \[0\] at once, 1 bytes"),
        ({"weight_bytes": [1]}, "one for each of 2 stages"),
        ({"stages": [5]}, "no stage 5 to shard"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schedir.shard(schedir.build("1f1b", ranks=2, microbatches=2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_lists_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="only the newest weights of a sharded stage"):
        schedir.shard(schedir.build(name, ranks=4, microbatches=8))


def test_a_stage_on_several_ranks_is_refused() -> None:
    plain = schedir.build("1f1b-rr", ranks=3, microbatches=2, replicas="2,1")
    with pytest.raises(ValueError, match="stage 0 of 1f1b-rr can't be sharded: ranks 0 and 1 run"):
        schedir.shard(plain)
    assert schedir.check(schedir.without(schedir.shard(plain, [1]), 1)).ok
    lists = ["0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD", "0UNSHARD 0F1 0B1 0RESHARD 0REDUCE_GRAD"]
    (finding,) = schedir.check(Schedule.of("mine", [(0, 1)], lists)).errors
    assert finding.code == "S411"
    assert finding.message == "stage 0 is sharded, but ranks 0, 1 of the list run it"
