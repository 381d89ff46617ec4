"""On a GPU: all ranks in one process, each on a stream of its own, equal plain training.

Runs wherever a GPU is visible. tools/gpu_hour.py does the same with a process per rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from on_gpu.memory import FEW, MANY, SLACK, peak

from tests.runtime.features import FEATURES, Setting, check
from tests.runtime.parity import Case, assert_trains_as_one_process, cases

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]

ALONE = [name for name, make in FEATURES.items() if make().pipelines == 1]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Products are the same on every stream."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in (2, 4) for case in cases(ranks)], ids=str
)
def test_streams_in_one_process_equal_plain_training(ranks: int, case: Case) -> None:
    assert_trains_as_one_process(case, None, "cuda:0")


@pytest.mark.parametrize("width", [6, 1024])
@pytest.mark.parametrize("name", ALONE)
def test_so_does_every_feature(name: str, width: int) -> None:
    check(name, Setting(device="cuda:0", rows=width, width=width))


@pytest.mark.parametrize("name", [n for n in ALONE if "scaler" not in FEATURES[n]().options])
def test_no_step_has_the_host_wait(name: str) -> None:
    check(name, Setting(device="cuda:0", reads=False))


def test_the_peak_of_a_step_does_not_grow_with_its_microbatches() -> None:
    few, many = (peak("cuda:0", microbatches, steps=5, rows=1024) for microbatches in (FEW, MANY))
    assert many <= SLACK * few
