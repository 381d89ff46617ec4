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
from itertools import chain, groupby, islice
from pathlib import PurePath

import attrs
import numpy as np

from schedir.ir.action import MAX_NUMBER, Action, Entry, Together, flat
from schedir.ir.columns import Columns, columns_of
from schedir.ir.kinds import COMMUNICATION, COMPUTE, GATHERS, RELEASES, Kind
from schedir.ir.schedule import Schedule
from schedir.ir.tokens import NUMBER, Reader, clip, parse_parts, read_action

logger = logging.getLogger("schedir")

_FROM_TORCH = {
    token: Kind(token) for token in ("F", "B", "I", "W", "REDUCE_GRAD", "UNSHARD", "RESHARD")
} | {
    "SEND_F": Kind.SEND_ACT,
    "RECV_F": Kind.RECV_ACT,
    "SEND_B": Kind.SEND_GRAD,
    "RECV_B": Kind.RECV_GRAD,
}
_LISTED_ANEW = GATHERS | RELEASES
_TO_TORCH = {kind: token for token, kind in _FROM_TORCH.items()}
_OLD_BACKWARD = (
    "older torch wrote B for the gradient of the input alone, which is I now, and BW for the full "
    "backward, which is B now: write them so"
)

_ROW = re.compile(r"(?!\Z)(.*)(?:\n|\Z)")
_CELL = re.compile(r"[^, \t][^,]*")
_TOKEN = re.compile(rf"({NUMBER})([A-Z][A-Z_]*)({NUMBER})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_OLD_BATCH = re.compile(rf"{NUMBER}(SEND_[FB]){NUMBER}_{NUMBER}(RECV_[FB]){NUMBER}")
_MOST_NAMED = 8  # in a warning


def dumps_torch_csv(schedule: Schedule, compute_only: bool = False) -> tuple[str, list[str]]:
    """The schedule in torch's CSV, and one sentence for each thing that the format can't hold.

    The compute-only dialect has no REDUCE_GRAD, UNSHARD or RESHARD: torch lists its own when it
    adds communication.
    """
    dropped: Counter[str] = Counter()

    def cells(entry: Entry) -> list[str]:
        """The cells of an entry; `dropped` counts what they can't hold."""
        actions, found = [*flat([entry])], []
        for action in actions:
            token = _TO_TORCH.get(action.kind)
            if token is None:
                dropped[f"{action} is left out: torch has no {action.kind}"] += 1
            elif compute_only and action.kind not in COMPUTE:
                dropped[f"{action} is left out: torch lists its own"] += 1
            else:
                if action.version is not None:
                    dropped[f"{action} loses its weight version: torch has none"] += 1
                microbatch = "" if action.microbatch is None else action.microbatch
                found.append(f"{action.stage}{token}{microbatch}")
        if len(actions) == 1:
            return found
        if actions[0].kind in COMMUNICATION:
            dropped[f"{entry} is taken apart: torch has no batch of sends and receives"] += 1
            return found
        return [f"({';'.join(found)})OVERLAP_F_B"]

    rows = (",".join(chain.from_iterable(map(cells, own))) for own in schedule.actions)
    text = "\n".join(rows) + "\n"
    lost = [what if count == 1 else f"{what} ({count} times)" for what, count in dropped.items()]
    return text, lost


def loads_torch_csv(
    text: str | bytes, file: str = "<string>", *, keeps_gathers: bool = False
) -> Schedule:
    """Parse torch's CSV, either dialect. The highest microbatch decides how many there are.

    A stage lives on the ranks that run its FORWARD. UNSHARDs and RESHARDs are left out with a
    warning, unless the caller knows that their stages are sharded (`keeps_gathers`). Raises
    ParseError with line and column.
    """
    reader = Reader(text, file)
    left_out: Counter[str] = Counter()  # how many, by kind
    names: dict[str, None] = {}

    def entries(row: re.Match[str]) -> Iterator[Entry]:
        start, end = row.span(1)
        end -= reader.text.endswith("\r", start, end)
        for match in _CELL.finditer(reader.text, start, end):
            cell = match[0].rstrip(" \t")
            entry = reader.read(_entry, cell, match.start())
            if keeps_gathers or not isinstance(entry, Action) or entry.kind not in _LISTED_ANEW:
                yield entry
            else:
                left_out[cell.strip("0123456789")] += 1
                if len(names) <= _MOST_NAMED:
                    names[cell] = None

    nothing = "the file holds no action of any microbatch"
    if not re.search(r"[^, \t\r\n]", reader.text):  # however many rows there are
        raise reader.error(nothing, 0)
    columns = columns_of(
        map(entries, _ROW.finditer(reader.text, 0, len(reader.text.rstrip(" \t\r"))))
    )
    if left_out:
        logger.warning(
            "%s: left out what schedir.shard lists anew: %s (%s%s)",
            file,
            ", ".join(f"{number} {kind}" for kind, number in left_out.items()),
            " ".join([*names][:_MOST_NAMED]),
            " and others" if len(names) > _MOST_NAMED else "",
        )
    microbatches = 1 + int(columns.microbatch.max(initial=-1))
    if microbatches == 0:
        raise reader.error(nothing, 0)
    _refuse_old(reader, columns)
    stem = PurePath(file).stem
    name = re.sub(r"[^\w .-]", "-", stem, flags=re.ASCII).strip(" -") or "torch-csv"
    return Schedule(name, microbatches, _placement(reader, columns), columns)


def _refuse_old(reader: Reader, columns: Columns) -> None:
    """Raise ParseError if a B stands for the gradient of the input, as in older torch."""
    backwards, weights = columns.where(Kind.BACKWARD), columns.where(Kind.BACKWARD_WEIGHT)
    old = backwards[columns.alike(backwards, weights)]
    if len(old) and not columns.is_kind(Kind.BACKWARD_INPUT).any():
        action = columns.action(old[0])
        found = re.search(rf"(?<![0-9]){action}(?![0-9])", reader.text)
        weight = attrs.evolve(action, kind=Kind.BACKWARD_WEIGHT)
        raise reader.error(
            f"'{action}' is not a full backward, because there is '{weight}': {_OLD_BACKWARD}",
            found.start() if found else 0,
        )


def _placement(reader: Reader, columns: Columns) -> Iterator[tuple[int, ...]]:
    """The ranks that run each stage's FORWARD; without a FORWARD, the ranks that name the
    stage."""
    stages, runs = np.unique(columns.stage), columns.is_kind(Kind.FORWARD)
    missing = np.flatnonzero(stages != np.arange(len(stages)))
    if len(missing):
        raise reader.error(
            f"stage {missing[0]} is on no rank, though stage {stages[-1]} is on one", 0
        )
    runs |= ~np.isin(columns.stage, columns.stage[runs])
    held = np.unique(columns.stage[runs] * columns.ranks + columns.rank[runs]).tolist()
    for _, of_stage in groupby(held, lambda each: each // columns.ranks):
        yield tuple(each % columns.ranks for each in of_stage)


def _entry(cell: str) -> Entry:
    """The entry of a cell.

    Raises ValueError, a TokenError if the fault is not at the cell's beginning.
    """
    if not cell.startswith("("):
        return _action(cell)
    match = _OVERLAP.fullmatch(cell)
    if match is None:
        raise ValueError(f"{clip(cell)} is not a composite action; one reads (0F1;7B0)OVERLAP_F_B")
    # No more than tell that there are too many.
    return Together(islice(parse_parts(match[1], ";", _part, 1), 3))


def _part(token: str) -> Action:
    """The part of an overlapped pair that a token names. Raises ValueError."""
    action = _action(token)
    if action.kind not in COMPUTE:
        raise ValueError(f"{clip(token)} can't be a part of an overlapped pair")
    return action


@lru_cache(maxsize=1 << 16)
def _action(token: str) -> Action:
    """The action of a token. Raises ValueError."""
    if _OLD_BATCH.fullmatch(token):
        raise ValueError(f"{clip(token)} is older torch's: write its send and receive as two cells")
    if token.strip("0123456789") == "BW":
        raise ValueError(f"{clip(token)}: {_OLD_BACKWARD}")
    such = " of torch's CSV, such as 2F0 or 3SEND_F1"
    action = read_action(token, _TOKEN, _FROM_TORCH, such)
    if action.microbatch == MAX_NUMBER:  # their number is one more
        raise ValueError(f"{clip(token)}: a schedule has at most {MAX_NUMBER} microbatches")
    return action
