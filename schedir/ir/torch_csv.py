"""torch.distributed.pipelining's CSV: one row per rank, one action per cell; an empty cell is idle.

The format has two dialects, compute only and with communication. Its tokens differ from schedir's
for SEND_F, RECV_F, SEND_B and RECV_B, and it has no OPTIM_STEP and no weight versions. torch's
UNSHARDs and RESHARDs stand for all its stages, sharded or not: the reader leaves them out, with a
warning, and `schedir.shard` lists its own. The overlapped pair `(0F1;7B0)OVERLAP_F_B` is an entry
of two actions; batches of sends and receives have no form. Spaces and tabs may stand around a cell,
and a row ends in LF or CR LF.

Older torch used the same words with another meaning. B was the gradient of the input, which is I
now; BW was the full backward, which is B now; and `0SEND_F1_1RECV_B0` was two actions in one cell.
The reader refuses a file that is clearly of the older form. A file without W means the same in
both.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import PurePath

import attrs
import numpy as np

from schedir.ir.action import MAX_NUMBER, Action, Entry, Together
from schedir.ir.columns import Columns, columns_of
from schedir.ir.kinds import COMMUNICATION, COMPUTE, STAGE_WIDE, Kind
from schedir.ir.schedule import Schedule
from schedir.ir.tokens import NUMBER, Reader, clip, parts_of

logger = logging.getLogger("schedir")

_TO_TORCH = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.SEND_ACT: "SEND_F",
    Kind.RECV_ACT: "RECV_F",
    Kind.SEND_GRAD: "SEND_B",
    Kind.RECV_GRAD: "RECV_B",
    Kind.REDUCE_GRAD: "REDUCE_GRAD",
}
_FROM_TORCH = {token: kind for kind, token in _TO_TORCH.items()}
_GATHERING = {Kind.UNSHARD: "UNSHARD", Kind.RESHARD: "RESHARD"}
_OLD_BACKWARD = (
    "older torch wrote B for the gradient of the input alone, which is I now, and BW for the full "
    "backward, which is B now: write them so"
)

_TOKEN = re.compile(rf"({NUMBER})([A-Z][A-Z_]*)({NUMBER})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_OLD_BATCH = re.compile(rf"{NUMBER}(SEND_[FB]){NUMBER}_{NUMBER}(RECV_[FB]){NUMBER}")
_CELL = re.compile(r"[^, \t][^,]*")
_BLANKS = " \t"
_MOST_NAMED = 8  # in a warning


def dumps_torch_csv(schedule: Schedule, compute_only: bool = False) -> tuple[str, list[str]]:
    """The schedule in torch's CSV, and one sentence for each thing that the format can't hold.

    The compute-only dialect has no REDUCE_GRAD, UNSHARD or RESHARD: torch lists its own when it
    adds communication.
    """
    dropped: Counter[str] = Counter()
    words = {
        kind: token
        for kind, token in (_TO_TORCH | _GATHERING).items()
        if kind in COMPUTE or not compute_only
    }
    rows = (
        ",".join(cell for entry in entries for cell in _cells(entry, words, dropped))
        for entries in schedule.actions
    )
    text = "\n".join(rows) + "\n"
    lost = [what if count == 1 else f"{what} ({count} times)" for what, count in dropped.items()]
    return text, lost


def _cells(entry: Entry, words: dict[Kind, str], dropped: Counter[str]) -> list[str]:
    """The cells of an entry, in torch's `words`; `dropped` counts what they can't hold."""
    actions = entry.actions if isinstance(entry, Together) else (entry,)
    cells = []
    for action in actions:
        token = words.get(action.kind)
        if token is None:
            has = (
                f"torch has no {action.kind}"
                if action.kind not in _TO_TORCH | _GATHERING
                else "torch lists its own"
            )
            dropped[f"{action} is left out: {has}"] += 1
            continue
        if action.version is not None:
            dropped[f"{action} loses its weight version: torch has none"] += 1
        microbatch = "" if action.microbatch is None else action.microbatch
        cells.append(f"{action.stage}{token}{microbatch}")
    if len(actions) == 1:
        return cells
    if actions[0].kind in COMMUNICATION:
        dropped[f"{entry} is taken apart: torch has no batch of sends and receives"] += 1
        return cells
    return [f"({';'.join(cells)})OVERLAP_F_B"]


def loads_torch_csv(text: str | bytes, file: str = "<string>") -> Schedule:
    """Parse torch's CSV, either dialect. The highest microbatch decides how many there are.

    A stage lives on the ranks that run its FORWARD. Raises ParseError with line and column.
    """
    return _Reader(text, file).schedule()


class _Reader(Reader):
    def __init__(self, text: str | bytes, file: str) -> None:
        super().__init__(text, file)
        self.left_out: Counter[str] = Counter()  # how many, by kind
        self.left_out_names: dict[str, None] = {}

    def schedule(self) -> Schedule:
        nothing = "the file holds no action of any microbatch"
        if not re.search(r"[^, \t\r\n]", self.text):
            raise self.error(nothing, 0)
        # Of millions of lines most are empty, in a file that is none of torch's: these cost least.
        columns = columns_of(self._row(*row) if row[0] < row[1] else () for row in self._rows())
        if self.left_out:
            self._warn()
        microbatches = 1 + int(columns.microbatch.max(initial=-1))
        if microbatches == 0:
            raise self.error(nothing, 0)
        self._refuse_old(columns)
        stem = PurePath(self.file).stem
        name = re.sub(r"[^\w .-]", "-", stem, flags=re.ASCII).strip(" -") or "torch-csv"
        return Schedule(name, microbatches, self._placement(columns), columns)

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Where each row starts and ends."""
        start = 0
        last = len(self.text.rstrip(" \t\r"))
        while start < last:
            end = self.text.find("\n", start)
            if end < 0:
                end = last
            yield start, end - self.text.endswith("\r", start, end)
            start = end + 1

    def _row(self, start: int, end: int) -> Iterator[Entry]:
        for match in _CELL.finditer(self.text, start, end):
            cell = match[0].rstrip(_BLANKS)
            read = self._pair if cell.startswith("(") else self._action
            entry = read(cell, match.start())
            if entry is not None:
                yield entry

    def _pair(self, cell: str, offset: int) -> Together:
        """An overlapped pair."""
        match = _OVERLAP.fullmatch(cell)
        if match is None:
            raise self.error(
                f"{clip(cell)} is not a composite action; one reads (0F1;7B0)OVERLAP_F_B", offset
            )
        parts: list[Action] = []
        for part, place in parts_of(match[1], ";", offset + 1):
            token = part.strip(_BLANKS)
            if not token:
                raise self.error("an empty part in a composite action", place)
            at = place + part.index(token[0])
            action = self._action(token, at)
            if action is None or action.kind in COMMUNICATION:
                raise self.error(f"{clip(token)} can't be a part of an overlapped pair", at)
            parts.append(action)
            if len(parts) > 2:
                break
        try:
            return Together(tuple(parts))
        except ValueError as error:
            raise self.error(f"{clip(cell)}: {error}", offset) from None

    def _action(self, token: str, offset: int) -> Action | None:
        """The action of a token; None if it gathers weights."""
        action = self.read(_action, token, offset)
        if action is None:
            self.left_out[token.strip("0123456789")] += 1
            if len(self.left_out_names) <= _MOST_NAMED:
                self.left_out_names[token] = None
        return action

    def _warn(self) -> None:
        names = list(self.left_out_names)
        more = " and others" if len(names) > _MOST_NAMED else ""
        logger.warning(
            "%s: left out what schedir.shard lists anew: %s (%s%s)",
            self.file,
            ", ".join(f"{number} {kind}" for kind, number in self.left_out.items()),
            " ".join(names[:_MOST_NAMED]),
            more,
        )

    def _refuse_old(self, columns: Columns) -> None:
        """Raise ParseError if a B stands for the gradient of the input, as in older torch."""
        backwards, weights = columns.where(Kind.BACKWARD), columns.where(Kind.BACKWARD_WEIGHT)
        old = backwards[columns.alike(backwards, weights)]
        if len(old) and not columns.is_kind(Kind.BACKWARD_INPUT).any():
            action = columns.action(old[0])
            found = re.search(rf"(?<![0-9]){action}(?![0-9])", self.text)
            weight = attrs.evolve(action, kind=Kind.BACKWARD_WEIGHT)
            raise self.error(
                f"'{action}' is not a full backward, because there is '{weight}': {_OLD_BACKWARD}",
                found.start() if found else 0,
            )

    def _placement(self, columns: Columns) -> Iterator[tuple[int, ...]]:
        """The ranks that run each stage's FORWARD; without a FORWARD, the ranks that name the
        stage."""
        stages, runs = np.unique(columns.stage), columns.is_kind(Kind.FORWARD)
        missing = np.flatnonzero(stages != np.arange(len(stages)))
        if len(missing):
            raise self.error(
                f"stage {missing[0]} is on no rank, though stage {stages[-1]} is on one", 0
            )
        runs |= ~np.isin(columns.stage, columns.stage[runs])
        held = np.unique(columns.stage[runs] * columns.ranks + columns.rank[runs]).tolist()
        for _, of_stage in groupby(held, lambda each: each // columns.ranks):
            yield tuple(each % columns.ranks for each in of_stage)


@lru_cache(maxsize=1 << 16)
def _action(token: str) -> Action | None:
    """The action of a token; None if it gathers weights. Raises ValueError."""
    match = _TOKEN.fullmatch(token)
    if match is None and _OLD_BATCH.fullmatch(token):
        raise ValueError(f"{clip(token)} is older torch's: write its send and receive as two cells")
    if match is None:
        raise ValueError(f"{clip(token)} is not an action of torch's CSV, such as 2F0 or 3SEND_F1")
    stage, name, microbatch = match.groups()
    if name in _GATHERING.values():
        return None
    kind = _FROM_TORCH.get(name)
    if name == "BW":
        raise ValueError(f"{clip(token)}: {_OLD_BACKWARD}")
    if kind is None:
        known = " ".join([*_FROM_TORCH, *_GATHERING.values()])
        raise ValueError(f"unknown action {clip(name)}; known: {known}")
    if (microbatch is None) != (kind in STAGE_WIDE):
        need = "names no microbatch" if kind in STAGE_WIDE else "needs a microbatch"
        raise ValueError(f"{clip(token)}: {name} {need}")
    if microbatch is None:
        return Action(kind, int(stage))
    if int(microbatch) >= MAX_NUMBER:  # their number is one more
        raise ValueError(f"{clip(token)}: a schedule has at most {MAX_NUMBER} microbatches")
    return Action(kind, int(stage), int(microbatch))
