"""`from_torch`: torch's schedules as schedir's, beside the text that torch writes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir import Kind, LoadError, from_torch
from schedir.ir import COMMUNICATION, GATHERS, RELEASES, loads_torch_csv
from tests.torch_schedules import GENERATORS, dumped, made, written

GROUPS = GATHERS | RELEASES | {Kind.REDUCE_GRAD}


def single(name: str, ranks: int = 2, microbatches: int = 4) -> Any:
    """A schedule of torch's with one stage on each rank."""
    stage = SimpleNamespace(
        num_stages=ranks, stage_index=0, is_last=False, has_backward=True, submod=None
    )
    return getattr(torch_schedules, name)(stage, microbatches, loss_fn=lambda *_: None)


def listed(schedule: schedir.Schedule, *but: Kind) -> list[list[Any]]:
    """The entries of each rank, without some kinds."""
    return [
        [one for one in own if not (isinstance(one, schedir.Action) and one.kind in but)]
        for own in schedule.actions
    ]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_list_is_torchs(name: str) -> None:
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8)):
        found = from_torch(getattr(torch_schedules, name), ranks=ranks, microbatches=microbatches)
        theirs = loads_torch_csv(written(made(name, ranks, microbatches).pipeline_order))
        assert schedir.check(found).ok
        assert listed(found, Kind.OPTIM_STEP) == listed(theirs)
        assert found.placement == theirs.placement
        assert found == from_torch(made(name, ranks, microbatches))
    theirs = made(name, 2, 4)
    whole = loads_torch_csv(dumped(name, 2, 4), keeps_gathers=True)
    found = from_torch(theirs, communication=True, gathers="theirs", steps=False)
    assert found.actions == whole.actions
    assert listed(from_torch(theirs, steps=False)) == listed(whole, *COMMUNICATION, *GROUPS)
    some = from_torch(theirs, gathers=[1])
    kept = {(one.kind, one.stage) for own in some.flat for one in own if one.kind in GROUPS}
    assert kept == {(kind, 1) for kind in GROUPS}
    assert schedir.check(some).ok


def test_a_class_takes_a_number_of_chunks() -> None:
    theirs = torch_schedules.ScheduleInterleaved1F1B
    assert from_torch(theirs, ranks=4, microbatches=8, chunks=3).stages == 12


@pytest.mark.parametrize(
    ("name", "ours"), [("Schedule1F1B", "1f1b"), ("ScheduleGPipe", "fill-drain")]
)
def test_loops_are_made_by_their_class(name: str, ours: str) -> None:
    built = schedir.build(ours, ranks=2, microbatches=4)
    found = from_torch(single(name))
    assert listed(found) == listed(built, *COMMUNICATION)
    assert found == from_torch(getattr(torch_schedules, name), ranks=2, microbatches=4)
    assert listed(from_torch(single(name), steps=False)) == listed(found, Kind.OPTIM_STEP)
    sharded = from_torch(single(name), gathers=[0])
    assert sharded == schedir.shard(found, [0])


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: 3, {}, "this int has no list"),
    (lambda: "1f1b", {}, "this str has no list"),
    (lambda: single("_ScheduleForwardOnly"), {}, "_ScheduleForwardOnly has no list"),
    (lambda: single("Schedule1F1B"), {"ranks": 2}, "ranks= can only be given with a class"),
    (lambda: single("Schedule1F1B"), {"gathers": "all"}, "a collection of stages or 'theirs'"),
    (lambda: torch_schedules.Schedule1F1B, {}, "needs ranks= and microbatches="),
    (
        lambda: torch_schedules.Schedule1F1B,
        {"ranks": 2, "microbatches": 4, "chunks": 2},
        "it has one stage on each rank",
    ),
    (
        lambda: torch_schedules.ScheduleInterleaved1F1B,
        {"ranks": 2, "microbatches": 0},
        "microbatches must be an int >= 1, not 0",
    ),
    (
        lambda: torch_schedules.ScheduleZBVZeroBubble,
        {"ranks": 2, "microbatches": 4, "chunks": 3},
        "can't be made of 2 ranks, 4 microbatches and 3 chunks",
    ),
    (lambda: dict, {"ranks": 2, "microbatches": 4}, "dict can't be made of"),
]


def test_what_is_no_schedule_of_torchs_is_refused() -> None:
    for made_of, options, said in REFUSED:
        with pytest.raises(LoadError, match=said):
            from_torch(made_of(), **options)
