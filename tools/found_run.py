"""Steps of several schedules in turn, under torchrun, for `bench_found.py`: `found_run.py FOLDER`.

FOLDER has `run.json`: {"rounds", "warm", "seed"}, and a .sched for each schedule. Each gets its
timelines, NAME.json; `elapsed.json` has the seconds of each step of each, as rank 0 sees them.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import schedir
from schedir.runtime import Executor
from schedir.simulator import save_timelines

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import gpt  # the example's model


def executor(sched: schedir.Schedule) -> Executor:
    """This rank's part of the example's GPT, cut as the schedule says."""
    config = gpt.Config()
    stages = {s: gpt.build_stage(config, s, sched.stages) for s in sched.stages_of(dist.get_rank())}

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights)

    return Executor(sched, stages, gpt.loss_fn, optimizer, trace=True)


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    how = json.loads((folder / "run.json").read_text())
    dist.init_process_group("gloo")
    chance = random.Random(how["seed"])  # the same order on all ranks
    elapsed: dict[str, list[float]] = {}
    with ExitStack() as stack:
        running = {}
        for path in sorted(folder.glob("*.sched")):
            sched = schedir.build(path)
            running[path.stem] = stack.enter_context(executor(sched))
            rows = 2 * sched.microbatches
        shape = (2, rows, gpt.Config().context)
        x, y = torch.randint(gpt.BYTES, shape, generator=torch.Generator().manual_seed(1))
        for number in range(how["warm"] + how["rounds"]):
            for name in chance.sample(sorted(running), len(running)):
                dist.barrier()
                spent = running[name].step(x, target=y).elapsed
                if number >= how["warm"]:
                    elapsed.setdefault(name, []).append(spent)
        for name, each in running.items():
            lines = each.timelines()
            if dist.get_rank() == 0:
                save_timelines(lines[how["warm"] :], folder / f"{name}.json")
    if dist.get_rank() == 0:
        (folder / "elapsed.json").write_text(json.dumps(elapsed))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
