"""How every call begins: the rank of the first stage says what it is, and all others compare.

    pipeline 0   rank 0 ─▶ rank 1 ─▶ rank 3        within a pipeline, over a tree of its ranks
                      └──▶ rank 2
    pipeline 1   rank 0 ─▶ …                       between pipelines, over one of their first ranks

Ranks that make different calls would wait for each other for ever, and those that hold different
batches train on wrong pairs. What is said goes beside the pipeline's traffic, which is tagged by
kind of call, so that until ranks have compared no payload meets a buffer that is not its own.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from schedir.runtime.batch import fingerprint
from schedir.runtime.processes.control import PIPELINE_TAG, RANK_TAG, Control
from schedir.runtime.processes.failure import OneLineError, users_line
from schedir.runtime.processes.grid import Grid
from schedir.runtime.request import REQUESTS, Request

UNKNOWN = -1
_AUTOCASTS = (None, torch.bfloat16, torch.float16, torch.float32)


@attrs.frozen
class Opening:
    """What a rank is about to do.

    `call` counts the calls before this one, `autocast` is what the caller has it compute in.
    `rows` are those of the whole batches that are cut here, `inputs` and `target` the fingerprints
    of what was given. The first stage's rank knows the number of the `agreement` on boundaries.
    """

    request: Request
    call: int
    autocast: torch.dtype | None = None
    rows: int = UNKNOWN
    inputs: int = fingerprint.NOTHING
    target: int = fingerprint.NOTHING
    agreement: int = UNKNOWN

    def under(self, agreement: int) -> Opening:
        """The same, under an agreement."""
        return Opening(
            self.request, self.call, self.autocast, self.rows, self.inputs, self.target, agreement
        )

    def __str__(self) -> str:
        under = "" if self.autocast is None else f" under autocast to {self.autocast}"
        return f"{self.request.name}{under}"


def _encoded(o: Opening) -> Tensor:
    kind, precision = REQUESTS.index(o.request), _AUTOCASTS.index(o.autocast)
    return torch.tensor((kind, o.call, precision, o.rows, o.inputs, o.target, o.agreement))


def _decoded(said: Tensor) -> Opening:
    request, call, autocast, *rest = said.tolist()
    return Opening(REQUESTS[request], call, _AUTOCASTS[autocast], *rest)


class Openings:
    """The openings of one process; `speaker` is the rank that speaks for each pipeline."""

    def __init__(self, control: Control, grid: Grid, speaker: int) -> None:
        self._grid, self._speaker = grid, speaker
        size = len(attrs.fields(Opening))
        # One process may run several ranks.
        ranks = [*dict.fromkeys(grid.number((speaker + i) % grid.ranks) for i in range(grid.ranks))]
        self._within = control.relay(ranks, size, RANK_TAG)
        speakers = [grid.number(speaker, line) for line in range(grid.pipelines)]
        self._between = (
            control.relay(speakers, size, PIPELINE_TAG) if grid.rank == speaker else None
        )

    def exchange(self, own: Opening) -> Opening:
        """What the speaker of the pipeline is about to do, compared with what this process is.

        Raises OneLineError where they make different calls, or hold different batches, of which
        a step would take the inputs from one rank and the target from the other.
        """
        if self._between is not None:
            heard = _decoded(self._between.pass_on(_encoded(own)))
            self._same_call(own, heard, 0)
        said = self._within.pass_on(_encoded(own))
        if self._grid.rank == self._speaker:
            return own
        heard = _decoded(said)
        self._same_call(own, heard, self._grid.pipeline)
        self._same_batch(own, heard)
        return heard

    def last(self, own: Opening) -> None:
        """Say that there is no other call; nobody has to listen."""
        for relay in (self._between, self._within):
            if relay is not None:
                relay.leave(_encoded(own))

    def _same_call(self, own: Opening, heard: Opening, pipeline: int) -> None:
        if (own.request, own.autocast) == (heard.request, heard.autocast):
            return
        raise OneLineError(
            f"its call {own.call} is {own} ({users_line()}), but call {heard.call} of "
            f"{self._grid.name(self._speaker, pipeline)} is {heard}; every rank must make the same "
            "calls, in the same order",
            rank=self._grid.rank,
        )

    def _same_batch(self, own: Opening, heard: Opening) -> None:
        if UNKNOWN not in (own.rows, heard.rows) and own.rows != heard.rows:
            raise OneLineError(
                f"{_at(own)}: the batch has {own.rows} rows here, but {heard.rows} on rank "
                f"{self._speaker}",
                rank=self._grid.rank,
            )
        for what, mine, theirs in (
            ("inputs", own.inputs, heard.inputs),
            ("target", own.target, heard.target),
        ):
            if fingerprint.differ(mine, theirs):
                raise OneLineError(
                    f"{_at(own)}: `{what}` is another batch here than on rank {self._speaker}, so "
                    "inputs of one would go with the target of the other; draw the same batches on "
                    "every rank (seed alike), or pass inputs only on the first stage's rank and "
                    "target only on the last one's",
                    rank=self._grid.rank,
                )


def _at(own: Opening) -> str:
    return f"call {own.call}, {own} ({users_line()})"
