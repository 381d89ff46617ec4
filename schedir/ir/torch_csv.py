"""torch.distributed.pipelining's CSV: one row per rank, one action per cell, an empty cell idle.

It has two dialects, compute only and with communication. Its tokens differ from schedir's in
SEND_F/RECV_F/SEND_B/RECV_B, and it has no OPTIM_STEP and no weight versions. UNSHARD and RESHARD
(FSDP's gathering of parameters) are nothing that schedir models; reading names them in a warning
and leaves them out. `(0F1;7B0)OVERLAP_F_B` is read as its parts, in order.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from schedir.errors import ParseError
from schedir.ir.actions import STAGE_WIDE, Action, Kind
from schedir.ir.schedule import Schedule
from schedir.ir.text import NUMBER, clip, decode

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
_NOT_MODELLED = ("UNSHARD", "RESHARD")

_TOKEN = re.compile(rf"({NUMBER})([A-Z][A-Z_]*)({NUMBER})?")
_OVERLAP = re.compile(r"\(([^();]*(?:;[^();]*)*)\)OVERLAP_F_B")


def dumps_torch_csv(schedule: Schedule) -> tuple[str, list[str]]:
    """The schedule in torch's CSV, and what that format could not hold, one sentence each."""
    dropped: Counter[str] = Counter()
    rows = []
    for actions in schedule.actions:
        cells = []
        for action in actions:
            token = _TO_TORCH.get(action.kind)
            if token is None:
                dropped[f"{action} is left out: torch has no {action.kind}"] += 1
                continue
            if action.version is not None:
                dropped[f"{action} loses its weight version: torch has none"] += 1
            microbatch = "" if action.microbatch is None else action.microbatch
            cells.append(f"{action.stage}{token}{microbatch}")
        rows.append(",".join(cells))
    lost = [text if count == 1 else f"{text} ({count} times)" for text, count in dropped.items()]
    return "\n".join(rows) + "\n", lost


def loads_torch_csv(text: str | bytes, file: str = "<string>") -> Schedule:
    """Parse torch's CSV, either dialect; the number of microbatches is the highest named, plus 1.

    A stage lives on the ranks that run its FORWARD. Raises ParseError with line and column.
    """
    ranks: list[list[Action]] = []
    left_out: Counter[str] = Counter()
    lines = decode(text, file).split("\n")
    if lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        actions = []
        for cell, column in _cells(line):
            for token, offset in _parts(cell, file, number, column):
                action = _action(token, file, number, offset)
                if action is None:
                    left_out[token] += 1
                else:
                    actions.append(action)
        ranks.append(actions)
    if left_out:
        logger.warning(
            "%s: left out %d actions that schedir does not model: %s",
            file,
            left_out.total(),
            " ".join(left_out),
        )
    microbatches = 1 + max(
        (a.microbatch for actions in ranks for a in actions if a.microbatch is not None),
        default=-1,
    )
    if microbatches == 0:
        raise ParseError("the file holds no action of any microbatch", file, 1, 1)
    name = re.sub(r"[^\w .-]", "-", PurePath(file).stem, flags=re.ASCII).strip() or "torch-csv"
    return Schedule(name, microbatches, _placement(ranks, file), ranks)


def _cells(line: str) -> Iterator[tuple[str, int]]:
    """The non-empty cells of a row, stripped, each with its column."""
    column = 1
    for raw in line.split(","):
        cell = raw.strip()
        if cell:
            yield cell, column + raw.index(cell[0])
        column += len(raw) + 1


def _parts(cell: str, file: str, line: int, column: int) -> Iterator[tuple[str, int]]:
    """The actions of a cell: one, or those of an overlapped pair."""
    if not cell.startswith("("):
        yield cell, column
        return
    match = _OVERLAP.fullmatch(cell)
    if match is None:
        raise ParseError(
            f"{clip(cell)} is not a composite action; one reads (0F1;7B0)OVERLAP_F_B",
            file,
            line,
            column,
        )
    offset = column + 1
    for part in match[1].split(";"):
        token = part.strip()
        lead = len(part) - len(part.lstrip())
        if not token:
            raise ParseError("an empty part in a composite action", file, line, offset)
        yield token, offset + lead
        offset += len(part) + 1


def _action(token: str, file: str, line: int, column: int) -> Action | None:
    """The action of a token; None for one that schedir does not model."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ParseError(
            f"{clip(token)} is not an action of torch's CSV, such as 2F0 or 3SEND_F1",
            file,
            line,
            column,
        )
    stage, name, microbatch = match.groups()
    if name in _NOT_MODELLED:
        return None
    kind = _FROM_TORCH.get(name)
    if kind is None:
        known = " ".join([*_FROM_TORCH, *_NOT_MODELLED])
        raise ParseError(f"unknown action {clip(name)}; known: {known}", file, line, column)
    if (microbatch is None) != (kind in STAGE_WIDE):
        need = "names no microbatch" if kind in STAGE_WIDE else "needs a microbatch"
        raise ParseError(f"{clip(token)}: {name} {need}", file, line, column)
    return Action(kind, int(stage), None if microbatch is None else int(microbatch))


def _placement(ranks: list[list[Action]], file: str) -> list[list[int]]:
    runs: dict[int, set[int]] = {}
    named: dict[int, set[int]] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            named.setdefault(action.stage, set()).add(rank)
            if action.kind is Kind.FORWARD:
                runs.setdefault(action.stage, set()).add(rank)
    # Counted before the list is built: a single huge stage number must not cost memory.
    if len(named) <= max(named):
        missing = next(stage for stage in range(len(named)) if stage not in named)
        raise ParseError(
            f"stage {missing} is on no rank, though stage {max(named)} is on one", file, 1, 1
        )
    return [sorted(runs.get(stage, named[stage])) for stage in range(len(named))]
