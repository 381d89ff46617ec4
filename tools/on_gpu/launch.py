"""Runs one check, as one process or as one process per rank, and stops it in time.

Every rank has a file of its own for what it prints. A rank that still runs shortly before the time
is up prints where each of its threads is (`faulthandler`), after schedir has named the place in the
list, whose timeout is half of the time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time

from attrs import field, frozen

ROOT = Path(__file__).resolve().parents[2]
# Several ranks on one GPU: NCCL takes them for hosts of their own, which talk over sockets.
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
ALWAYS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products are the same on every stream
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
UNTIL = "GPU_HOUR_UNTIL"  # when the process that reads it will be ended
_GRACE = 20.0  # seconds for the other ranks, once one has failed
_KEPT = 4000  # characters of what a rank has printed


@frozen
class Check:
    """Python with some arguments, on so many `ranks`; 0: one process that is none.

    `cpu` says why it makes no sense without a GPU; empty where it does.
    """

    name: str
    arguments: Sequence[str]
    ranks: int = 0
    limit: float = 120.0  # seconds
    environment: Mapping[str, str] = field(factory=dict)
    cpu: str = ""


@frozen
class Outcome:
    """How a check has ended: ok, failed, hung or skipped; `note` is the line that says most."""

    check: Check
    state: str
    seconds: float = 0.0
    note: str = ""
    printed: Sequence[str] = ()  # by each process, where it is not ok


def run(check: Check) -> Outcome:
    """Run a check; whatever happens in it, this returns, and leaves no process behind."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number in range(max(1, check.ranks))]
        begun = monotonic()
        processes = [_start(check, rank, port, log) for rank, log, port in _places(check, logs)]
        try:
            hung = not _ended(processes, begun + check.limit)
        finally:
            for process in processes:
                _kill(process)
        printed = [log.read_text(errors="replace") for log in logs]
    codes = [process.returncode for process in processes]
    state = "hung" if hung else "failed" if any(codes) else "ok"
    return Outcome(
        check,
        state,
        monotonic() - begun,
        _note(printed, codes, state),
        () if state == "ok" else [text[-_KEPT:] for text in printed],
    )


def _places(check: Check, logs: Sequence[Path]) -> list[tuple[int, Path, int]]:
    with socket.socket() as probe:  # a port that is free
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [(rank, log, port) for rank, log in enumerate(logs)]


def _start(check: Check, rank: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **ALWAYS, UNTIL: str(time() + check.limit)}
    if check.ranks:
        environment |= {
            **SOCKETS,
            "NCCL_HOSTID": f"schedir-{rank}",  # read when NCCL is loaded
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(check.ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *check.arguments],
            cwd=ROOT,
            env={**environment, **check.environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _ended(processes: Sequence[subprocess.Popen[bytes]], until: float) -> bool:
    """Wait for all of them; whether they have ended in time, or one has failed."""
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed, until = True, min(until, monotonic() + _GRACE)
        if monotonic() > until:
            return failed
        sleep(0.1)
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _note(printed: Sequence[str], codes: Sequence[int], state: str) -> str:
    """The last line of the first rank, or of the first one that has failed by itself."""
    number = 0
    if state == "failed":
        # What was killed here has failed after another one.
        number = next((n for n, code in enumerate(codes) if code not in (0, -signal.SIGKILL)), 0)
    lines = [line for line in printed[number].splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it has printed nothing"
    return f"rank {number}: {last}" if state != "ok" and len(codes) > 1 else last
