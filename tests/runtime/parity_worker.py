"""Run by torchrun: trains with schedules and in one process, and compares bit for bit.

Every rank prints one JSON line per case: {"case": …, "differs": [what, …]}.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.runtime.reference import accumulate, pipedream

STEPS = 5
WIDTH = 6


def make_stages(number: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)]


def batches(microbatches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    rows = 3 * microbatches
    return [
        (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randn(rows, WIDTH, generator=generator),
        )
        for _ in range(STEPS)
    ]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


OPTIMIZERS = {"adamw": adamw, "adam": adam, "momentum": momentum}


def last_backwards(schedule: schedir.Schedule) -> list[int]:
    """The order of the loss stage's backwards."""
    last = schedule.stages - 1
    (rank,) = schedule.placement[last]
    return [
        action.microbatch
        for action in schedule.actions[rank]
        if action.kind is schedir.Kind.BACKWARD
        and action.stage == last
        and action.microbatch is not None
    ]


def differences(rank: int | None, case: Any, device: str = "cpu") -> list[str]:
    """What differs on a rank, or, where that is None, with all ranks in this process."""
    schedule = schedir.build(case["name"], **case["build"])
    optimizer = OPTIMIZERS[case["optimizer"]]
    whole = [stage.to(device) for stage in make_stages(schedule.stages)]
    here = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    local = {s: copy.deepcopy(whole[s]) for s in here}
    found: list[str] = []
    data = [(x.to(device), y.to(device)) for x, y in batches(schedule.microbatches)]
    loss_fn = nn.functional.mse_loss
    with Executor(schedule, local, loss_fn, optimizer, in_process=rank is None) as executor:
        optimizers = [optimizer(stage.parameters()) for stage in whole]
        for step, (x, y) in enumerate(data):
            result = executor.step(x, target=y)
            pieces = list(
                zip(
                    torch.tensor_split(x, schedule.microbatches),
                    torch.tensor_split(y, schedule.microbatches),
                    strict=True,
                )
            )
            if case["reference"] == "pipedream":
                sync = case["build"]["vertical_sync"]
                expected = pipedream(whole, loss_fn, optimizers, pieces, sync)
            else:
                expected = accumulate(whole, loss_fn, optimizers, pieces, last_backwards(schedule))
            if result.loss != expected:
                found.append(f"loss of step {step}: {result.loss} != {expected}")
        for s, module in local.items():
            for (name, mine), theirs in zip(
                module.named_parameters(), whole[s].parameters(), strict=True
            ):
                if not torch.equal(mine, theirs):
                    found.append(f"stage {s} {name}: {(mine - theirs).abs().max()}")
            mine_state = executor.optimizers[s].state_dict()["state"]
            theirs_state = optimizers[s].state_dict()["state"]
            for key, entry in theirs_state.items():
                for name, value in entry.items():
                    same = (
                        torch.equal(mine_state[key][name], value)
                        if isinstance(value, Tensor)
                        else mine_state[key][name] == value
                    )
                    if not same:
                        found.append(f"stage {s} optimizer state {key} {name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    cases = json.loads(parser.parse_args().cases)
    torch.set_num_threads(1)
    # One process group for all cases: the executor uses what it finds.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in cases:
        line = json.dumps({"case": case, "differs": differences(rank, case)})
        print(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
