"""torchrun starts a failed training again, and it ends as if nothing had happened."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.kit import linear_stages, random_batches
from tests.runtime.launch import IMPORTABLE, ROOT, end, torchrun
from tests.sweeps import long, sweep
from tests.training import elastic
from tests.training.restarted import STEPS, trained
from tests.training.test_checkpoint import assert_same, step_plainly


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
    assert_same(found.pop("weights"), expected.pop("weights"))
    assert found == {"attempt": 2, **expected}
    assert len(set(expected["order"])) == len(expected["order"]) == STEPS


@long
@pytest.mark.timeout(280)
def test_after_the_loss_of_a_node_a_training_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORTABLE}

    def started(is_host: int, said: int, **env: str) -> subprocess.Popen[str]:
        conf = ["--rdzv-conf", f"is_host={is_host},last_call_timeout=10"]
        script = [*command, *conf, "-m", "tests.training.elastic", str(tmp_path)]
        options: Any = {"cwd": ROOT, "text": True, "start_new_session": True, "env": own | env}
        return subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=said, **options)

    nodes = [started(1, subprocess.PIPE), started(0, subprocess.DEVNULL, LOST="1")]
    try:
        _, said = nodes[0].communicate(timeout=250)
    finally:
        for node in nodes:
            end(node)
    assert nodes[0].returncode == 0, said
    assert "launcher gone" in said
    found = torch.load(tmp_path / "found")
    assert found["ranks"] == 2

    model = nn.Sequential(*linear_stages(4))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in random_batches(elastic.STEPS):
        step_plainly(model, optimizer, batch)
    assert_same(found["weights"], model.state_dict())
