"""What the rows have shown so far, in files that are written after each: a run may end anywhere.

gpu_hour.md      a table for each part, with the last words of what failed
gpu_hour.jsonl   the same for the next run, which goes on from there
gpu_hour.log     all that every process has printed
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from on_gpu.checks import PARTS, singles
from on_gpu.launch import Check, Outcome
from schedir.files import write_text

_BEGUN = "begun"
_KEPT = 4000  # characters of what a process has printed, in the table
_LOGGED = 1_000_000  # in the log
_NOTE = 1000
_HEAD = "| check | result | seconds | |\n| --- | --- | --- | --- |"


class Results:
    """The outcomes by row, on one device, kept beside the Markdown at `path`."""

    def __init__(self, path: Path, device: str) -> None:
        self._device = device
        self._table, self._lines = path, path.with_suffix(".jsonl")
        self._log = path.with_suffix(".log")
        self.outcomes: dict[str, Outcome] = {}
        self._cut_off: Counter[str] = Counter()
        if self._lines.exists():
            for line in self._lines.read_text(encoding="utf-8").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            found = json.loads(line)
        except ValueError:  # it was cut off, too
            return
        if found.pop("device") != self._device:
            return
        outcome = Outcome(**found)
        if outcome.state == _BEGUN:
            self._cut_off[outcome.name] += 1
            self.outcomes.pop(outcome.name, None)
        else:
            self._cut_off[outcome.name] = 0
            self.outcomes[outcome.name] = outcome

    def begin(self, check: Check) -> bool:
        """Note that a row is begun. Says whether it may: runs that ended in it twice are enough."""
        if self._cut_off[check.name] > 1:
            note = "twice a run has ended in it"
            self.add(Outcome(check.name, "was cut off", note=note, undone=check.pieces))
            return False
        self._append(Outcome(check.name, _BEGUN))
        return True

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome."""
        with self._log.open("a", encoding="utf-8") as log:
            for number, text in enumerate(outcome.printed):
                print(f"===== {outcome.name}: {outcome.state}, process {number}", file=log)
                print(text[-_LOGGED:], file=log)
        kept = [text[-_KEPT:] for text in outcome.printed] if outcome.bad else []
        self._append(attrs.evolve(outcome, printed=kept))

    def _append(self, outcome: Outcome) -> None:
        line = json.dumps({"device": self._device, **attrs.asdict(outcome)})
        with self._lines.open("a", encoding="utf-8") as lines:
            print(f"\n{line}", file=lines)  # a line that was cut off ends here
        self._take(line)

    def of_part(self, part: str) -> list[Check]:
        """Its rows, and single ones for what a row that failed has left undone."""
        found = {check.name: check for check in PARTS[part]}
        for check in PARTS[part]:
            outcome = self.outcomes.get(check.name)
            if outcome and outcome.bad:
                undone = [one for one in singles(check) if one.pieces[0] in outcome.undone]
                found = {**{one.name: one for one in undone}, **found}
        return sorted(found.values(), key=lambda check: check not in PARTS[part])

    def write(self, missed: Mapping[str, str]) -> None:
        """Write the table; `missed` says why rows were not reached."""
        text, left = [], dict(self.outcomes)
        left |= {name: Outcome(name, "not reached", note=why) for name, why in missed.items()}
        for part, checks in PARTS.items():
            names = [one.name for check in checks for one in (check, *singles(check))]
            outcomes = [left.pop(name) for name in names if name in left]
            if outcomes:
                text += [f"## Part {part}", "", _HEAD, *map(line_of, outcomes), ""]
        write_text(self._table, "\n".join([*text, *failures(self.outcomes.values())]) + "\n")


def line_of(outcome: Outcome) -> str:
    """A line of the table."""
    note = outcome.note.replace("|", "\\|")[:_NOTE]
    return f"| {outcome.name} | {outcome.state} | {outcome.seconds:.0f} | {note} |"


def failures(outcomes: Iterable[Outcome]) -> Sequence[str]:
    """What the processes of all that failed have printed last."""
    return [
        line
        for outcome in outcomes
        if outcome.bad
        for number, text in enumerate(outcome.printed)
        for line in (
            f"### {outcome.name}: {outcome.state}, process {number}",
            "",
            "```",
            text.strip(),
            "```",
            "",
        )
    ]
