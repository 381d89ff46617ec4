"""torch's own schedules as a case: what check says of them, with and without `defer_pp_recv`.

The gradients that torch computes with the option on gloo are wrong at exactly the shapes that are
mis-paired here.
"""

from __future__ import annotations

import pytest
from check_torch import Verdict, computed, table, verdicts

from schedir import CHANNELS, append_steps
from schedir.library import load
from tests.pages import DOCS

MIS_PAIRED = {
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 4),
    ("ScheduleDualPipeV", 4),
}


@pytest.mark.parametrize(
    "verdict", list(verdicts()), ids=lambda v: f"{v.name}-{v.ranks}-{v.deferred}"
)
def test_torchs_schedules(verdict: Verdict) -> None:
    if not verdict.deferred:
        assert verdict.clean == CHANNELS
    elif (verdict.name, verdict.ranks) in MIS_PAIRED:
        assert verdict.mis_paired
        assert not verdict.clean
    else:
        assert {"edge", "async"} <= set(verdict.clean)
        codes = {d.code for report in verdict.reports.values() for d in report.errors}
        assert codes == {"S301"}
    if verdict.name == "ScheduleInterleaved1F1B" and verdict.deferred:
        assert verdict.clean == ("edge", "async")


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
    listed = append_steps(computed(theirs, ranks, 2, microbatches))
    assert ours.actions == listed.actions
    assert ours.placement == listed.placement


def test_the_page_on_proofs_holds_the_table() -> None:
    page = DOCS / "explanation" / "schedules-and-proof.md"
    assert table() in page.read_text(encoding="utf-8")
