"""Every feature on the CPU: in one process, on ranks, and with memory handled as on a device."""

from __future__ import annotations

import pytest

from schedir.runtime import plan
from tests.runtime.features import FEATURES, Setting, check
from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.queueing import Queueing

ALONE = [name for name, make in FEATURES.items() if make().fits_one_process]
PROCESSES = [(make().processes, name) for name, make in FEATURES.items()]


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name: str) -> None:
    check(name, Setting())


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process_with_buffers_that_are_used_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "accelerator_of", Queueing)
    check(name, Setting())


@pytest.mark.parametrize(("ranks", "name"), PROCESSES, ids=name_of)
@on_ranks()
def test_on_ranks(rank: int, ranks: int, name: str) -> None:
    check(name, Setting(rank=rank))
