"""torch's own schedules as a case: what check says of them, with and without `defer_pp_recv`.

The gradients that torch computes with the option on gloo are wrong at exactly the shapes that are
mis-paired here. `pytest tests/test_torch_schedules.py --update-golden` writes the table of the page
on proofs anew.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product, starmap

import pytest

from schedir import CHANNELS, append_steps, check
from schedir.library import load
from tests.pages import DOCS
from tests.test_golden import compare
from tests.torch_schedules import GENERATORS, computed, lowered

MIS_PAIRED = {
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 4),
    ("ScheduleDualPipeV", 4),
}


HEAD = "| torch's schedule | ranks | defer_pp_recv | verdict |\n| --- | --- | --- | --- |\n"


@cache
def codes(name: str, ranks: int, deferred: bool) -> dict[str, set[str]]:
    """The codes of the errors of 8 microbatches, by channel model."""
    schedule = lowered(name, ranks, 8, deferred)
    return {channel: {d.code for d in check(schedule, channel).errors} for channel in CHANNELS}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", GENERATORS)
def test_torchs_schedules(name: str, ranks: int, deferred: bool) -> None:
    found = codes(name, ranks, deferred)
    clean = [channel for channel in CHANNELS if not found[channel]]
    if not deferred:
        assert clean == [*CHANNELS]
    elif (name, ranks) in MIS_PAIRED:
        # By one communicator; by one each for activations and gradients they deadlock.
        codes_of = {model: {"S301" if model == "direction" else "S303"} for model in CHANNELS}
        assert found == codes_of
    else:
        assert {"edge", "async"} <= {*clean}
        assert set[str]().union(*found.values()) == {"S301"}
    if name == "ScheduleInterleaved1F1B" and deferred:
        assert clean == ["edge", "async"]


BUILT_IN = {
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleZBVZeroBubble": "zbv-handcrafted",
    "ScheduleDualPipeV": "dualpipev",
}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12)])
@pytest.mark.parametrize("theirs", BUILT_IN)
def test_the_built_in_schedule_of_each_is_torchs_list(
    theirs: str, ranks: int, microbatches: int
) -> None:
    """Entry by entry, up to the updates, which torch leaves to the caller."""
    ours = load(BUILT_IN[theirs], ranks=ranks, microbatches=microbatches, chunks=2)
    listed = append_steps(computed(theirs, ranks, microbatches))
    assert ours.actions == listed.actions
    assert ours.placement == listed.placement


def row(name: str, ranks: int, deferred: bool) -> str:
    """The verdict in words, as a row of the table."""
    found = codes(name, ranks, deferred)
    stuck = [channel for channel in CHANNELS if found[channel]]
    clean = [channel for channel in CHANNELS if not found[channel]]
    if not stuck:
        verdict = "clean under every model"
    elif clean:
        verdict = f"S301 deadlock under {', '.join(stuck)}; clean under {', '.join(clean)}"
    else:
        verdict = "**S303 mis-paired**: wrong gradients"
    return f"| {name.removeprefix('Schedule')} | {ranks} | {deferred} | {verdict} |\n"


def test_the_page_on_proofs_holds_the_table(request: pytest.FixtureRequest) -> None:
    page = DOCS / "explanation" / "schedules-and-proof.md"
    rows = "".join(starmap(row, product(GENERATORS, (2, 4), (False, True))))
    before, head, after = page.read_text(encoding="utf-8").partition(HEAD)
    assert head
    compare(page, before + head + rows + re.sub(r"\A(\|.*\n)*", "", after), request)
