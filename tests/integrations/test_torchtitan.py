"""torchtitan's trainer with schedir's executor, bit for bit; where torchtitan is installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.long
SCRIPT = Path(__file__).with_name("torchtitan_run.py")


def losses(processes: int, **given: Any) -> list[float]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node", str(processes), str(SCRIPT), json.dumps({"steps": 10} | given)]
    said = subprocess.run(run, capture_output=True, text=True, timeout=240, check=False)
    found = [line for line in said.stdout.splitlines() if line.startswith("LOSSES ")]
    assert found, said.stdout + said.stderr
    read: list[float] = json.loads(found[0].removeprefix("LOSSES "))
    return read


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_checkpoint_of_either_resumes_in_the_other(fsdp: int, tmp_path: Path) -> None:
    """Clipping and the chunked loss are torchtitan's defaults; each second step is validated."""
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    parallel = {"data_parallel_shard_degree": fsdp}
    plain = losses(2 * fsdp, parallel=parallel, folder=theirs)
    assert len(plain) == 10 + 6
    assert losses(2 * fsdp, parallel=parallel, folder=ours, schedir=None) == plain
    going_on: dict[str, Any] = {"parallel": parallel, "from": 5}
    assert losses(2 * fsdp, folder=ours, **going_on) == plain[-5 - 3 :]
    assert losses(2 * fsdp, folder=theirs, schedir=None, **going_on) == plain[-5 - 3 :]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dimension", ["tensor_parallel", "data_parallel_replicate"])
def test_it_trains_alike_in_two_dimensions(dimension: str) -> None:
    given: dict[str, Any] = {"steps": 3, "parallel": {f"{dimension}_degree": 2}}
    assert losses(4, **given, schedir=None) == losses(4, **given)


@pytest.mark.timeout(600)
def test_compiled_blocks_train_alike_by_another_schedule() -> None:
    given: dict[str, Any] = {"steps": 3, "compile": True}
    assert losses(2, **given, schedir="zb") == losses(2, **given)


@pytest.mark.timeout(600)
def test_schedules_of_torchs_placement_train_alike() -> None:
    """With torch's own runtime, ZBV and the chunked loss train on other gradients: the loss is not
    chunked there."""
    given: dict[str, Any] = {"schedule": "ZBVZeroBubble", "steps": 4}
    plain = losses(2, **given, chunked=False)
    for name in (None, "v-half", "hanayo"):
        assert losses(2, **given, schedir=name) == plain
