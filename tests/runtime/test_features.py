"""Every feature on the CPU: in one process, on ranks, and as on a device, over NCCL's stand-in."""

from __future__ import annotations

import pytest

from schedir.runtime import plan
from tests.runtime.features import FEATURES, Setting, check
from tests.runtime.nccl_over_gloo import nccl_over_gloo
from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.queueing import Queueing
from tests.sweeps import sweep

ALONE = [name for name, make in FEATURES.items() if make().pipelines == 1]
OVER_NCCL = {"ties and clipping", "weight versions", "split backward", "batches"}
OVER_NCCL |= {"ties of replicas"}
PROCESSES = [(make().processes, name) for name, make in FEATURES.items()]


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name: str) -> None:
    check(name, Setting())


@sweep("name", ALONE, quick=lambda name: "traced" not in name)
def test_in_one_process_with_buffers_that_are_used_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "accelerator_of", Queueing)
    check(name, Setting())


@sweep("ranks, name", PROCESSES, quick=lambda case: "traced" not in case[1], ids=name_of)
@on_ranks()
def test_on_ranks(rank: int, ranks: int, name: str) -> None:
    check(name, Setting(rank=rank))


@sweep("ranks, name", PROCESSES, quick=lambda case: case[1] in OVER_NCCL, ids=name_of)
@on_ranks()
def test_over_nccl(rank: int, ranks: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "accelerator_of", Queueing)
    with nccl_over_gloo():
        check(name, Setting(rank=rank))
