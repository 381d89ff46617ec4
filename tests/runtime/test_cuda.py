"""On a GPU: all ranks in one process, each on a stream of its own, equal plain training.

Runs wherever a GPU is visible. tools/probe_nccl.py does the same with a process per rank.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.runtime.parity_worker import differences
from tests.runtime.test_parity import cases

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, json.dumps(case)) for ranks in (2, 4) for case in cases(ranks)]
)
def test_streams_in_one_process_equal_plain_training(ranks: int, case: str) -> None:
    assert differences(None, json.loads(case), "cuda:0") == []
