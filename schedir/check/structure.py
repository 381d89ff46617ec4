"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator

from schedir.check import rules
from schedir.check.diagnostics import Diagnostic, Location, locate
from schedir.ir import BACKWARDS, Action, Kind, Position, Schedule

# A file may claim a billion microbatches and hold none of them; this many findings say enough.
_MOST_ABSENT = 1000


def structure(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with single actions, and with the set of them."""
    seen: dict[Action, Position] = {}
    backwards: dict[tuple[int, int], dict[Kind, Position]] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            stage, microbatch = action.stage, action.microbatch
            if stage >= schedule.stages:
                yield rules.UNKNOWN_STAGE.found(
                    f"there is no stage {stage}; the placement has {schedule.stages}",
                    locate(schedule, rank, index),
                    help=f"stages are numbered 0..{schedule.stages - 1}",
                )
                continue
            if microbatch is not None and microbatch >= schedule.microbatches:
                yield rules.UNKNOWN_MICROBATCH.found(
                    f"there is no microbatch {microbatch}; the schedule has "
                    f"{schedule.microbatches}",
                    locate(schedule, rank, index),
                    help=f"microbatches are numbered 0..{schedule.microbatches - 1}",
                )
                continue
            held = schedule.placement[stage]
            if rank not in held:
                yield rules.WRONG_RANK.found(
                    f"rank {rank} does not hold stage {stage}",
                    locate(schedule, rank, index),
                    help=f"stage {stage} lives on rank {' and '.join(map(str, held))}",
                )
            if microbatch is None:
                continue
            # A forward is the same whatever version it reads.
            key = Action(action.kind, stage, microbatch) if action.version is not None else action
            first = seen.setdefault(key, (rank, index))
            if first != (rank, index):
                yield rules.DUPLICATE_ACTION.found(
                    f"{key} stands in the lists a second time",
                    locate(schedule, rank, index),
                    locate(schedule, *first),
                    help="remove one of them",
                )
            elif action.kind in BACKWARDS:
                backwards.setdefault((stage, microbatch), {})[action.kind] = first
    yield from _completeness(schedule, seen, backwards)


def _completeness(
    schedule: Schedule,
    seen: dict[Action, Position],
    backwards: dict[tuple[int, int], dict[Kind, Position]],
) -> Iterator[Diagnostic]:
    """Each (stage, microbatch) has one F and one B, or I and W, all on the same rank."""
    absent = 0  # (stage, microbatch) pairs that do not occur at all
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            absent += (stage, microbatch) not in backwards
            if absent > _MOST_ABSENT:
                return
            forward = Action(Kind.FORWARD, stage, microbatch)
            found = backwards.get((stage, microbatch), {})
            places = [p for p in (seen.get(forward), *found.values()) if p is not None]
            if forward not in seen:
                yield _missing(schedule, forward, places)
            if not found:
                yield _missing(schedule, Action(Kind.BACKWARD, stage, microbatch), places)
            elif Kind.BACKWARD in found:
                for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                    if kind in found:
                        yield rules.MIXED_BACKWARD.found(
                            f"stage {stage} has both a BACKWARD and "
                            f"a {kind.name} for microbatch {microbatch}",
                            locate(schedule, *found[kind]),
                            locate(schedule, *found[Kind.BACKWARD]),
                            help="keep the B, or the I and its W",
                        )
            else:
                for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                    if kind not in found:
                        yield _missing(schedule, Action(kind, stage, microbatch), places)
            if forward in seen:
                for place in found.values():
                    if place[0] != seen[forward][0]:
                        yield rules.SPLIT_MICROBATCH.found(
                            f"stage {stage} runs microbatch {microbatch} forward on rank "
                            f"{seen[forward][0]}, but backward on rank {place[0]}",
                            locate(schedule, *place),
                            locate(schedule, *seen[forward]),
                            help="run both on the same rank",
                        )


def _missing(schedule: Schedule, action: Action, related: list[Position]) -> Diagnostic:
    """A missing action: on the rank of what is there of its microbatch, else of its stage."""
    rank = related[0][0] if related else schedule.placement[action.stage][0]
    return rules.MISSING_ACTION.found(
        f"stage {action.stage} never runs {action.kind.name} on microbatch {action.microbatch}",
        Location(rank, None, action),
        *(locate(schedule, *place) for place in related),
        help=f"add {action} to rank {rank}",
    )
