"""On a GPU: all ranks in one process, each on a stream of its own, equal plain training.

Runs wherever a GPU is visible. tools/probe_nccl.py does the same with a process per rank.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import schedir
from tests.runtime.parity_worker import OPTIMIZERS, differences
from tests.runtime.test_parity import cases

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, json.dumps(case)) for ranks in (2, 4) for case in cases(ranks)]
)
def test_streams_in_one_process_equal_plain_training(ranks: int, case: str) -> None:
    wanted: dict[str, Any] = json.loads(case)
    schedule = schedir.build(wanted["name"], **wanted["build"])
    assert not differences(
        None,
        schedule,
        OPTIMIZERS[wanted["optimizer"]],
        wanted["reference"],
        wanted["build"].get("vertical_sync", False),
        "cuda:0",
    )
