"""torch's own schedules train wrong on gloo exactly where check finds a mis-paired transfer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from check_torch import GENERATORS, Verdict, lowered

from schedir import check
from tests.runtime.launch import json_lines, torchrun
from tests.runtime.torch_gradients_worker import CHUNKS

# Measured in double precision: at most 2e-15 where torch is right; where it is wrong at least 2,
# and with another seed 0.7.
RIGHT_BELOW = 1e-9
WRONG_ABOVE = 1e-3


def cases(ranks: int) -> list[dict[str, Any]]:
    """ZBV goes wrong from ranks + 1 microbatches on; torch refuses other counts here and there."""
    return [
        {"schedule": name, "microbatches": microbatches, "deferred": deferred}
        for name in GENERATORS
        for microbatches in sorted({ranks, ranks + 1, 2 * ranks, 6, 8, 12})
        if name != "ScheduleDualPipeV" or microbatches >= CHUNKS * ranks
        for deferred in (False, True)
    ]


def mis_paired(ranks: int, case: dict[str, Any]) -> bool:
    name, microbatches, deferred = case["schedule"], case["microbatches"], case["deferred"]
    schedule = lowered(name, ranks, CHUNKS, microbatches, deferred)
    reports = {"edge": check(schedule, "edge")}
    return Verdict(name, ranks, microbatches, deferred, reports).mis_paired


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_torch_is_wrong_exactly_where_check_says_so(ranks: int) -> None:
    expected = [(case, mis_paired(ranks, case)) for case in cases(ranks)]
    assert {wrong for _, wrong in expected} == {False, True}

    # One launch for all cases; should one of them hang, this ends it before pytest's limit does.
    arguments = ("-m", "tests.runtime.torch_gradients_worker", "--cases", json.dumps(cases(ranks)))
    lines = json_lines(torchrun(ranks, *arguments, timeout=120))

    assert [line["case"] for line in lines] == [case for case, _ in expected]
    contradictions = [
        f"{case}: error {line['error']:.2g}, S303 {'' if wrong else 'not '}reported"
        for line, (case, wrong) in zip(lines, expected, strict=True)
        if not (line["error"] > WRONG_ABOVE if wrong else line["error"] < RIGHT_BELOW)
    ]
    assert not contradictions, "\n".join(contradictions)
