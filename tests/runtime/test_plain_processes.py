"""Without torchrun: where a process can't make its executor, the others end soon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launch import ROOT
from tests.sweeps import long

# Forked, so that all come at the same time.
SCRIPT = """
import os, sys, schedir
from torch import nn
from schedir.runtime import Executor
schedule = schedir.build("1f1b", ranks=3, microbatches=4)
rank = next((rank for rank in range(3) if not os.fork()), None)
if rank is None:
    sys.exit(sum(os.wait()[1] == 256 for _ in range(3)))
os.environ["RANK"] = str(rank)
os.dup2(os.open(str(rank), os.O_CREAT | os.O_WRONLY), 2)
stages = {} if rank == int(sys.argv[1]) else {rank: nn.Linear(4, 4)}
Executor(schedule, stages, nn.functional.mse_loss).close()
"""


@pytest.mark.timeout(100)
@long
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_with_wrong_stages_ends_all(wrong: int, tmp_path: Path) -> None:
    """Rank 0 has the store, and takes it along."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    outer = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(wrong)],
        cwd=tmp_path,
        env={**outer, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=90,
    )
    assert found.returncode == 3
    root = f"rank {wrong} holds stages [{wrong}], but modules were given for []"
    for rank in range(3):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        assert root in lines[-1], lines
        assert rank == wrong or len(lines) == 1, lines
