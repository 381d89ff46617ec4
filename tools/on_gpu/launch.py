"""Runs a check, as one process or as one process per rank, and ends it in time.

Every process has a file of its own for what it prints. A rank that still runs shortly before the
time is up prints where each of its threads is (`faulthandler`), after schedir has named the place
in the list, whose timeout is half of the time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import TypeAlias

from attrs import field, frozen
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, unlisted

ROOT = Path(__file__).resolve().parents[2]
# Several ranks on one GPU: NCCL takes them for hosts of their own, which talk over sockets.
SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
ALWAYS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products are the same on every stream
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tools", ROOT / "examples"))),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUTF8": "1",
}
UNTIL = "GPU_HOUR_UNTIL"  # when the process that reads it will be ended
DEVICE = "GPU_HOUR_DEVICE"
SAID = ">> "  # begins a line for the table; see `rank.say`
SKIPPED = 77  # the exit status of a check that can't be made here
_GRACE = 20.0  # seconds for the other ranks, once one has failed

Codes: TypeAlias = Sequence[int | None]
"""The exit status of each process; None of one that runs."""


@frozen
class Check:
    """A row of the table: Python with some arguments, on so many `ranks`; 0: one process that is
    none.

    `claim` says what it shows where it is ok. It should take the `expected` seconds, and is ended
    after `limit`. The `pieces` are further arguments, each done after the other, so that those of a
    row that fails can be run singly. `cpu` says why it makes no sense on the CPU, if it does not.
    """

    name: str
    claim: str
    arguments: Sequence[str]
    pieces: Sequence[str] = ()
    ranks: int = 0
    expected: float = 20.0
    limit: float = 60.0
    environment: Mapping[str, str] = field(factory=dict)
    cpu: str = ""


@frozen
class Outcome:
    """How a check has ended; `note` is the line that says most.

    `state` is ok, failed, hung, skipped or was cut off. `undone` are the pieces that not every
    process has said to be done.
    """

    name: str
    state: str
    seconds: float = 0.0
    note: str = ""
    printed: Sequence[str] = ()  # by each process
    undone: Sequence[str] = ()

    @property
    def bad(self) -> bool:
        return self.state not in ("ok", "skipped")


@frozen
class Ended:
    """What a process has printed, and its exit status at which `time`; None: it had to be ended."""

    printed: str
    code: int | None
    time: float

    @property
    def last(self) -> str:
        """Its last line, but for those of NCCL and torch's warnings of it."""
        lines = [line.strip() for line in self.printed.splitlines() if line.strip()]
        own = [line for line in lines if not re.search(" NCCL |ProcessGroupNCCL", line)]
        return own[-1] if own else "it has printed nothing"


def run(check: Check, device: str) -> Outcome:
    """Run a check; whatever happens in it, this returns, and leaves no process behind."""
    if device == "cpu" and check.cpu:
        return Outcome(check.name, "skipped", note=check.cpu)
    begun = monotonic()
    ended = launch(
        [*check.arguments, *check.pieces],
        check.ranks,
        check.limit,
        {**check.environment, DEVICE: device},
    )
    state = _state([process.code for process in ended])
    return Outcome(
        check.name,
        state,
        monotonic() - begun,
        _note(ended, state),
        [process.printed for process in ended],
        [piece for piece in check.pieces if not all(_has_done(e.printed, piece) for e in ended)],
    )


def _until_one_fails(codes: Codes) -> float:
    return _GRACE if any(codes) else float("inf")


def launch(
    arguments: Sequence[str],
    ranks: int,
    limit: float,
    environment: Mapping[str, str],
    patience: Callable[[Codes], float] = _until_one_fails,
) -> list[Ended]:
    """Run Python as so many ranks, or as one process for 0, for `limit` seconds at most.

    `patience` says for how many seconds more, after a process has ended. The store is held here, as
    torchrun does, so that no rank takes it away.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    until = monotonic() + limit
    common = {**os.environ, **ALWAYS, **environment, UNTIL: str(time() + limit)}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number in range(max(1, ranks))]
        processes = []
        try:
            for rank, log in enumerate(logs):
                own = _of_rank(rank, ranks, store.port) if ranks else {}
                processes.append(_start(arguments, {**common, **own}, log))
            codes, times = _wait(processes, until, patience)
        finally:
            for process in processes:
                _kill(process)
        printed = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    return [Ended(*found) for found in zip(printed, codes, times, strict=True)]


def _of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **SOCKETS,
        "NCCL_HOSTID": f"schedir-{rank}",  # read when NCCL is loaded
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], until: float, patience: Callable[[Codes], float]
) -> tuple[Codes, list[float]]:
    """The exit status of each, and when it ended."""
    codes: list[int | None] = [None] * len(processes)
    times = [0.0] * len(processes)
    changed = monotonic()
    while None in codes and monotonic() <= min(until, changed + patience(codes)):
        sleep(0.05)
        for number, process in enumerate(processes):
            if codes[number] is None and process.poll() is not None:
                codes[number], times[number] = process.returncode, time()
                changed = monotonic()
    return codes, [ended or time() for ended in times]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _state(codes: Codes) -> str:
    if set(codes) == {SKIPPED}:
        return "skipped"
    if any(codes):
        return "failed"
    return "hung" if None in codes else "ok"


def _note(ended: Sequence[Ended], state: str) -> str:
    """What the first rank has said last, or the last line of the first one that has failed."""
    if state in ("ok", "skipped"):
        lines = ended[0].printed.splitlines()
        said = [line for line in lines if line.startswith(SAID)]
        return said[-1].removeprefix(SAID) if said else ended[0].last
    number = next((n for n, process in enumerate(ended) if process.code), 0)
    return f"rank {number}: {ended[number].last}" if len(ended) > 1 else ended[number].last


def _has_done(printed: str, piece: str) -> bool:
    return any(line.startswith(f"{SAID}{piece}: ") for line in printed.splitlines())
