"""The REDUCE_GRADs: which of them belong together, and which OPTIM_STEPs need them."""

from __future__ import annotations

from schedir.errors import UnsoundError
from schedir.ir.kinds import Kind
from schedir.ir.schedule import Schedule


def reduces_by_stage(schedule: Schedule) -> dict[int, dict[int, list[int]]]:
    """For each stage that has any, the places of its REDUCE_GRADs on each of its ranks.

    Raises UnsoundError for one where its stage does not live.
    """
    columns = schedule.columns
    found: dict[int, dict[int, list[int]]] = {}
    for place in columns.where(Kind.REDUCE_GRAD).tolist():
        stage, rank = int(columns.stage[place]), int(columns.rank[place])
        if stage not in found:
            held = schedule.placement[stage] if stage < schedule.stages else ()
            found[stage] = {rank: [] for rank in held}
        if rank not in found[stage]:
            raise UnsoundError(f"rank {rank} sums the gradients of stage {stage}, not its own")
        found[stage][rank].append(place)
    return {stage: found[stage] for stage in sorted(found)}


def collective_turns(schedule: Schedule) -> list[tuple[int, ...]]:
    """The places of the REDUCE_GRADs that belong together: the k-th ones of a stage on its ranks.

    Turns that some replica lacks are left out.
    """
    by_stage = reduces_by_stage(schedule).values()
    return [turn for by_rank in by_stage for turn in zip(*by_rank.values(), strict=False)]


def sums_of_steps(schedule: Schedule) -> list[tuple[int, int]]:
    """For each OPTIM_STEP after a REDUCE_GRAD of its stage on its rank, its place and the place of
    the last such REDUCE_GRAD."""
    columns = schedule.columns
    reduce = columns.is_kind(Kind.REDUCE_GRAD)
    if not reduce.any():
        return []
    pairs: list[tuple[int, int]] = []
    last: dict[tuple[int, int], int] = {}
    for place in columns.where(Kind.REDUCE_GRAD, Kind.OPTIM_STEP).tolist():
        key = (int(columns.rank[place]), int(columns.stage[place]))
        if reduce[place]:
            last[key] = place
        elif key in last:
            pairs.append((place, last[key]))
    return pairs
