"""Finds out who is to blame when a process fails, and says so once for all processes.

Each process watches the others; what it sees leads to one verdict, which the first to give it
prints:

    rank 2   is killed
    rank 0   sees that it is gone ─▶ reads all positions ─▶ the verdict: prints the root
    rank 1   sees that it is gone ─▶ finds the verdict: prints one line
             └─ if its main thread has not raised an error within half a second, it leaves
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from time import monotonic, sleep
from typing import NoReturn

from attrs import define, evolve, field, frozen

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
    NOWHERE,
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


@frozen
class Member:
    """A process that takes part: its host, and its process id there."""

    host: str
    process: int

    @classmethod
    def here(cls) -> Member:
        """This process. Containers of one host that do not see each other count as hosts."""
        sees = [socket.gethostname()]
        with suppress(OSError):
            sees += [os.readlink("/proc/self/ns/pid"), str(os.stat("/dev/shm").st_dev)]
        return cls(" ".join(sees), os.getpid())


@define(eq=False)
class Watch:
    """Watches the other processes of an executor, in all its pipelines.

    `members` are all processes and `own` the number of this one. `empty` makes the standing of what
    all run now, without their positions. `timeout` is in seconds.
    """

    board: Noticeboard
    _members: Sequence[Member]
    own: int
    empty: Callable[[], Standing]
    timeout: float
    others: dict[int, int] = field(init=False)
    """The process ids of those that can be watched, by number."""
    verdict: Verdict | None = None
    stops_on_signal: bool = False  # otherwise SIGTERM ends the process
    stop: bool = False  # some process has got it
    _places: dict[int, Place] = field(factory=dict)  # the last that was read of each process
    _gone: dict[int, str] = field(factory=dict)  # by number, how it has ended
    _lock: threading.RLock = field(factory=threading.RLock)
    _leave_at: float | None = None
    _told: float = 0.0
    _looked: float = 0.0
    _still: tuple[object, float] = None, 0.0  # where this process stands, and since when
    _slow_said: bool = False

    def __attrs_post_init__(self) -> None:
        near = {*range(len(self._members))} - self.board.far - {self.own}
        can = hasattr(os, "pidfd_open")
        self.others = {n: self._members[n].process for n in sorted(near) if can}
        self._place(self.own)

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
        if self.verdict is None and not closes and (root := self.left()) is not None:
            self.blame([root], str(root))
        if self.verdict is None:
            self._judge(cut_from, cut=not timed_out)
        return self.verdict

    def left(self) -> Root | None:
        """Of the processes that make no more calls, the one with the fewest; None if all still may
        call."""
        places = self._all_places()
        left = [(at.position.call, n) for n, at in places.items() if at.state == LEFT]
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
        busy = {n: place.busy for n, place in self._all_places().items() if place.busy}
        if not busy:
            return ()
        usual = median_low(busy.values())
        ratios = ((n, seconds / usual) for n, seconds in sorted(busy.items()))
        return tuple((n, ratio) for n, ratio in ratios if ratio >= _SLOWER)

    def own_position(self) -> Position:
        """Where this process stands."""
        return self._place(self.own).position

    def members_here(self, roots: Iterable[Root]) -> Sequence[int]:
        """The ids of the roots' processes on this host, without this process."""
        numbers = {root.rank for root in roots} - self.board.far - {self.own}
        return [self._members[number].process for number in numbers]

    def break_off(self) -> None:
        """The main thread raises an error: its caller decides what comes then."""
        self.board.words[STATE] = BROKEN

    def be_orphaned(self) -> None:
        """This process ends because its launcher is gone."""
        self.board.words[STATE] = ORPHANED
        self.board.tell()

    @property
    def is_broken(self) -> bool:
        """Whether the main thread has taken over."""
        return self.board.words[STATE] != ALIVE

    # What the watching thread does.

    def look(self, ended: Sequence[int]) -> None:
        """Look once; `ended` are the process ids that are known to have ended since."""
        self.board.beat()
        for number, process in self.others.items():
            if process in ended and number not in self._gone:
                self._see_gone(number, process)
        now = monotonic()
        if now - self._looked > (TELL / 2 if self.board.far else 0.0):
            self._looked = now
            self._read_verdict()
            if self.stops_on_signal and not self.stop:
                self.stop = self.board.is_asked_to_stop()
        if now - self._told > TELL:
            self._told = now
            self.board.tell()
        if self.verdict is None:
            self._look_for_slow(now)
        elif self._leave_at is None:
            self._leave_at = now + GRACE
        elif now > self._leave_at and self._gone and not self.is_broken:
            leave(1, [self])  # the main thread waits, or runs, and does not know

    def _see_gone(self, number: int, process: int) -> None:
        place = self._place(number)
        how, failed = _ending(process)
        if place.state == ALIVE and place.is_silent:  # its timer in C
            how = self._no_progress
        if place.state == ORPHANED:
            how = "launcher gone"
        if place.state == LEFT and not failed:
            self.others = {n: p for n, p in self.others.items() if n != number}
            return
        self._gone[number] = how
        if self.verdict is None and (place.state in (ALIVE, ABSENT) or failed):
            self._read_verdict()
            if self.verdict is None and place.state != BROKEN:
                self._judge()

    def _read_verdict(self) -> None:
        """Look whether the verdict is there, and say it."""
        if self.verdict is None and (found := self.board.verdict()) is not None:
            self._take(found)

    def _judge(self, cut_from: int | None = None, cut: bool = False) -> None:
        """Give the verdict by where all ranks stand, or by the connection that was cut."""
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
        """Where all ranks stand."""
        empty, places = self.empty(), self._all_places()
        at = [self._position(number, places[number]) for number in empty.ranks]
        if cut:
            here = empty.ranks.index(self.own)
            at[here] = evolve(at[here], cut=True)
        evaluating = tuple(
            turn
            for turn, number in enumerate(empty.ranks)
            if not places[number].trains and 0 <= places[number].position.index < END
        )
        return evolve(empty, positions=tuple(at), evaluating=evaluating)

    def _position(self, number: int, place: Place) -> Position:
        """Where a process stands, and what has become of it."""
        position = place.position
        if number in self._gone:
            state: State = "ended" if place.state == BROKEN else "gone"
            return evolve(position, state=state, cause=self._gone[number])
        if place.state in (LEFT, ABSENT):
            call = self.own_position().call
            return Position(call, 0, "outside", cause="it has closed its executor, or ended")
        position = evolve(position, behind=number in self.board.far)
        if place.state == ORPHANED:
            return evolve(position, state="gone", cause="launcher gone")
        if number != self.own and place.is_silent:
            position = evolve(position, state="silent")
        if position.state == "silent" or position.phase != "waiting":
            return evolve(position, cause=self._no_progress)
        return position

    def _cut(self, number: int, other: int) -> Root:
        """One end of a connection that was cut."""
        at = self._place(number).position
        return Root(number, at.call, None, None, f"lost its connection to rank {other}", at.step)

    def _place(self, number: int) -> Place:
        """The place of a process, or the last one that could be read."""
        found = self.board.read(number) or self._places.get(number, NOWHERE)
        self._places[number] = found
        return found

    def _all_places(self) -> dict[int, Place]:
        return {number: self._place(number) for number in range(len(self._members))}

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
        roots = {root.rank for root in verdict.roots}
        if verdict.by == self.own:
            for root in verdict.roots:
                say(f"root: {root}")
            for line in lines:
                say(line)
        elif roots:
            what = "roots are ranks" if len(roots) > 1 else "root is rank"
            say(f"rank {self.own} ended: {what} {', '.join(map(str, sorted(roots)))}")
        else:
            say(f"rank {self.own} ended: {verdict.reason}")
        self._end_the_silent(roots)
        if any((r.rank, r.cause) == (self.own, self._no_progress) for r in verdict.roots):
            say("".join(["it stands at\n", *self._stack()]).rstrip())

    def _end_the_silent(self, roots: set[int]) -> None:
        """SIGKILL to processes of this host that are to blame and do not answer. One that holds
        the interpreter's lock has the time to print its stack."""
        until = monotonic() + again(self.timeout) + 2 * PAUSE
        for number in roots & self.others.keys() - self._gone.keys():
            place, process = self._place(number), self.others[number]
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
            self._still, self._slow_said = (here, now), False
        patience = min(self.timeout / 4, 60.0)
        if self._slow_said or now - self._still[1] < patience:
            return
        self._slow_said = True
        found = self._standing().diagnosis()
        at = {rank: stand.words for rank, stand in found.stands.items()}
        waiting = [rank for rank in found.waits_for if at[rank].startswith("waits")]
        roots = [r.rank for r in found.roots if not at[r.rank].startswith("waits")]
        if not waiting or not roots:
            return
        silent = all(self._place(rank).is_silent for rank in roots)
        if self.own in roots or (silent and self.own == min(waiting)):
            first, root, where = min(waiting), roots[0], ""
            if self.own in roots:
                root = self.own
                if stack := self._stack():
                    where = f", in {stack[-1].strip().splitlines()[0]}"
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
    status = int(found[-1])
    if number := status & 0x7F:
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}", True
    ended = status >> 8
    return f"exited with code {ended}", bool(ended)


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
