"""Finds out who is to blame when a process fails, and says so once for all processes.

Each process watches the others; what it sees leads to one verdict, which the first to give it
prints:

    rank 2   is killed
    rank 0   sees that it is gone ─▶ reads all positions ─▶ the verdict: prints the root
    rank 1   sees that it is gone ─▶ finds the verdict: prints one line
             └─ if its main thread has not raised an error within half a second, it leaves
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, KeysView, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from time import monotonic, sleep
from typing import NoReturn

from attrs import define, evolve, field

from schedir.diagnosis import Root
from schedir.diagnosis.verdict import END, Position, Standing, State
from schedir.runtime.processes.failure import state_of, status_of
from schedir.runtime.processes.noticeboard import (
    ABSENT,
    ALIVE,
    BROKEN,
    CALL,
    CODE,
    LEFT,
    ORPHANED,
    STATE,
    TELL,
    Noticeboard,
    Place,
    Verdict,
)

PAUSE = 0.05
"""Seconds from look to look."""
GRACE = 0.5
"""Seconds for the main thread to raise its error."""
_SLOWER = 1.5  # times the median rank's compute, for a straggler
_MOST_LINES = 16
"""The most ranks whose positions are printed."""
_LAUNCHER_GONE = "launcher gone"


def host() -> str:
    """The host of this process. Containers of one host that do not see each other are several."""
    sees = [socket.gethostname()]
    with suppress(OSError):
        sees += [os.readlink("/proc/self/ns/pid"), str(os.stat("/dev/shm").st_dev)]
    return " ".join(sees)


@define(eq=False)
class Watch:
    """Watches the other processes of an executor, in all its pipelines.

    `own` is the number of this one, and `others` has the process ids of those that can be watched.
    `empty` makes the standing of what all run now, without their positions. `timeout` is in
    seconds.
    """

    board: Noticeboard
    own: int
    empty: Callable[[], Standing]
    timeout: float
    others: dict[int, int] = field(factory=dict)
    verdict: Verdict | None = None
    stops_on_signal: bool = False  # otherwise SIGTERM ends the process
    stop: bool = False  # some process has got it
    _gone: dict[int, str] = field(factory=dict)  # by number, how it has ended
    _lock: threading.RLock = field(factory=threading.RLock)
    _leave_at: float = field(factory=lambda: monotonic() + GRACE)
    _looked: float = 0.0
    _still: tuple[object, float] = None, 0.0  # where this process stands, and since when

    @property
    def _no_progress(self) -> str:
        return f"no progress for {self.timeout:.1f} s"

    # What the main thread tells, and asks.

    def blame(self, roots: Sequence[Root], reason: str) -> Verdict:
        """These are to blame, or nobody is known to be, unless the verdict has been given already;
        returns it."""
        causes = {root.rank: root.cause for root in roots}
        standing = self._standing()
        at = [
            evolve(each, state="gone", cause=causes[number]) if number in causes else each
            for number, each in zip(standing.ranks, standing.positions, strict=True)
        ]
        verdict = Verdict(tuple(roots), reason, self.own)
        return self._give(verdict, evolve(standing, positions=tuple(at)))

    def explain(self, cut_from: int | None, timed_out: bool, closes: bool) -> Verdict | None:
        """The verdict after this process has waited in vain: another's, or that a process has left
        unless this one closes too, or that the connection to one is cut, or by all positions. None
        if these do not tell."""
        until = monotonic() + (PAUSE if timed_out else GRACE)
        while self.verdict is None and monotonic() < until:
            sleep(PAUSE / 10)
            self._read_verdict()
        root = None if closes or self.verdict is not None else self.left()
        if root is not None:
            return self.blame([root], str(root))
        self._judge(cut_from, cut=not timed_out)
        return self.verdict

    def left(self) -> Root | None:
        """Of the processes that make no more calls, the one with the fewest; None if all still may
        call."""
        left = [(at.position.call, n) for n, at in self._places().items() if at.state == LEFT]
        if not left:
            return None
        calls, number = min(left)
        cause = (
            f"has closed its executor, or ended, after {calls} calls; all ranks must make the same"
        )
        return Root(number, calls, None, None, cause)

    def stragglers(self) -> tuple[tuple[int, float], ...]:
        """Each process whose compute lately took much longer than the median process's, and the
        ratio."""
        busy = {number: place.busy for number, place in self._places().items() if place.busy}
        usual = median_low(busy.values()) if busy else 0.0
        return tuple((n, each / usual) for n, each in busy.items() if each >= _SLOWER * usual)

    # What the watching thread does.

    def look(self, ended: Sequence[int]) -> None:
        """Look once; `ended` are the process ids that are known to have ended since."""
        self.board.beat()
        for number, process in self.others.items():
            if process in ended and number not in self._gone:
                self._see_gone(number, process)
        now = monotonic()
        if not self.board.far or now - self._looked > TELL:
            self._looked = now
            self._read_verdict()
            if self.stops_on_signal and not self.stop:
                self.stop = self.board.is_asked_to_stop()
            self.board.tell()
        if self.verdict is None:
            self._look_for_slow(now)
            self._leave_at = now + GRACE
        elif now > self._leave_at and self._gone and self.board.words[STATE] == ALIVE:
            leave(1, [self])  # the main thread waits, or runs, and does not know

    def _see_gone(self, number: int, process: int) -> None:
        place = self.board.read(number)
        how, failed = _ending(process)
        if place.state == LEFT and not failed:
            self.others = {n: p for n, p in self.others.items() if n != number}
            return
        if place.state == ALIVE and place.is_silent:  # its timer in C
            how = self._no_progress
        self._gone[number] = _LAUNCHER_GONE if place.state == ORPHANED else how
        if place.state in (ALIVE, ABSENT) or (failed and place.state != BROKEN):
            self._judge()

    def _read_verdict(self) -> None:
        """Look whether the verdict is there, and say it."""
        if self.verdict is None and (found := self.board.verdict()) is not None:
            self._take(found)

    def _judge(self, cut_from: int | None = None, cut: bool = False) -> None:
        """Give the verdict, if there is none, by where all ranks stand, or by the connection that
        was cut."""
        self._read_verdict()
        if self.verdict is not None:
            return
        standing = self._standing(cut)
        found = standing.diagnosis()
        if cut_from is not None and not any(at.state == "gone" for at in standing.positions):
            roots = tuple(self._cut(*pair) for pair in ((self.own, cut_from), (cut_from, self.own)))
            found = evolve(found, roots=roots, chain=(self.own, cut_from))
        if found.roots:
            lines = [f"chain: {' → '.join(map(str, found.chain))}"]
            lines += [f"rank {rank} {stand.words}" for rank, stand in found.stands.items()]
            reason = "; ".join(map(str, found.roots))
            self._give(Verdict(found.roots, reason, self.own), standing, lines[: _MOST_LINES + 1])

    def _standing(self, cut: bool = False) -> Standing:
        """Where all ranks stand; this one's connection may have been cut."""
        empty, places = self.empty(), self._places()
        at = (evolve(self._position(n, places[n]), cut=cut and n == self.own) for n in empty.ranks)
        evaluating = tuple(
            turn
            for turn, number in enumerate(empty.ranks)
            if not places[number].trains and 0 <= places[number].position.index < END
        )
        return evolve(empty, positions=tuple(at), evaluating=evaluating)

    def _position(self, number: int, place: Place) -> Position:
        """Where a process stands, and what has become of it."""
        state: State = "alive"
        cause = ""
        if number in self._gone:
            state, cause = "ended" if place.state == BROKEN else "gone", self._gone[number]
        elif place.state in (LEFT, ABSENT):
            call = self.board.read(self.own).position.call
            return Position(call, 0, "outside", cause="it has closed its executor, or ended")
        elif place.state == ORPHANED:
            state, cause = "gone", _LAUNCHER_GONE
        elif number != self.own and place.is_silent:
            state, cause = "silent", self._no_progress
        elif place.position.phase != "waiting":
            cause = self._no_progress
        return evolve(place.position, state=state, cause=cause, behind=number in self.board.far)

    def _cut(self, number: int, other: int) -> Root:
        """One end of a connection that was cut."""
        at = self.board.read(number).position
        return Root(number, at.call, None, None, f"lost its connection to rank {other}", at.step)

    def _places(self) -> dict[int, Place]:
        return {number: self.board.read(number) for number in sorted({*self.empty().ranks})}

    def _give(self, verdict: Verdict, standing: Standing, lines: Sequence[str] = ()) -> Verdict:
        """Give a verdict, unless another process was first; returns the one that stands."""
        with self._lock:
            if self.verdict is not None:
                return self.verdict
            given = self.board.give(verdict)
            if (folder := os.environ.get("SCHEDIR_DUMP_DIR")) and given.by == self.own:
                with suppress(OSError):
                    standing.save(Path(folder))
            self._take(given, lines)
            return given

    def _take(self, verdict: Verdict, lines: Sequence[str] = ()) -> None:
        """The verdict is known: say it, and end those who do not answer."""
        with self._lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
        roots = {root.rank: root.cause for root in verdict.roots}
        if verdict.by == self.own:
            said = [*(f"root: {root}" for root in verdict.roots), *lines]
        else:
            what = "roots are ranks" if len(roots) > 1 else "root is rank"
            why = f"{what} {', '.join(map(str, sorted(roots)))}" if roots else verdict.reason
            said = [f"rank {self.own} ended: {why}"]
        for line in said:
            say(line)
        self._end_the_silent(roots.keys())
        if roots.get(self.own) == self._no_progress:
            say("".join(["it stands at\n", *self._stack()]).rstrip())

    def _end_the_silent(self, roots: KeysView[int]) -> None:
        """SIGKILL to processes of this host that are to blame and do not answer. One that holds
        the interpreter's lock has the time to print its stack."""
        until = monotonic() + again(self.timeout) + 2 * PAUSE
        for number in roots & self.others.keys() - self._gone.keys():
            place, process = self.board.read(number), self.others[number]
            if place.is_silent and place.state != ABSENT:
                while monotonic() < until and state_of(process) not in ("T", "Z", ""):
                    sleep(PAUSE)
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _stack(self) -> list[str]:
        """Where the main thread stands in Python."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return [] if frame is None else traceback.format_stack(frame)[-_MOST_LINES // 2 :]

    def _look_for_slow(self, now: float) -> None:
        """Say once, after a part of the timeout, who is waited for."""
        here = self.board.words[CALL], self.board.words[CODE]
        if here != self._still[0]:
            self._still = here, now
        patience = min(self.timeout / 4, 60.0)
        if now - self._still[1] < patience:
            return
        self._still = here, math.inf
        found = self._standing().diagnosis()
        at = {rank: stand.words for rank, stand in found.stands.items()}
        waiting = [rank for rank in found.waits_for if at[rank].startswith("waits")]
        roots = [r.rank for r in found.roots if not at[r.rank].startswith("waits")]
        if not waiting or not roots:
            return
        first, root, where = min(waiting), roots[0], ""
        if self.own in roots:
            root = self.own
            if stack := self._stack():
                where = f", in {stack[-1].strip().splitlines()[0]}"
        elif self.own != first or not all(self.board.read(each).is_silent for each in roots):
            return  # one of those says it
        said = f"for {patience:.1f} s now rank {first} {at[first]}"
        say(f"slow: {said}; rank {root} {at[root]}{where}")

    def terminated(self) -> bool:
        """This process has got SIGTERM; returns whether it goes on until a call is over. A launcher
        sends it as well when a process is gone: then nothing can be saved."""
        if self.stops_on_signal and not self._gone and self.verdict is None:
            self.board.ask_to_stop()
            self.stop = True
        return self.stop


def _ending(process: int) -> tuple[str, bool]:
    """How a process of this host has ended, in words, and whether that is a failure. The launcher
    has not asked for it yet, so it is still known."""
    found = status_of(process)
    if not found:
        return "ended without a word", True
    code = os.waitstatus_to_exitcode(int(found[-1]))
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}", True
    return f"exited with code {code}", code > 0


def say(line: str) -> None:
    """Print a line of this process on stderr, at once."""
    with suppress(OSError, ValueError):
        os.write(2, f"schedir: {line}\n".encode())


def leave(status: int, watches: Sequence[Watch]) -> NoReturn:
    """End this process now, whatever its main thread does."""
    for watch in watches:
        watch.board.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def again(limit: float) -> float:
    """The seconds after which to set the timer in C again."""
    return min(0.5, limit / 10)
