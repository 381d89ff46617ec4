"""Put new actions into the lists of a schedule."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np

from schedir.ir import KIND_INDEX, Columns, Ints, Kind, Schedule, Sources, is_number, starts_of


def inserted(
    schedule: Schedule,
    kind: Kind | Ints,
    stage: Ints,
    microbatch: Ints,
    rank: Ints,
    before: Ints,
    like: Ints | None = None,
) -> Schedule:
    """The schedule with a new action of `kind` before each place in `before`, in the list of its
    `rank`.

    `kind` is one for all, or an index in KINDS for each. Several actions before one place keep
    their order. The end of a rank's list is the start of the next rank's. `microbatch` is -1 for an
    action of a whole stage. Each new action takes the line of Python of the place in `like`, if
    given. All arrays have shape [new actions].
    """
    columns, number = schedule.columns, len(schedule.columns)
    ranks = np.concatenate((columns.rank, rank))
    at = np.concatenate((2 * np.arange(number) + 1, 2 * before))
    order = np.lexsort((at, ranks))
    new = np.full(len(rank), -1)
    kinds = np.full(len(rank), KIND_INDEX[kind]) if isinstance(kind, Kind) else kind

    def merged(own: Ints, added: Ints) -> Ints:
        both: Ints = np.concatenate((own, added))[order]
        return both

    sources = schedule.sources
    if sources is not None:
        lines = new if like is None else sources.line_of[like]
        sources = Sources(sources.lines, merged(sources.line_of, lines))
    return attrs.evolve(
        schedule,
        actions=Columns(
            starts_of(ranks[order], schedule.ranks),
            merged(columns.kind, kinds),
            merged(columns.stage, stage),
            merged(columns.microbatch, microbatch),
            merged(columns.version, new),
            np.concatenate((columns.joined, new > 0))[order],
        ),
        sources=sources,
    )


def expect_stages(schedule: Schedule, stages: object, what: str) -> None:
    """Raise TypeError for anything but a collection of stages, and ValueError for an unknown stage.
    `what` is the verb in the message."""
    if not isinstance(stages, Collection) or isinstance(stages, str | bytes):
        raise TypeError(f"stages must be a collection of stage numbers, not {stages!r}")
    last = schedule.stages - 1
    for stage in stages:
        if not is_number(stage) or stage > last:
            raise ValueError(f"{schedule.name} has no stage {stage!r} to {what}, only 0..{last}")
