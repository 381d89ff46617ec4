"""torch.distributed.checkpoint reads a checkpoint without schedir, optimiser and options too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from schedir.training import Checkpoint
from schedir.training.checkpoint.storage import Stored
from tests.pages import DOCS, blocks
from tests.runtime.kit import message_of, random_batches
from tests.training.test_checkpoint import assert_same, built, executor_of, step_plainly

PAGE = DOCS / "how-to" / "checkpoints-in-torch.md"

READER = """
import sys
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint import DefaultLoadPlanner, load
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
)

flat = StateDictOptions(flatten_optimizer_state_dict=True)
for folder in sys.argv[1:]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == one]} for one in (0, 1)]
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    options = get_optimizer_state_dict(model, optimizer, options=flat)
    state = {"model": model.state_dict(), "optimizer": options}
    load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
    torch.save([model.state_dict(), optimizer.state_dict()], folder + ".pt")
assert "schedir" not in sys.modules
"""


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]


def grouped(parameters: Any) -> torch.optim.Optimizer:
    given = list(parameters)
    biases, weights = ([p for p in given if (p.ndim > 1) == matrix] for matrix in (False, True))
    groups: list[dict[str, Any]] = [{"params": biases}, {"params": weights, "lr": 0.3}]
    return torch.optim.AdamW(groups, betas=(0.5, 0.9))


def test_torch_alone_goes_on(tmp_path: Path) -> None:
    """Without their options it keeps its own."""
    folders = {options: str(tmp_path / str(options)) for options in (None, "torch")}
    model = nn.Sequential(*layers())
    optimizer = grouped(model.parameters())
    with executor_of(built("1f1b"), grouped, layers(), in_process=True) as executor:
        for batch in random_batches(2):
            executor.step(batch[0], target=batch[1])
            step_plainly(model, optimizer, batch)
        for options, folder in folders.items():
            Checkpoint(executor, options=options).save(folder)  # type: ignore[arg-type]
    subprocess.run([sys.executable, "-c", READER, *folders.values()], check=True, cwd=tmp_path)
    for options, folder in folders.items():
        weights, state = torch.load(f"{folder}.pt", weights_only=True)
        assert_same(weights, model.state_dict())
        expected = optimizer.state_dict()
        for number, moments in expected["state"].items():
            assert_same(state["state"][number], moments)
        found = [(group["lr"], group["betas"]) for group in state["param_groups"]]
        rates = [(0.001, (0.5, 0.9)), (0.3, (0.5, 0.9))]
        assert found == (rates if options else [(9.0, (0.9, 0.999))] * 2)
    stored, name = Stored(tmp_path / "torch"), "optimizer.param_groups.0.weight.lr"
    assert f"{name} is no tensor" in message_of(stored.read_into, {name: torch.empty(())})
    assert stored.value("training")["step"] == 2
    said = message_of(Checkpoint, model, options="torchtitan")
    assert said == "options must be None or \"torch\", not 'torchtitan'"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchtitan_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the conversion that the page shows."""
    base = pytest.importorskip("torchtitan.components.checkpointer.base")
    utils = pytest.importorskip("torchtitan.components.optimizer.utils")
    monkeypatch.chdir(tmp_path)
    model, other = nn.Sequential(*layers()), nn.Sequential(*layers())
    optimizer = grouped(model.parameters())
    step_plainly(model, optimizer, random_batches(1)[0])
    Checkpoint(model, optimizer, options="torch").save("checkpoint")
    (convert,) = (one.text for one in blocks(PAGE) if one.saved_as == "convert.py")
    exec(compile(convert, str(PAGE), "exec"), {})
    named = [(name, one) for name, one in other.named_parameters()]
    groups = [[one for one in named if (one[1].ndim > 1) == matrix] for matrix in (False, True)]
    resumed = torch.optim.AdamW([{"params": group} for group in groups], lr=9.0)
    utils.init_optim_state(resumed)
    flat = utils.get_flat_optim_state_dict(resumed)
    state = {**base.ModelWrapper(other).state_dict(), "optimizer": flat}
    load(state, checkpoint_id="titan/step-3")
    utils.load_flat_optim_state_dict(resumed, state["optimizer"])
    assert_same(other.state_dict(), model.state_dict())
    assert resumed.param_groups[1]["lr"] == 0.3
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(resumed.state[theirs], optimizer.state[mine])
