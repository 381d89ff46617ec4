"""Executed schedules equal plain training in one process, bit for bit."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.runtime.launch import json_lines, merged, torchrun
from tests.runtime.parity_worker import differences

RANKS = (1, 2, 3, 4)


def cases(ranks: int) -> list[dict[str, Any]]:
    """Microbatches below, at and above the ranks, odd ones too: powers of two hide scale errors."""
    found = []
    for microbatches in sorted({1, 3, ranks, 2 * ranks + 1}):
        shape = {"ranks": ranks, "microbatches": microbatches}
        synchronous = [
            ("fill-drain", shape),
            ("fill-drain", {**shape, "order": "descending"}),
            ("1f1b", shape),
            ("interleaved-1f1b", {**shape, "chunks": 2}),
            ("interleaved-1f1b", {**shape, "chunks": 3}),
        ]
        found += [
            {"name": name, "build": build, "optimizer": "adamw", "reference": "accumulate"}
            for name, build in synchronous
        ]
        found += [
            {
                "name": "pipedream",
                "build": {**shape, "vertical_sync": sync},
                "optimizer": optimizer,
                "reference": "pipedream",
            }
            for sync in (False, True)
            for optimizer in ("momentum", "adam")
        ]
    return found


@cache
def results(ranks: int) -> dict[str, list[str]]:
    """All cases of one number of ranks, in a single launch: starting processes is what costs."""
    module = "tests.runtime.parity_worker"
    done = json_lines(torchrun(ranks, "-m", module, "--cases", json.dumps(cases(ranks))))
    return merged(ranks, done, "case", "differs")


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, json.dumps(case)) for ranks in RANKS for case in cases(ranks)],
)
def test_training_equals_one_process(ranks: int, case: str) -> None:
    assert results(ranks)[case] == []


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, json.dumps(case)) for ranks in (2, 3, 5) for case in cases(ranks)],
)
def test_all_ranks_in_one_process_equal_plain_training(ranks: int, case: str) -> None:
    assert differences(None, json.loads(case)) == []
