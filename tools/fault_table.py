"""Strike a training with faults of each kind, again and again, and count what it says of them.

    python tools/fault_table.py             20 trials a row, on 4 gloo ranks: some 20 minutes
    python tools/fault_table.py --trials 2 --rows SIGKILL,exit

Each trial forks a launcher, which has the store and forks the ranks, and sends SIGTERM to the
others soon after one has ended, as torchrun does. The fault strikes at a place that a seed draws.
Then the training is started again without a fault, goes on from its latest checkpoint, and its
weights are compared, bit for bit, with those of a training that nothing disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # once, before the forks
from attrs import define, frozen
from fault_run import MICROBATCHES, main
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, unlisted

import schedir.training  # noqa: F401

RANKS, STEPS, TIMEOUT = 4, 20, 4.0
ROOT_LINE = re.compile(r"^schedir: root: rank (\d+)(?: step (\d+))? (?:#\d+ )?(\S+): (.*)$", re.M)
ENDED_LINE = re.compile(r"^schedir: rank \d+ ended: .*$", re.M)


@frozen
class Row:
    """Faults of some kinds, at some places; all ranks must end within `limit` seconds.

    The message `names` the root, the pair of ranks at the ends of a connection, a straggler that
    is slowed by a `factor`, or none of them.
    """

    kinds: Sequence[str]
    places: Sequence[str] = "FBO"
    limit: float = 1.0
    lines: int | None = None  # the most of schedir's lines
    names: str = "root"
    factor: float = 1.0


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
    "slowed 2x": Row(("slowed",), names="straggler", factor=2.0),
    "slowed 10x": Row(("slowed",), names="straggler", factor=10.0),
}
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
        ranks = [_fork_rank(rank, store.port, folder, given) for rank in range(RANKS)]
        os._exit(_look_after(ranks))
    os._exit(3)


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
            given = {"folder": made, "fault": draw(row, chance), "steps": STEPS, "timeout": TIMEOUT}
            if row.names == "straggler":
                slow = chance.randrange(RANKS)
                usual = {str(rank): USUAL for rank in range(RANKS)}
                given |= {"fault": None, "slowed": usual | {str(slow): USUAL * row.factor}}
                trial = run(folder, given)
                told = [json.loads((folder / f"stragglers{r}").read_text()) for r in range(RANKS)]
                counts.rank += all([rank for rank, _ in said] == [slow] for said in told)
                counts.ended += trial.is_clean and "schedir: root" not in trial.printed
            else:
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
            if row.names != "straggler":
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


def undisturbed() -> list[bytes]:
    """The weights of a training that nothing disturbs."""
    with tempfile.TemporaryDirectory() as made:
        run(Path(made), {"folder": made, "fault": None, "steps": STEPS, "timeout": 30.0})
        return weights(Path(made))


def table(rows: Sequence[str], trials: int, seed: int, patient: bool) -> bool:
    """Print the table; returns whether all of it holds, if `patient` without the times."""
    begun = time.monotonic()
    expected = undisturbed()
    heads = "median, most s", "in time", "rank", "action", "innocent", "lines", "resumed"
    print(f"{'fault':<18}" + "".join(f"{head:>16}" for head in heads), flush=True)
    holds = True
    enough = trials - max(1, trials // 20) if trials > 2 else trials
    for name in rows:
        row = ROWS[name]
        counts, seconds, wrong = try_row(name, row, trials, expected, seed)
        named, acted = f"{counts.rank}/{trials}", f"{counts.action}/{trials}"
        cells = [
            f"{statistics.median(seconds):.2f}, {max(seconds):.2f}",
            f"{counts.ended}/{trials}",
            "–" if row.names == "none" else named,
            acted if row.names == "root" else "–",
            str(counts.innocent),
            str(counts.lines),
            f"{counts.resumed}/{trials}",
        ]
        print(f"{name:<18}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
        print("".join(f"    {line}\n" for line in wrong), end="", file=sys.stderr)
        holds &= patient or counts.ended >= enough
        holds &= counts.resumed == trials and counts.innocent <= trials // 20
        holds &= row.names == "none" or counts.rank >= enough
        holds &= row.lines is None or counts.lines <= row.lines
    print(f"{trials} trials a row, {time.monotonic() - begun:.0f} s")
    return holds


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patient", action="store_true", help="judge without the times")
    given = parser.parse_args()
    return 0 if table(given.rows.split(","), given.trials, given.seed, given.patient) else 1


if __name__ == "__main__":
    raise SystemExit(_main())
