"""Estimates the offset between the clocks of two processes.

    process 0              ┌─▶ arrived ─ left ─┐            by its clock all go
    process 1     asked ───┘                   └──▶ heard    has one of its own

A message arrives after it is sent. So 0's clock is ahead of 1's by at most arrived − asked, and by
at least left − heard. Each round gives such an interval, and the offset lies in all of them: the
quickest message of each direction bounds their intersection (Cristian, Probabilistic clock
synchronization, 1989; NTP's four stamps, RFC 5905, section 8). Two readings some time apart give
the drift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from schedir.runtime.processes.groups import Group, Message

now: Callable[[], int] = perf_counter_ns
"""Nanoseconds on the clock of this process; whoever keeps the time of a step reads it here."""

Nanoseconds: TypeAlias = NDArray[np.int64]

_ROUNDS = 32
_ANSWER = "the clock of"  # what a wait is for, in words
_FASTEST_DRIFT = 1000e-6  # of two clocks: an operating system corrects each by half of it at most


@attrs.frozen
class Round:
    """One question and its answer: `asked` and `heard` by the asking process's clock, `arrived` and
    `left` by the other's, in nanoseconds."""

    asked: int
    arrived: int
    left: int
    heard: int


@attrs.frozen
class Reading:
    """The `offset` by which process 0's clock was ahead when this clock showed `at`, within
    `error`; all in nanoseconds."""

    at: int
    offset: float = 0.0
    error: float = 0.0


def reading_of(rounds: Sequence[Round]) -> Reading:
    """The reading of several rounds, at the time of the quickest."""
    best = min(rounds, key=lambda r: (r.heard - r.asked) - (r.left - r.arrived))
    at = (best.asked + best.heard) // 2
    most = min(r.arrived - r.asked + _FASTEST_DRIFT * abs(r.asked - at) for r in rounds)
    least = max(r.left - r.heard - _FASTEST_DRIFT * abs(r.heard - at) for r in rounds)
    return Reading(at, (most + least) / 2, abs(most - least) / 2)


@attrs.frozen
class Alignment:
    """Converts times of a clock to process 0's, between two readings; the drift between these is
    taken to be even."""

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


def ask(group: Group, number: int, tag: int) -> Reading:
    """Compare this clock with that of another process, `number` in the group, which must call
    `answer`."""
    rounds = []
    for _ in range(_ROUNDS):
        # Posted before it can come, and so found at once.
        answered = group.expect(2, number, tag, _ANSWER)
        asked = now()
        question = _tell(group, number, tag, 0)
        stamps = answered.wait()
        heard = now()
        question.wait()
        arrived, left = stamps.tolist()
        rounds.append(Round(asked, arrived, left, heard))
    return reading_of(rounds)


def answer(group: Group, number: int, tag: int) -> None:
    """Tell another process what one's own clock shows."""
    question = group.expect(1, number, tag, _ANSWER)
    for left in reversed(range(_ROUNDS)):
        question.wait()
        arrived = now()
        if left:
            question = group.expect(1, number, tag, _ANSWER)
        _tell(group, number, tag, arrived, now()).wait()


def _tell(group: Group, number: int, tag: int, *stamps: int) -> Message:
    content = torch.tensor(stamps, dtype=torch.int64, device="cpu")
    return group.tell(content, number, tag, "its clock")
