"""Strike a training with faults of each kind, again and again, and count what it says of them.

    python tools/fault_table.py             20 trials a row, on 4 gloo ranks: some 20 minutes
    python tools/fault_table.py --trials 2 --rows SIGKILL,exit
    python tools/fault_table.py --phases    5 trials a phase and fault: some 30 minutes

Each trial forks a launcher, which has the store and forks the ranks, and sends SIGTERM to the
others soon after one has ended, as torchrun does. The fault strikes at a place that a seed draws.
Then the training is started again without a fault, goes on from its latest checkpoint, and its
weights are compared, bit for bit, with those of plain training in one process. Trainings without a
fault are compared as well, once each; they must not end early, and hold no more in the end.

With `--phases` each kind of fault strikes in each phase of a training, on every rank: the table has
how often that rank alone was named, by one process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401  # once, before the forks: optimisers import it as they are made
from attrs import define, frozen
from fault_run import MICROBATCHES, PHASES, main, plain
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, unlisted

import schedir.training  # noqa: F401

RANKS, STEPS, SAVE_EVERY, TIMEOUT = 4, 20, 5, 4.0
ROOT_LINE = re.compile(r"^schedir: root: rank (\d+)(?: step (\d+))? (?:#\d+ )?(\S+): (.*)$", re.M)
ENDED_LINE = re.compile(r"^schedir: rank \d+ ended: .*$", re.M)


@frozen
class Row:
    """Faults of some kinds, at some places; all ranks must end within `limit` seconds.

    The message `names` the root, the pair of ranks at the ends of a connection, a straggler that
    is slowed by a `factor`, none of them, or nobody, as there is no fault. The ranks are on so many
    `nodes`, each with a launcher and a host name of its own. Beside a `loaded` one other processes
    compute and write to memory.
    """

    kinds: Sequence[str]
    places: Sequence[str] = "FBO"
    limit: float = 1.0
    lines: int | None = None  # the most of schedir's lines
    names: str = "root"
    factor: float = 1.0
    nodes: int = 1
    steps: int = STEPS
    loaded: bool = False

    @property
    def is_healthy(self) -> bool:
        """Whether no fault strikes."""
        return self.names == "nobody"


ROWS = {
    "exception": Row(("exception", "memory"), ("F", "B", "O", "loss", "L")),
    "SIGKILL": Row(("kill",)),
    "exit": Row(("exit",)),
    "segfault": Row(("segfault",)),
    "SIGSTOP": Row(("stop",), limit=TIMEOUT + 1),
    "hang": Row(("hang",), limit=TIMEOUT + 1),
    "loader stalls": Row(("hang",), "L", limit=TIMEOUT + 1),
    "lock held": Row(("lock",), limit=TIMEOUT + 1),
    "socket": Row(("socket",), limit=2.0, names="pair"),
    "launcher SIGKILL": Row(("launcher",), limit=2.0, lines=10, names="none"),
    "launcher SIGTERM": Row(("terminate",), limit=2.0, lines=10, names="none"),
    "Ctrl-C": Row(("interrupt",), limit=2.0, lines=10, names="none"),
    "node's launcher": Row(("launcher",), limit=2.0, lines=10, names="none", nodes=2),
    "SIGKILL on 2 nodes": Row(("kill",), limit=2.0, nodes=2),
    "slowed 2x": Row(("slowed",), names="straggler", factor=2.0),
    "slowed 10x": Row(("slowed",), names="straggler", factor=10.0),
    "none beside load": Row((), names="nobody", steps=1_000, loaded=True),
    "none": Row((), names="nobody", steps=10_000),
}
_ROOM = 4096  # KiB by which a process may grow
_NEW_HOST_NAME, _NEW_USER = 0x04000000, 0x10000000  # CLONE_NEWUTS, CLONE_NEWUSER
USUAL = 0.002  # seconds that each forward sleeps where one rank is slowed


@define
class Trial:
    """How a trial has ended."""

    seconds: float
    truth: dict[str, Any]
    printed: str
    is_clean: bool  # no process of it is left


def launch(folder: Path, given: dict[str, Any]) -> int:
    """Fork a launcher and its ranks; returns the launcher's process id."""
    config = folder / "config"
    config.write_text(json.dumps(given))
    launcher = os.fork()
    if launcher:
        return launcher
    os.setsid()
    with suppress(BaseException):
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        size = RANKS // given["nodes"]
        for node in range(1, given["nodes"]):
            if not os.fork():
                _be_host(node)
                _launch_ranks(range(node * size, (node + 1) * size), store.port, folder, given)
        _launch_ranks(range(size), store.port, folder, given)
    os._exit(3)


def _be_host(node: int) -> None:
    """From now on this process and its children are on a host with another name."""
    os.setsid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_HOST_NAME | _NEW_USER * bool(os.geteuid())):
        raise OSError(ctypes.get_errno(), "no host name of its own")
    socket.sethostname(f"node{node}")


def _launch_ranks(ranks: Iterable[int], port: int, folder: Path, given: dict[str, Any]) -> NoReturn:
    """Be the launcher of some ranks."""
    os._exit(_look_after([_fork_rank(rank, port, folder, given) for rank in ranks]))


def _fork_rank(rank: int, port: int, folder: Path, given: dict[str, Any]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        main(given)
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _look_after(ranks: list[int]) -> int:
    """Wait for the ranks; as torchrun, end all others once one has failed, or on a signal."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda found, _: told.append(found))
    left, failed = set(ranks), 0
    while left:
        for process in list(left):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                left.discard(process)
                failed = failed or status
        if (failed or told) and left:
            time.sleep(0.06)
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, told[0] if told else signal.SIGTERM)
            told, until = [], time.monotonic() + 30
            while left and time.monotonic() < until:
                for process in list(left):
                    if os.waitpid(process, os.WNOHANG)[0]:
                        left.discard(process)
                time.sleep(0.005)
            for process in left:
                os.kill(process, signal.SIGKILL)
            return 1
        time.sleep(0.01)
    return 1 if failed else 0


def run(folder: Path, given: dict[str, Any], limit: float = 60.0) -> Trial:
    """Launch, and wait until all ranks have ended."""
    for path in folder.glob("pid*"):
        path.unlink()
    begun = time.time()
    launcher = launch(folder, given)
    processes: list[int] = []
    is_over = False
    while not is_over and time.time() < begun + limit:
        time.sleep(0.003)
        processes = [int(path.read_text() or 0) for path in folder.glob("pid*")]
        is_over = len(processes) == RANKS and not any(map(_runs, processes))
    ended = time.time()
    for process in processes:
        if _runs(process):
            os.kill(process, signal.SIGKILL)
    with suppress(ChildProcessError):
        until = time.monotonic() + 35
        while os.waitpid(launcher, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(0.005)
    truth = json.loads((folder / "truth").read_text()) if (folder / "truth").exists() else {}
    printed = "".join((folder / f"err{rank}").read_text() for rank in range(RANKS))
    return Trial(ended - truth.get("time", begun), truth, printed, is_over)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def weights(folder: Path) -> list[bytes]:
    return [(folder / f"end{rank}").read_bytes() for rank in range(RANKS)]


def draw(row: Row, chance: random.Random) -> dict[str, Any]:
    """A fault of the row, at a place that is drawn."""
    where = chance.choice(list(row.places))
    rank = RANKS - 1 if where == "loss" else chance.randrange(RANKS)
    number = chance.randrange(MICROBATCHES) if where in ("F", "B", "loss") else 0
    kind, step = chance.choice(list(row.kinds)), chance.randrange(1, STEPS - 1)
    return {"kind": kind, "rank": rank, "step": step, "where": where, "number": number}


@contextmanager
def load(cores: int = 4, mib: int = 2048) -> Iterator[None]:
    """Inside, other processes keep more than all cores busy, and write to memory."""
    processes = []
    for number in range(cores):
        process = os.fork()
        if not process:
            much = bytearray(mib << 20 if number == 0 else 1)
            while True:
                for at in range(0, len(much), 4096):
                    much[at] ^= 1
        processes.append(process)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@define
class Counts:
    """How often what a row promises was kept."""

    ended: int = 0
    rank: int = 0
    action: int = 0
    innocent: int = 0
    lines: int = 0
    resumed: int = 0


def try_row(
    name: str, row: Row, trials: int, expected: list[bytes], seed: int
) -> tuple[Counts, list[float], list[str]]:
    """Run the trials of a row; returns the counts, the seconds and what was wrong."""
    chance = random.Random(f"{name} {seed}")
    seconds: list[float] = []
    counts, wrong = Counts(), []
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            given: dict[str, Any]
            given = {"folder": made, "fault": None, "steps": row.steps, "timeout": TIMEOUT}
            given |= {"nodes": row.nodes, "save_every": row.steps if row.is_healthy else SAVE_EVERY}
            if row.names == "straggler":
                slow = chance.randrange(RANKS)
                usual = {str(rank): USUAL for rank in range(RANKS)}
                given |= {"slowed": usual | {str(slow): USUAL * row.factor}}
                trial = run(folder, given)
                told = [json.loads((folder / f"stragglers{r}").read_text()) for r in range(RANKS)]
                counts.rank += all([rank for rank, _ in said] == [slow] for said in told)
                counts.ended += trial.is_clean and "schedir: root" not in trial.printed
            elif row.is_healthy:
                with load() if row.loaded else nullcontext():
                    trial = run(folder, given, limit=500.0)
                grown = [grows(folder / f"held{rank}") for rank in range(RANKS)]
                counts.ended += trial.is_clean and not trial.printed and not any(grown)
                wrong += [f"rank {rank} {said}" for rank, said in enumerate(grown) if said]
            else:
                given |= {"fault": draw(row, chance)}
                trial = run(folder, given)
                counts.ended += trial.is_clean and trial.seconds <= row.limit
                said = ROOT_LINE.findall(trial.printed)
                if not _count(counts, row, trial.truth, said):
                    wrong.append(f"{trial.truth} {said}")
                if trial.seconds > row.limit:
                    wrong.append(f"{trial.seconds:.2f} s {trial.truth}")
            seconds.append(trial.seconds)
            lines = [line for line in trial.printed.splitlines() if line.startswith("schedir: ")]
            counts.lines = max(counts.lines, len(lines))
            if given["fault"] is not None:
                run(folder, {**given, "fault": None})
            with suppress(OSError):
                counts.resumed += weights(folder) == expected
    return counts, seconds, wrong


def _count(counts: Counts, row: Row, truth: dict[str, Any], said: list[tuple[str, ...]]) -> bool:
    """Count what the message of a trial names; returns whether that is right."""
    named = {int(rank) for rank, *_ in said}
    if row.names == "none":
        return True
    if row.names == "pair":
        right = truth["rank"] in named and len(named) == 2
        counts.innocent += bool(named) and not right
    else:
        right = named == {truth["rank"]}
        counts.innocent += bool(named - {truth["rank"]})
        counts.action += right and said[0][2] == truth["action"]
    counts.rank += right
    return right and (row.names == "pair" or said[0][2] == truth["action"])


STRIKES = {"raise": "exception", "exit": "exit", "SIGKILL": "kill", "stop": "stop", "hang": "hang"}


def phases(names: Sequence[str], trials: int, seed: int, timeout: float) -> bool:
    """Print, for each phase and fault, how often the right rank alone was named; returns whether it
    always was. A name may end in the one fault to strike: `run:hang`."""
    print(f"{'phase':<14}" + "".join(f"{fault:>10}" for fault in STRIKES), flush=True)
    holds = True
    for name, _, only in (each.partition(":") for each in names):
        cells = []
        for fault, kind in STRIKES.items():
            right, most = 0, trials if only in ("", fault) else 0
            for trial in range(most):
                rank = RANKS - 1 if name == "loss" else (seed + trial) % RANKS
                wrong = _phase_fault(name, kind, rank, random.Random(f"{name} {trial}"), timeout)
                right += not wrong
                print(f"    {name} {fault} {wrong}\n" * bool(wrong), end="", file=sys.stderr)
            cells.append(f"{right}/{most}" if most else "")
            holds &= right == most
        print(f"{name:<14}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    return holds


def _phase_fault(name: str, kind: str, rank: int, chance: random.Random, timeout: float) -> str:
    """Strike in a phase; returns what was wrong."""
    where = PHASES[name]
    number = chance.randrange(MICROBATCHES) if where in ("F", "B", "loss") else 0
    step = 0 if name == "making" else 2
    fault = {"kind": kind, "rank": rank, "step": step, "where": where, "number": number}
    with tempfile.TemporaryDirectory() as folder:
        given = {"folder": folder, "fault": fault, "steps": 4, "timeout": timeout}
        trial = run(Path(folder), given | {"nodes": 1, "save_every": 99, "phase": name})
    said = ROOT_LINE.findall(trial.printed)
    roots = [(int(rank), action) for rank, _, action, _ in said]
    if trial.is_clean and roots == [(rank, trial.truth.get("action"))]:
        return ""
    return f"{trial.truth} {roots} {trial.seconds:.1f} s\n{trial.printed}"


def grows(file: Path) -> str:
    """What a rank holds more of in the end than after a fifth of its steps; empty if nothing."""
    (kib, *few), (more, *fewer) = json.loads(file.read_text())
    said = [f"has {more - kib} KiB more"] if more - kib > _ROOM else []
    return " and ".join(said + [f"has {few} threads and files, then {fewer}"] * (few != fewer))


def undisturbed(steps: int) -> list[bytes]:
    """The weights of plain training; in a process of its own, since autograd's threads do not
    survive a fork."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "weights"
        if not os.fork():
            with suppress(BaseException):
                path.write_bytes(b"".join(plain(RANKS, steps, path.parent)))
            os._exit(0)
        os.wait()
        found = path.read_bytes()
    size = len(found) // RANKS
    return [found[at : at + size] for at in range(0, len(found), size)]


def table(rows: Sequence[str], most: int, seed: int, patient: bool) -> bool:
    """Print the table; returns whether all of it holds, if `patient` without the times."""
    begun = time.monotonic()
    heads = "median, most s", "in time", "rank", "action", "innocent", "lines", "resumed"
    print(f"{'fault':<18}" + "".join(f"{head:>16}" for head in heads), flush=True)
    holds = True
    for name in rows:
        row = ROWS[name]
        trials = 1 if row.is_healthy else most
        enough = trials - max(1, trials // 20) if trials > 2 else trials
        counts, seconds, wrong = try_row(name, row, trials, undisturbed(row.steps), seed)
        named, acted = f"{counts.rank}/{trials}", f"{counts.action}/{trials}"
        unnamed = row.names in ("none", "nobody")
        cells = [
            f"{statistics.median(seconds):.2f}, {max(seconds):.2f}",
            f"{counts.ended}/{trials}",
            "–" if unnamed else named,
            acted if row.names == "root" else "–",
            str(counts.innocent),
            str(counts.lines),
            f"{counts.resumed}/{trials}",
        ]
        print(f"{name:<18}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
        print("".join(f"    {line}\n" for line in wrong), end="", file=sys.stderr)
        holds &= patient or counts.ended >= enough
        holds &= counts.resumed == trials and counts.innocent <= trials // 20
        holds &= unnamed or counts.rank >= enough
        holds &= row.lines is None or counts.lines <= row.lines
    print(f"{most} trials a row, {time.monotonic() - begun:.0f} s")
    return holds


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patient", action="store_true", help="judge without the times")
    parser.add_argument("--phases", nargs="?", const=",".join(PHASES), help="these, or all")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds, of phases")
    given = parser.parse_args()
    if given.phases:
        names = given.phases.split(",")
        return 0 if phases(names, given.trials or 5, given.seed, given.timeout) else 1
    return 0 if table(given.rows.split(","), given.trials or 20, given.seed, given.patient) else 1


if __name__ == "__main__":
    raise SystemExit(_main())
