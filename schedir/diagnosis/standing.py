"""Where all ranks of a job stood when it failed: a file for `schedir blame`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from schedir.diagnosis.verdict import WORDS, Diagnosis, Position, diagnose
from schedir.errors import LoadError, ParseError
from schedir.files import write_text
from schedir.ir import Schedule, dumps, loads
from schedir.passes import forward_only

FILE = "schedir-positions.json"


@frozen
class Standing:
    """The list that ran, and the position of each rank: slice by slice, pipeline by pipeline.

    `ranks` has the number of each in the default process group; `ties` and `clips` are as in
    `diagnose`. The `slices` of a mesh wait for each other inside their stages, unknown to the list.
    `evaluating` are the turns of those in `ranks` that run only the list's forwards.
    """

    schedule: Schedule
    positions: tuple[Position, ...]
    ranks: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...] = ()
    clips: bool = False
    slices: int = 1
    evaluating: tuple[int, ...] = ()

    def diagnosis(self) -> Diagnosis:
        """Who is to blame, by the numbers in the default process group."""
        size = len(self.positions) // self.slices
        found = [self._of(slice(at, at + size)) for at in range(0, len(self.positions), size)]
        # A rank that is gone, or stopped, blocks another slice's inside a stage.
        states = {n: at.state for n, at in zip(self.ranks, self.positions, strict=True)}
        for state in ("gone", "silent", None):
            first = [
                one
                for one in found
                if state is None or state in (states[root.rank] for root in one.roots)
            ]
            if first:
                break
        return Diagnosis(
            tuple(root for one in first for root in one.roots),
            max((one.chain for one in first), key=len),
            {rank: others for one in found for rank, others in one.waits_for.items()},
        )

    def _of(self, part: slice) -> Diagnosis:
        """Who is to blame in one slice."""
        names, positions = self.ranks[part], self.positions[part]
        evaluating = [turn - part.start for turn in self.evaluating]
        lines = len(positions) // self.schedule.ranks
        found = diagnose(
            self.schedule,
            positions,
            ties=self.ties,
            clips=self.clips,
            pipelines=lines,
            evaluating=evaluating,
        )
        return Diagnosis(
            tuple(attrs.evolve(root, rank=names[root.rank]) for root in found.roots),
            tuple(names[rank] for rank in found.chain),
            {
                names[rank]: frozenset(names[other] for other in others)
                for rank, others in found.waits_for.items()
            },
        )

    def save(self, folder: Path) -> None:
        """Write the file into a folder, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "schedule": dumps(self.schedule),
            "positions": [attrs.astuple(each) for each in self.positions],
            "ranks": self.ranks,
            "ties": self.ties,
            "clips": self.clips,
            "slices": self.slices,
            "evaluating": self.evaluating,
        }
        write_text(folder / FILE, json.dumps(content))


def load_standing(folder: str) -> Standing | None:
    """Read the file from a folder; None if there is none. Raises LoadError if it is damaged."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        standing = Standing(
            loads(found["schedule"], file=str(path)),
            tuple(Position(*each) for each in found["positions"]),
            tuple(map(int, found["ranks"])),
            tuple(map(tuple, found["ties"])),
            bool(found["clips"]),
            int(found.get("slices", 1)),
            tuple(map(int, found.get("evaluating", ()))),
        )
        standing.diagnosis()
    except (OSError, ValueError, TypeError, KeyError, IndexError, ParseError) as error:
        raise LoadError(f"{path}: not the positions of a job: {error}") from None
    return standing


def stands(standing: Standing, found: Diagnosis) -> dict[int, str]:
    """Where each rank stands, in words."""
    schedule = standing.schedule
    evaluation = forward_only(schedule) if standing.evaluating else schedule
    said = {}
    for turn, (rank, position) in enumerate(zip(standing.ranks, standing.positions, strict=True)):
        own = evaluation if turn in standing.evaluating else schedule
        entries = own.actions[turn % schedule.ranks]
        place = ""
        if position.phase != "outside" and 0 <= position.index < len(entries):
            place = f" #{position.index} {entries[position.index]}"
        step = "" if position.step is None else f" step {position.step}"
        at = "at or after" if position.behind else "at"
        if position.state != "alive":
            said[rank] = f"is {position.state}, {at}{step}{place or ' no place of its list'}"
        elif position.phase == "outside":
            more = " or more" * position.behind
            said[rank] = f"makes no call: {position.call}{more} calls were made"
        elif position.phase == "waiting":
            others = sorted(found.waits_for.get(rank, ()))
            whom = f" for rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            place = place or f" {WORDS.get(position.index, 'its place')}"
            said[rank] = f"waits {at}{step}{place}{whom * bool(others)}"
        else:
            said[rank] = f"runs{' at or after' * position.behind}{step}{place}"
    return said
