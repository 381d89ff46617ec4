"""On a GPU: all ranks in one process, each on a stream of its own, equal plain training.

Runs wherever a GPU is visible. tools/probe_nccl.py does the same with a process per rank.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.parity import Case, assert_trains_as_one_process, cases

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in (2, 4) for case in cases(ranks)], ids=str
)
def test_streams_in_one_process_equal_plain_training(ranks: int, case: Case) -> None:
    assert_trains_as_one_process(case, None, "cuda:0")
