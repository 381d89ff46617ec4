"""One rank of a small training in which a fault strikes; run by `tools/fault_table.py`.

It trains 1F1B with AdamW, saves checkpoints, and goes on from the latest one; or it does one of the
PHASES of a training. The truth (rank, step and action of the fault, and the time) goes to a file
before the fault strikes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import schedir
from schedir.runtime import Executor
from schedir.training import Batches, Callback, Checkpoint, Trainer

MICROBATCHES, WIDTH = 8, 16


@define
class Fault:
    """Where a fault strikes: at the n-th forward, backward, loss, update or batch of a step, or
    in another phase."""

    kind: str
    rank: int
    step: int
    where: str = "F"
    number: int = 0


def strike(kind: str) -> None:
    """Do what the fault is."""
    if kind == "exception":
        raise ValueError("no more of this")
    if kind == "memory":
        raise MemoryError("no room")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(7)
    if kind == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        while True:
            time.sleep(0.01)
    if kind == "lock":  # sleeps in C, with the interpreter's lock held
        ctypes.PyDLL(None).sleep(1000)
    if kind == "socket":
        cut_one_socket()
    if kind == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if kind == "terminate":
        os.kill(os.getppid(), signal.SIGTERM)
    if kind == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)


def cut_one_socket() -> None:
    """Shut down the connection over which most has gone, but for that to the store."""
    most: list[tuple[int, int]] = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found = socket.socket(fileno=os.dup(number))
            peer, own = found.getpeername(), found.getsockname()
            if isinstance(peer, tuple) and int(os.environ["MASTER_PORT"]) not in (peer[1], own[1]):
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                most.append((sum(struct.unpack_from("QQ", info, 120)), number))
            found.close()
        except OSError:
            continue
    socket.socket(fileno=os.dup(max(most)[1])).shutdown(socket.SHUT_RDWR)


class Faulty:
    """Counts what a rank does in a step, and strikes once, when its turn comes."""

    def __init__(self, fault: Fault | None, rank: int, folder: Path) -> None:
        self.fault = fault if fault is not None and fault.rank == rank else None
        self.rank, self.folder, self.step = rank, folder, 0
        self.counts: dict[str, int] = {}

    def begin(self, step: int) -> None:
        self.step, self.counts = step, {}

    def at(self, where: str, action: Callable[[int], str]) -> None:
        """The rank is about to do something."""
        number = self.counts[where] = self.counts.get(where, -1) + 1
        fault = self.fault
        if fault is None or (self.step, where, number) != (fault.step, fault.where, fault.number):
            return
        self.fault = None
        truth = {"rank": self.rank, "step": self.step, "action": action(number)}
        (self.folder / "truth").write_text(json.dumps({**truth, "time": time.time()}))
        strike(fault.kind)


class Stage(nn.Module):
    """Layers of one stage, in which faults strike."""

    def __init__(self, stage: int, faulty: Faulty, seconds: float) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleDict({str(stage): layers})  # a name of its own in the whole model
        self.stage, self.faulty, self.seconds = stage, faulty, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.faulty.at("F", lambda n: f"{self.stage}F{n}")
        if self.seconds:
            time.sleep(self.seconds)
        y: Tensor = self.layers[str(self.stage)](x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.faulty.at("B", lambda n: f"{self.stage}B{n}"))
        return y


def nowhere(number: int) -> str:
    """The action of what happens outside of the list."""
    return "–"


def optimizer_of(rank: int, faulty: Faulty) -> Callable[[Any], torch.optim.Optimizer]:
    def made(parameters: Any) -> torch.optim.Optimizer:
        faulty.at("making", nowhere)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: faulty.at("O", lambda n: f"{rank}OPTIM_STEP"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: faulty.at("load", nowhere))
        return optimizer

    return made


def batches(first: int, steps: int, faulty: Faulty) -> Iterator[tuple[int, Tensor, Tensor]]:
    for step in range(first, steps):
        faulty.begin(step)
        faulty.at("L", nowhere)
        x, y = torch.randn(
            2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step)
        )
        yield step, x, y


def bits(stage: nn.Module) -> bytes:
    """The weights of a stage, bit for bit."""
    found: bytes = torch.cat([p.detach().flatten() for p in stage.parameters()]).numpy().tobytes()
    return found


def plain(ranks: int, steps: int, folder: Path) -> list[bytes]:
    """The weights of each stage after a training in one process, without schedir."""
    nobody = Faulty(None, 0, folder)
    stages = [made_stage(rank, nobody, 0.0) for rank in range(ranks)]
    model = nn.Sequential(*stages)
    optimizers = [optimizer_of(rank, nobody)(s.parameters()) for rank, s in enumerate(stages)]
    for _, x, y in batches(0, steps, nobody):
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (nn.functional.mse_loss(model(part), target) / MICROBATCHES).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [bits(stage) for stage in stages]


def made_stage(rank: int, faulty: Faulty, seconds: float) -> Stage:
    torch.manual_seed(rank)
    return Stage(rank, faulty, seconds)


def held() -> tuple[int, int, int]:
    """What this process holds: KiB of memory, threads, open files."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    kib, threads = int(status["VmRSS"].split()[0]), int(status["Threads"])
    return kib, threads, len(os.listdir("/proc/self/fd"))


class Struck:
    """Something of a rank's that is told to others."""

    def __init__(self, faulty: Faulty) -> None:
        self.faulty = faulty

    def __reduce__(self) -> tuple[Any, ...]:
        self.faulty.at("gather", nowhere)
        return int, ()


class Calls(Callback):
    """Faults in what a Trainer calls."""

    def __init__(self, faulty: Faulty) -> None:
        self.faulty = faulty

    def after_step(self, result: Any) -> None:
        self.faulty.at("callback", nowhere)

    def figures(self) -> dict[str, float]:
        self.faulty.at("figures", nowhere)
        return {}


def one_phase(executor: Executor, faulty: Faulty, phase: str, folder: Path) -> None:
    """Train for some steps; what the phase is about happens in each. The fault strikes in step 2,
    unless an optimiser is made then."""
    data = list(batches(0, 4, Faulty(None, 0, folder)))
    if phase in ("callback", "figures"):
        faulty.begin(2)  # a Trainer begins steps itself
        pairs = Batches([(x, y) for _, x, y in data])
        calls = [Calls(faulty)]
        Trainer(executor, pairs, epochs=1, log_every=1, callbacks=calls, progress=False).fit()
        return
    if phase == "run":
        faulty.begin(2)
        for result in executor.run([(x, y) for _, x, y in data], segment=2 * MICROBATCHES):
            result.loss  # noqa: B018
        return
    saved, write = Checkpoint(executor), FileSystemWriter.write_data

    def written(*given: Any) -> Any:
        faulty.at("save", nowhere)
        return write(*given)

    FileSystemWriter.write_data = written  # type: ignore[assignment, method-assign]
    for step, x, y in data:
        executor.step(x, target=y)
        faulty.begin(step)
        if phase == "evaluation":
            executor.evaluate(x, target=y).loss  # noqa: B018
        elif phase == "inference":
            executor.infer(x)
        elif phase == "between":
            faulty.at("between", nowhere)
        elif phase == "gather":
            executor.gather(Struck(faulty))
        else:
            saved.save(folder / f"step-{step}")
        if phase == "load":
            saved.load(folder / f"step-{step}")


STEPPING = {"forward": "F", "backward": "B", "optimiser": "O", "loss": "loss", "loader": "L"}
PHASES = {
    **STEPPING,
    **{"evaluation": "F", "inference": "F", "run": "F"},
    **{each: each for each in ("callback", "figures", "save", "load", "between", "gather")},
    "making": "making",
}
"""Where a fault strikes in each phase of a training: in steps, or elsewhere."""


def main(given: dict[str, Any]) -> None:
    """Train, with what the driver says."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(given["folder"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    fault = Fault(**given["fault"]) if given["fault"] else None
    faulty = Faulty(fault, rank, folder)
    stage = made_stage(rank, faulty, given.get("slowed", {}).get(str(rank), 0.0))
    phase = given.get("phase", "")
    name = "pipedream" if phase == "run" else "1f1b"
    schedule = schedir.build(name, ranks=ranks, microbatches=MICROBATCHES)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        faulty.at("loss", lambda n: f"{rank}F{n}")
        return nn.functional.mse_loss(output, target)

    stragglers, holds = [], []
    with Executor(
        schedule, {rank: stage}, loss_fn, optimizer_of(rank, faulty), timeout=given["timeout"]
    ) as executor:
        if phase not in ("", *STEPPING):
            one_phase(executor, faulty, phase, folder)
            return
        checkpoint = Checkpoint(executor)
        saved = sorted(folder.glob("step-*"), key=lambda path: int(path.name[5:]))
        saved = [path for path in saved if Checkpoint.is_at(path)]
        if saved:
            checkpoint.load(saved[-1])
        for step, x, y in batches(executor.steps, given["steps"], faulty):
            result = executor.step(x, target=y)
            if given.get("slowed"):
                stragglers.append(result.stragglers)
            if (step + 1) % given["save_every"] == 0:
                checkpoint.save(folder / f"step-{step + 1}")
            if step + 1 in (given["steps"] // 5, given["steps"]):
                holds.append(held())
        (folder / f"end{rank}").write_bytes(bits(stage))
        (folder / f"held{rank}").write_text(json.dumps(holds))
        if stragglers:
            (folder / f"stragglers{rank}").write_text(json.dumps(stragglers[-1]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
