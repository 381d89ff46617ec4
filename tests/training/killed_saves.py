"""Kills processes while they save, at moments drawn with a seed, and prints what loads then.

    python -m tests.training.killed_saves FOLDER HOW SEED TRIALS

A moment is one before the n-th time that the save opens, writes, syncs, renames or removes a file.
The last ones, in which a checkpoint becomes valid, are all tried over another one. Each trial forks
processes, so none waits for the start of Python, and prints a line of JSON: see `trial`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from schedir import ExecutionError
from schedir.training import Checkpoint
from schedir.training.checkpoint import saving

Save: TypeAlias = Callable[[Checkpoint, Path], None]


def checkpoint_of(value: int) -> Checkpoint:
    """Of a model and an optimiser's state that have this value everywhere, and as the step."""
    model = nn.Linear(40, 40)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
    optimizer.step()
    checkpoint = Checkpoint(model, optimizer)
    checkpoint.step = value
    return checkpoint


def values_in(folder: Path) -> set[float]:
    """All values of the checkpoint in a folder; loading it compares the hashes."""
    checkpoint = checkpoint_of(0)
    checkpoint.load(folder)
    (held,), (optimizer,) = checkpoint._held, checkpoint._optimizers.values()
    tensors = [*held.module.parameters()]
    tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
    return {float(checkpoint.step)}.union(*(x.flatten().tolist() for x in tensors))


def async_save(checkpoint: Checkpoint, folder: Path) -> None:
    checkpoint.async_save(folder).wait()


SAVES: dict[str, Save] = {"save": Checkpoint.save, "async_save": async_save}
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
LAST = 12


def on_every_touch(folder: Path, do: Callable[[], object]) -> None:
    """Call a function before this process touches a file, from now on."""

    def audit(event: str, given: tuple[object, ...]) -> None:
        if event in EVENTS and str(folder.parent) in str(given):
            do()

    write, sync = saving._Hashing.write, os.fsync

    def writes(self: Any, data: Any) -> int:
        do()
        written = write(self, data)
        self.flush()  # so that every piece may be there without the next one
        return written

    def syncs(fd: Any) -> None:
        do()
        sync(fd)

    saving._Hashing.write = writes  # type: ignore[method-assign]
    os.fsync = syncs
    sys.addaudithook(audit)


def forked(work: Callable[[], object]) -> int:
    """Do some work in a process of its own; how it has ended."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        work()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def touches(folder: Path, save: Save) -> int:
    """How often a save over another one touches files."""
    found: list[None] = []

    def counted() -> None:
        on_every_touch(folder, lambda: found.append(None))
        save(checkpoint_of(2), folder)
        (folder / "count").write_text(str(len(found)))

    assert forked(counted) == 0
    number = int((folder / "count").read_text())
    (folder / "count").unlink()
    return number


def trial(folder: Path, save: Save, moment: int, is_over: bool) -> None:
    """Save 1, unless the folder `is_over` nothing; kill the save of 2 at the moment; then look."""
    shutil.rmtree(folder, ignore_errors=True)

    def interrupted() -> None:
        numbers = count()

        def dies() -> None:
            if next(numbers) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        on_every_touch(folder, dies)
        save(checkpoint_of(2), folder)

    def looks() -> None:
        found, refused = set[float](), ""
        is_there = Checkpoint.is_at(folder)
        try:
            found = values_in(folder)
        except ExecutionError as error:
            refused = str(error)
        save(checkpoint_of(3), folder)
        files, again = len([*folder.parent.rglob("*.*")]), values_in(folder)
        print(json.dumps([moment, is_over, is_there, [*found], refused, files, [*again]]))

    if is_over:
        assert forked(lambda: save(checkpoint_of(1), folder)) == 0
    # A first save has fewer files to remove, and one in the background may not read what it left.
    assert forked(interrupted) in (0, -signal.SIGKILL)
    assert forked(looks) == 0


def main() -> None:
    folder, save = Path(sys.argv[1]), SAVES[sys.argv[2]]
    seed, trials = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    save(checkpoint_of(2), folder)  # imports what a save and a load import
    values_in(folder)
    number = touches(folder, save)
    draw = random.Random(seed)
    drawn = [(moment, draw.random() < 0.4) for moment in draw.sample(range(number), trials)]
    for moment, is_over in [*drawn, *((moment, True) for moment in range(number - LAST, number))]:
        trial(folder, save, moment, is_over)


if __name__ == "__main__":
    main()
