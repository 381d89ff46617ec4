"""Programs that start at once: a process that has imported what they import forks them.

    a test ─ runs ► command ── its arguments, folder, environment and streams ──► server
                       ▲                                                            └ fork ►
                       └── the process of the program, and how it has ended ◄── keeper
                                                                                  └ fork ► program

`make test` runs most programs so: a folder for PATH has `python`, `schedir` and `torchrun`, which
take the arguments of the real ones. torchrun's agent is torch's own, and forks its ranks. What is
about the start of a process, or runs without `--quick`, takes the real ones.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.sweeps import is_quick

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(sys.executable).parent
FOLDER = "SCHEDIR_TEST_WARM"  # where the commands are: set for the processes of a session

# It ends as the program does, and a program whose command is gone is killed.
_COMMAND = """\
#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = [{name!r}, *sys.argv[1:]], os.getcwd(), dict(os.environ)
socket.send_fds(server, [json.dumps(given).encode() + b"\\n"], [0, 1, 2])
said = server.makefile()
program = int(said.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(program, number))
code = int(said.readline())
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def commands() -> Path:
    """The folder for PATH: of warm commands in `make test`, otherwise of the real ones."""
    if not is_quick():
        return REAL
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else _started()


@functools.cache
def _started() -> Path:
    """Start a server, for as long as this process lives."""
    place = tempfile.TemporaryDirectory(prefix="schedir-")
    address = str(Path(place.name, "server"))
    for name in ("python", "schedir", "torchrun"):
        file = Path(place.name, name)
        file.write_text(_COMMAND.format(python=sys.executable, address=address, name=name))
        file.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    os.environ[FOLDER] = place.name

    @atexit.register
    def end() -> None:
        process.communicate()
        place.cleanup()

    return Path(place.name)


def _serve(listener: socket.socket) -> None:
    """Fork programs until stdin closes."""
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    import schedir.cli
    import schedir.runtime
    import schedir.training  # noqa: F401

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports the most
    SubprocessHandler._popen = _fork_rank  # type: ignore[assignment, method-assign]
    gc.freeze()  # else each fork would copy all memory as soon as it looks for garbage
    while True:
        ready, _, _ = select.select([0, listener.fileno()], [], [])
        if 0 in ready:
            return
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _keep(connection)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(connection: socket.socket) -> None:
    """Fork a program, say how it ends, and end."""
    received, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not received.endswith(b"\n"):
        received += connection.recv(1 << 20)
    arguments, cwd, environment = json.loads(received)
    program = os.fork()
    if not program:
        connection.close()
        os.chdir(cwd)
        _become(arguments, environment, streams)
    for stream in streams:
        os.close(stream)
    connection.sendall(b"%d\n" % program)
    asked = connection.fileno()
    ready, _, _ = select.select([os.pidfd_open(program), asked], [], [])
    if asked in ready:
        os.killpg(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % code)
    os._exit(0)


class _Rank:
    """A forked rank, with what torchrun's agent uses of a `subprocess.Popen`."""

    def __init__(self, process: int) -> None:
        self.pid = process
        self.returncode: int | None = None

    def poll(self) -> int | None:
        # Not reaped: other ranks read in /proc how it has ended, if late on a busy machine.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            exited = ended.si_code == os.CLD_EXITED
            self.returncode = ended.si_status if exited else -ended.si_status
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.005)
        return self.returncode


def _fork_rank(handler: Any, arguments: Sequence[str], environment: Mapping[str, str]) -> _Rank:
    """Fork a rank where torchrun's agent starts a process."""
    if process := os.fork():
        return _Rank(process)
    files = (handler._stdout or sys.stdout, handler._stderr or sys.stderr)
    _become(["python", *arguments[1:]], environment, [0, *(file.fileno() for file in files)])
    raise AssertionError


def _become(arguments: Sequence[str], environment: Mapping[str, str], streams: list[int]) -> None:
    """Run a program as if this process had been started for it, and end."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    os.environ.clear()
    os.environ |= environment
    coding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdin = open(0, encoding=coding, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=coding, errors=errors or None, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, coding, "backslashreplace", closefd=False)  # noqa: SIM115
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in ("", str(ROOT)))]
    code: object = 0  # or a message
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -2 if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    if code == -2:  # as the interpreter ends after Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run(arguments: Sequence[str]) -> None:
    """Run `python`, `schedir` or `torchrun` with these arguments."""
    name, *rest = arguments
    if name == "torchrun":
        import torch.distributed.run

        torch.distributed.run.main(rest)
        return
    if name == "schedir":
        rest = ["-m", "schedir", *rest]
    if rest[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        del rest[0]
    if rest[0] == "-m":
        sys.argv, sys.path[:0] = rest[1:], [os.getcwd()]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[2:]], [""]
        exec(compile(rest[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:0] = rest, [str(Path(rest[0]).resolve().parent)]
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
