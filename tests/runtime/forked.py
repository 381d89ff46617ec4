"""Ranks without the seconds that a start takes: forked from a process that has collected all tests.

    pytest --quick ─ starts ► pytest: collects what runs on ranks, and waits for orders
                                └ fork ► launcher: has the store, and looks after its ranks
                                           └ fork ► rank 0, rank 1, …: run the tests

Only `make test` does so. torchrun, whose ranks share nothing, not even the seed of their hashes,
launches those of `make test-all`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.importing import forget_modules
from tests.runtime.launch import ROOT, Launched
from tests.started import count

_PIPES = "SCHEDIR_TEST_PIPES"  # where orders come from, and where is said that they are done
_FORKED = "SCHEDIR_TEST_FORKED"  # set on ranks that are
_STREAMS = {"stdout": 1, "stderr": 2}


class Stem:
    """A process that has collected tests, and forks ranks that run some of them."""

    def __init__(self, options: Sequence[str], tests: Sequence[str]) -> None:
        orders, self._orders = os.pipe()
        self._done, done = os.pipe()
        own = {_PIPES: f"{orders} {done}", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(orders, done),
            start_new_session=True,
        )
        os.close(orders)
        os.close(done)

    def launch(self, ranks: int, order: Mapping[str, Any], timeout: float) -> Launched:
        """Run the tests of an order on so many ranks, for `timeout` seconds at most: they print to
        files in its folder, and have its environment."""
        folder, order = order["folder"], {**order, "ranks": ranks}
        count(ranks)
        os.write(self._orders, json.dumps(order).encode() + b"\n")
        ready, _, _ = select.select([self._done], [], [], timeout)
        if not (ready and os.read(self._done, 1)):
            self.close()
        outputs, errors = (
            [_text(Path(folder, f"{rank}.{name}")) for rank in range(ranks)] for name in _STREAMS
        )
        return Launched(0, outputs, errors, _text(Path(folder, "summary")))

    @property
    def ended(self) -> bool:
        """Whether no more tests can be launched by it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and all that it has forked."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In a stem: fork ranks until there is nothing more to do. In a rank: go on to its tests."""
    if _PIPES not in os.environ:
        return None
    orders, done = map(int, os.environ.pop(_PIPES).split())
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()  # each rank captures for itself
    gc.freeze()  # else each would copy all memory as soon as it looks for garbage
    with os.fdopen(orders) as lines:
        for line in lines:
            order = json.loads(line)
            if launcher := os.fork():
                os.waitpid(launcher, 0)
                os.write(done, b".")
                continue
            os.environ |= order["environment"]
            _become_rank(order["ranks"], Path(order["folder"]))
            forget_modules(ROOT / "examples")  # one reads the number of ranks as it is
            capture.start_global_capturing()
            capture.suspend_global_capture()
            by_name = {item.nodeid: item for item in session.items}
            session.items[:] = [by_name[test] for test in order["tests"]]
            return None
    return True


def _become_rank(ranks: int, folder: Path) -> None:
    """Fork the ranks, and return in each of them; this process looks after them, and ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    running: dict[int, int] = {}
    for rank in range(ranks):
        if process := os.fork():
            running[process] = rank
            continue
        listener.close()
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), _FORKED: ""}
        for name, stream in _STREAMS.items():
            file = os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, stream)
        return
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        _look_after(running, folder)
        del store
    finally:
        os._exit(0)


def leave(status: int) -> None:
    """End this process at once if it is a forked rank: tidying up takes it seconds."""
    if _FORKED in os.environ:
        os._exit(status)


def _look_after(running: dict[int, int], folder: Path) -> None:
    """Wait until all ranks have ended; end them where one has failed, and write which."""
    while running:
        process, status = os.wait()
        rank = running.pop(process)
        if status and not (folder / "summary").exists():
            code = os.waitstatus_to_exitcode(status)
            (folder / "summary").write_text(f"Root Cause: rank {rank} ended with {code}")
            for other in running:
                os.kill(other, signal.SIGKILL)
