"""torchrun starts a failed training again, and it ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.launch import torchrun
from tests.sweeps import sweep
from tests.training.restarted import STEPS, trained
from tests.training.test_checkpoint import assert_same


@pytest.mark.timeout(280)
@sweep(
    "options",
    [(), ("--async-save",), ("--own-group",), ("--own-group", "--async-save")],
    quick=[("--async-save",)],
    ids=" ".join,
)
def test_a_training_ends_as_if_nothing_had_happened(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """A rank was killed in the first attempt, and another one raised in the second."""
    command = ["--max-restarts", "3", "-m", "tests.training.restarted", str(tmp_path), *options]
    launched = torchrun(2, *command)
    assert launched.returncode == 0, launched.stderr
    found = torch.load(tmp_path / "found")
    expected = trained(None, None, attempt=2)  # in this process alone
    assert found["attempt"] == 2
    assert len(expected["order"]) == STEPS
    assert len(set(expected["order"])) == STEPS
    assert found["order"] == expected["order"]
    assert found["history"] == expected["history"]
    assert_same(found["weights"], expected["weights"])
