"""By how much the clocks of two processes differ.

    process 0              ┌─▶ arrived ─ left ─┐            by its clock all go
    process 1     asked ───┘                   └──▶ heard    has one of its own

What is sent arrives later, so 0's clock is ahead of 1's by at most arrived − asked, and by at least
left − heard. Each round gives such an interval, and the offset is in all of them: their
intersection goes by the quickest message of each direction (Cristian, Probabilistic clock
synchronization, 1989; NTP's four stamps, RFC 5905, section 8). From two readings some time apart
comes the drift between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schedir.runtime.processes.groups import Group
from schedir.runtime.processes.message import Message

now: Callable[[], int] = perf_counter_ns
"""Nanoseconds on the clock of this process; whoever keeps the time of a step reads it here."""

Nanoseconds: TypeAlias = NDArray[np.int64]

_ROUNDS = 32
_FASTEST_DRIFT = 1000e-6  # of two clocks: an operating system corrects each by half of it at most


@attrs.frozen
class Round:
    """One question and its answer: `asked` and `heard` by the clock of who asks, `arrived` and
    `left` by the other one, in nanoseconds."""

    asked: int
    arrived: int
    left: int
    heard: int


@attrs.frozen
class Reading:
    """How far process 0's clock was ahead when this one showed `at`: by `offset`, within `error`;
    in nanoseconds."""

    at: int
    offset: float = 0.0
    error: float = 0.0


def reading_of(rounds: Sequence[Round]) -> Reading:
    """What some rounds tell together, at the time of the quickest."""
    best = min(rounds, key=lambda r: (r.heard - r.asked) - (r.left - r.arrived))
    at = (best.asked + best.heard) // 2
    most = min(r.arrived - r.asked + _FASTEST_DRIFT * abs(r.asked - at) for r in rounds)
    least = max(r.left - r.heard - _FASTEST_DRIFT * abs(r.heard - at) for r in rounds)
    return Reading(at, (most + least) / 2, abs(most - least) / 2)


def reading_of_own() -> Reading:
    """Process 0's: it is by this clock that all go."""
    return Reading(now())


@attrs.frozen
class Alignment:
    """From a clock to process 0's, between two readings, from one of which to the other it has
    drifted evenly."""

    first: Reading
    last: Reading

    @property
    def error(self) -> float:
        """By how many nanoseconds an aligned time may be wrong."""
        return max(self.first.error, self.last.error)

    def aligned(self, times: Nanoseconds) -> Nanoseconds:
        """Times of this clock as process 0's would have shown them; 0 stands for none."""
        between = max(self.last.at - self.first.at, 1)
        drift = (self.last.offset - self.first.offset) / between
        # Offsets may be larger than what a float has digits for; what they change by is small.
        base = int(self.first.offset)
        rest = self.first.offset - base + drift * (times - self.first.at)
        aligned: Nanoseconds = times + base + np.rint(rest).astype(np.int64)
        return np.where(times == 0, 0, aligned)


class ClockLine:
    """To the clock of another process, `number` in the group."""

    def __init__(self, group: Group, number: int, tag: int) -> None:
        self._group, self._number, self._tag = group, number, tag

    def _send(self, *stamps: int) -> Message:
        content = torch.tensor(stamps, dtype=torch.int64, device="cpu")
        return Message(self._group.send, content, self._number, self._tag, "its clock to reach")

    def _expect(self, size: int) -> Message:
        buffer: Tensor = torch.empty(size, dtype=torch.int64, device="cpu")
        return Message(self._group.recv, buffer, self._number, self._tag, "the clock of")

    def ask(self) -> Reading:
        """Read the other clock beside one's own; the other side has to `answer`."""
        rounds = []
        for _ in range(_ROUNDS):
            answer = self._expect(2)  # posted before it can come, and so found at once
            asked = now()
            question = self._send(0)
            stamps = answer.wait()
            heard = now()
            question.wait()
            arrived, left = stamps.tolist()
            rounds.append(Round(asked, arrived, left, heard))
        return reading_of(rounds)

    def answer(self) -> None:
        """Tell the other side what one's own clock shows."""
        question = self._expect(1)
        for number in range(_ROUNDS):
            question.wait()
            arrived = now()
            if number + 1 < _ROUNDS:
                question = self._expect(1)
            self._send(arrived, now()).wait()
