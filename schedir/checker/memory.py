"""S4xx: every weight version that is read exists, and what is alive stays within the limits."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.changes import Write, rewriting, several
from schedir.checker.fixes import Faults, Finding, fault
from schedir.checker.values import keys
from schedir.graph.alive import HELD_UNTIL, HeldUntil, peak_activations, weight_versions
from schedir.graph.compile import graph_of
from schedir.ir import HOMES, NAMES_VERSION, Ints, Schedule, Ties


@attrs.frozen
class Limits:
    """What a schedule may cost at most; None for no limit.

    `max_delay` in updates between the version that a gradient is computed at and the one that it
    is applied to; `max_versions` of a stage alive at once, the newest included; `max_activations`
    of a rank alive at once, in (stage, microbatch) pairs. `held_until` says whether that of a split
    backward counts until its "W" or its "I".
    """

    max_delay: int | None = None
    max_versions: int | None = None
    max_activations: int | None = None
    held_until: HeldUntil = "W"

    def __attrs_post_init__(self) -> None:
        for name, least in (("max_delay", 0), ("max_versions", 1), ("max_activations", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be an int >= {least} or None, not {value!r}")
        if self.held_until not in HELD_UNTIL:
            raise ValueError(f"held_until must be 'W' or 'I', not {self.held_until!r}")


def memory(schedule: Schedule, limits: Limits, ties: Ties = ()) -> Iterator[Faults]:
    """What is wrong with versions and activations. Expects a sound structure."""
    yield _versions_exist(schedule)
    yield from _named_alike(schedule)
    # What tied stages may not do, others may: the note would only echo the error.
    yield from list(_tied_versions_agree(schedule, ties)) or _versions_agree(schedule)
    if limits.max_delay is not None:
        yield from _delays(schedule, limits.max_delay)
    if limits.max_versions is not None:
        yield from _versions_alive(schedule, limits.max_versions)
    if limits.max_activations is not None:
        peaks = peak_activations(graph_of(schedule), limits.held_until)
        for rank, (peak, index) in enumerate(peaks):
            if peak > limits.max_activations:
                place = int(schedule.columns.starts[rank]) + index
                yield fault(
                    rules.ACTIVATIONS_ABOVE_LIMIT.at(
                        schedule,
                        place,
                        peak=peak,
                        limit=limits.max_activations,
                        held_until=limits.held_until,
                    ),
                    key=rank,
                    extent=peak,
                )


def _versions_exist(schedule: Schedule) -> Faults:
    columns, newest = schedule.columns, graph_of(schedule).turn
    missing = np.flatnonzero((columns.version > newest) & columns.is_kind(*HOMES))
    return Faults(
        rule=rules.VERSION_NOT_AVAILABLE,
        keys=keys(schedule, missing),
        findings=(
            Finding(
                rules.VERSION_NOT_AVAILABLE.at(schedule, place, newest=int(newest[place])),
                otherwise=_reading(schedule, place, int(newest[place])),
            )
            for place in missing.tolist()
        ),
    )


def _reading(schedule: Schedule, place: int, version: int | None) -> Write:
    """What stands at a place with another version named, or none."""
    action = attrs.evolve(schedule.columns.action(place), version=version)
    return rewriting(schedule, place, action)


def _named_alike(schedule: Schedule) -> Iterator[Faults]:
    """What runs again and names a version names that of its forward."""
    graph, columns = graph_of(schedule), schedule.columns
    again = columns.where(*NAMES_VERSION - HOMES)
    again = again[columns.version[again] >= 0]
    if len(again):
        pair = columns.stage[again], columns.microbatch[again]
        home, reads = graph.home[pair], graph.reads[pair]
        wrong = np.flatnonzero(columns.version[again] != reads)
        rows = zip(again[wrong].tolist(), home[wrong].tolist(), reads[wrong].tolist(), strict=True)
        yield Faults(
            rule=rules.RECOMPUTE_AT_ANOTHER_VERSION,
            keys=keys(schedule, again[wrong]),
            findings=(
                Finding(
                    rules.RECOMPUTE_AT_ANOTHER_VERSION.at(schedule, place, other, version=version),
                    otherwise=_reading(schedule, place, None),
                )
                for place, other, version in rows
            ),
        )


def _versions_agree(schedule: Schedule) -> Iterator[Faults]:
    """One note for the whole schedule: where its stages run a microbatch at different versions."""
    graph = graph_of(schedule)
    if not graph.reads.any():
        return
    known = _applied_in_versions(schedule)
    differ = known != known[-1]
    microbatches = np.flatnonzero(differ.any(axis=0))
    if len(microbatches):
        first = int(microbatches[0])
        stage = int(np.flatnonzero(differ[:, first])[0])
        forward = graph.home[:, first]
        yield fault(
            rules.VERSIONS_DISAGREE.at(
                schedule,
                forward[stage],
                forward[-1],
                version=int(graph.reads[stage, first]),
                other_version=int(graph.reads[-1, first]),
                differing=len(microbatches),
                microbatches=schedule.microbatches,
            ),
            extent=len(microbatches),
        )


def _applied_in_versions(schedule: Schedule) -> Ints:
    """How many microbatches the version that each forward reads has seen, [stages, microbatches].

    Stages that step at different rates have other numbers for the same version of the model.
    """
    graph = graph_of(schedule)
    turns = graph.turn[graph.weight_gradients]
    seen = np.zeros((schedule.stages, int(max(turns.max(), graph.reads.max())) + 2), np.int64)
    np.add.at(seen, (np.arange(schedule.stages)[:, None], turns + 1), 1)
    applied: Ints = np.take_along_axis(seen.cumsum(axis=1), graph.reads, axis=1)
    return applied


def _tied_versions_agree(schedule: Schedule, ties: Ties) -> Iterator[Faults]:
    """The stages of a tie read one version of what they share; one finding for each tie."""
    graph = graph_of(schedule)
    for number, tie in enumerate(ties):
        reads = graph.reads[list(tie)]
        differ = reads != reads[0]
        microbatches = np.flatnonzero(differ.any(axis=0))
        if len(microbatches):
            first = int(microbatches[0])
            other = int(np.flatnonzero(differ[:, first])[0])
            forward = graph.home[:, first]
            # The oldest exists on all of them.
            oldest = int(reads[:, first].min())
            newer = [
                stage for stage, read in zip(tie, reads[:, first], strict=True) if read > oldest
            ]
            yield fault(
                rules.TIED_VERSIONS_DISAGREE.at(
                    schedule,
                    forward[tie[0]],
                    forward[tie[other]],
                    version=int(reads[0, first]),
                    other_version=int(reads[other, first]),
                    differing=len(microbatches),
                    microbatches=schedule.microbatches,
                ),
                otherwise=several(_reading(schedule, int(forward[s]), oldest) for s in newer),
                key=number,
                extent=len(microbatches),
            )


def delays(schedule: Schedule) -> Ints:
    """The updates between the version that each gradient is computed at and the one that it is
    applied to, shape [stages, microbatches]. Expects a sound structure."""
    graph = graph_of(schedule)
    return graph.turn[graph.weight_gradients] - graph.reads


def _delays(schedule: Schedule, limit: int) -> Iterator[Faults]:
    """The worst delay of every stage that is above the limit."""
    graph, delay = graph_of(schedule), delays(schedule)
    gradient = graph.weight_gradients
    for stage in np.flatnonzero((delay > limit).any(axis=1)).tolist():
        worst = int(delay[stage].argmax())
        yield fault(
            rules.DELAY_ABOVE_LIMIT.at(
                schedule,
                graph.home[stage, worst],
                gradient[stage, worst],
                delay=int(delay[stage, worst]),
                limit=limit,
                above=int((delay[stage] > limit).sum()),
            ),
            key=stage,
            extent=int(delay[stage, worst]),
        )


def _versions_alive(schedule: Schedule, limit: int) -> Iterator[Faults]:
    for rank in range(schedule.ranks):
        for stage, versions in sorted(weight_versions(schedule.columns, rank).items()):
            alive, index = versions.peak()
            if alive > limit and index is not None:
                place = int(schedule.columns.starts[rank]) + index
                yield fault(
                    rules.VERSIONS_ABOVE_LIMIT.at(schedule, place, alive=alive, limit=limit),
                    key=stage * schedule.ranks + rank,
                    extent=alive,
                )
