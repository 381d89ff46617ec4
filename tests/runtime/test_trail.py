"""How long a host waits for what it can only look at, and what it says where that is in vain."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch
from torch import nn

import schedir
from schedir.runtime import Executor
from schedir.runtime.accelerator import Host
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.patience import Patience
from tests.runtime.kit import MSE, sgd

SECOND = timedelta(seconds=1)


def test_patience_ends_when_it_is_done() -> None:
    looks = iter([False, False, True])
    Patience(SECOND, lambda: False).until(lambda: next(looks), lambda: "nothing")
    assert next(looks, None) is None


def test_patience_ends_with_the_timeout() -> None:
    with pytest.raises(WaitError) as stalled:
        Patience(SECOND / 100, lambda: False).until(lambda: False, lambda: "0RECV_GRAD0")
    assert (stalled.value.what, stalled.value.timed_out) == ("0RECV_GRAD0", True)


@pytest.mark.timeout(20)
def test_patience_ends_when_another_process_has_failed() -> None:
    with pytest.raises(WaitError, match="another process has failed") as stalled:
        Patience(1000 * SECOND, lambda: True).until(lambda: False, lambda: "0RECV_GRAD0")
    assert (stalled.value.what, stalled.value.timed_out) == ("0RECV_GRAD0", False)


@pytest.mark.parametrize("closes", [False, True])
def test_leaving_waits_for_the_device(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a close as well; all of it, not the stream that is current by then."""
    waited = []
    monkeypatch.setattr(Host, "synchronize", lambda self: waited.append(self.device))
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages: dict[int, nn.Module] = {s: nn.Linear(4, 4) for s in range(2)}
    executor = Executor(schedule, stages, MSE, sgd, in_process=True)
    executor.step(torch.zeros(2, 4), target=torch.zeros(2, 4))
    if closes:
        executor.close()
    del executor
    gc.collect()
    assert waited == [torch.device("cpu")] * (not closes)
