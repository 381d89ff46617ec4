"""S4xx: every weight version that is read exists, and memory stays within the limits."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from schedir.checker import rules
from schedir.checker.diagnostics import Faults, Rule, fault
from schedir.graph.alive import HELD_UNTIL, HeldUntil, peak_activations, weight_versions
from schedir.graph.compile import Graph, graph_of
from schedir.ir import GATHERS, HOMES, NAMES_VERSION, RELEASES, Bools, Ints, Schedule, Ties


@attrs.frozen
class Terms:
    """What a schedule is judged by, besides the channel model: the `ties` of its stages, and
    limits, None for no limit.

    `max_delay` is in updates between the version that a gradient is computed at and the version
    that it is applied to. `max_versions` counts the versions of a stage alive at once, the newest
    included. `max_activations` counts a rank's (stage, microbatch) activations alive at once.
    `held_until` says whether an activation with a split backward counts until its "W" or its "I".
    """

    max_delay: int | None = None
    max_versions: int | None = None
    max_activations: int | None = None
    held_until: HeldUntil = "W"
    ties: Ties = ()

    def __attrs_post_init__(self) -> None:
        for name, least in (("max_delay", 0), ("max_versions", 1), ("max_activations", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be an int >= {least} or None, not {value!r}")
        if self.held_until not in HELD_UNTIL:
            raise ValueError(f"held_until must be 'W' or 'I', not {self.held_until!r}")


def memory(schedule: Schedule, terms: Terms) -> Iterator[Faults]:
    """The faults of versions and activations. Expects a sound structure."""
    graph, columns = graph_of(schedule), schedule.columns
    missing = np.flatnonzero((columns.version > graph.turn) & columns.is_kind(*HOMES))
    newest = graph.turn[missing]
    yield rules.VERSION_NOT_AVAILABLE.each(schedule, missing, newest=newest)
    # An action that names the version of its forward names the right one.
    again = columns.where(*NAMES_VERSION - HOMES)
    pair = columns.stage[again], columns.microbatch[again]
    wrong = (columns.version[again] >= 0) & (columns.version[again] != graph.reads[pair])
    yield rules.RECOMPUTE_AT_ANOTHER_VERSION.each(
        schedule,
        np.column_stack((again, graph.home[pair]))[wrong],
        version=graph.reads[pair][wrong],
    )
    if graph.sharded.any():
        named = np.flatnonzero((columns.version >= 0) & graph.sharded[columns.stage])
        yield rules.VERSION_OF_SHARDED.each(schedule, named)
        yield from _sharded_on_several(graph)
    # What tied stages may not do, others may: the note would only echo the error.
    yield from list(_tied_versions_agree(graph, terms.ties)) or _versions_agree(graph)
    if terms.max_delay is not None:
        yield _delays(schedule, terms.max_delay)
    if terms.max_versions is not None:
        yield from _versions_alive(schedule, terms.max_versions)
    if terms.max_activations is not None:
        yield from _activations_alive(graph, terms.max_activations, terms.held_until)


def _sharded_on_several(graph: Graph) -> Iterator[Faults]:
    """Each stage whose weights are sharded is on one rank of the list."""
    schedule, columns = graph.schedule, graph.columns
    listed = columns.where(*GATHERS, *RELEASES)
    for stage in graph.sharded.nonzero()[0].tolist():
        held, own = schedule.placement[stage], listed[columns.stage[listed] == stage]
        if len(held) > 1:
            yield fault(rules.SHARDED_ON_SEVERAL.at(schedule, own[0], held=held), key=stage)


def _versions_agree(graph: Graph) -> Iterator[Faults]:
    """One note for the whole schedule, if its stages run a microbatch at different versions."""
    if not graph.reads.any():
        return
    known = _applied_in_versions(graph)
    differ = known != known[-1]
    if differ.any():
        _, stage = np.argwhere(differ.T)[0]
        yield _disagreeing(rules.VERSIONS_DISAGREE, graph, differ, int(stage), -1)


def _applied_in_versions(graph: Graph) -> Ints:
    """How many microbatches are applied in the version that each forward reads, shape [stages,
    microbatches].

    Stages that step at different rates number the same version of the model differently.
    """
    turns, reads = graph.turn[graph.weight_gradients], graph.reads
    seen = np.zeros((len(reads), int(max(turns.max(), reads.max())) + 2), np.int64)
    np.add.at(seen, (np.arange(len(reads))[:, None], turns + 1), 1)
    applied: Ints = np.take_along_axis(seen.cumsum(axis=1), reads, axis=1)
    return applied


def _tied_versions_agree(graph: Graph, ties: Ties) -> Iterator[Faults]:
    """One finding for each tie whose stages read different versions of the shared parameters."""
    for number, tie in enumerate(ties):
        reads = graph.reads[[*tie]]
        differ = reads != reads[0]
        if differ.any():
            _, other = np.argwhere(differ.T)[0]
            rule = rules.TIED_VERSIONS_DISAGREE
            yield _disagreeing(rule, graph, differ, tie[0], tie[other], number)


def _disagreeing(
    rule: Rule, graph: Graph, differ: Bools, one: int, other: int, key: int = 0
) -> Faults:
    """The fault that two stages run the first of the microbatches that `differ` at different
    versions; as large as there are such microbatches."""
    microbatches = np.flatnonzero(differ.any(axis=0))
    home, reads = graph.home[:, microbatches[0]], graph.reads[:, microbatches[0]]
    finding = rule.at(
        graph.schedule,
        home[one],
        home[other],
        version=int(reads[one]),
        other_version=int(reads[other]),
        differing=len(microbatches),
        microbatches=graph.schedule.microbatches,
    )
    return fault(finding, key=key, extent=len(microbatches))


def delays(schedule: Schedule) -> Ints:
    """The updates between the version that each gradient is computed at and the version that it is
    applied to, shape [stages, microbatches]. Expects a sound structure."""
    graph = graph_of(schedule)
    return graph.turn[graph.weight_gradients] - graph.reads


def _delays(schedule: Schedule, limit: int) -> Faults:
    """The worst delay of every stage that is above the limit."""
    graph, delay = graph_of(schedule), delays(schedule)
    above = (delay > limit).sum(axis=1)
    stages = np.flatnonzero(above)
    worst = stages, delay[stages].argmax(axis=1)
    return rules.DELAY_ABOVE_LIMIT.each(
        schedule,
        np.column_stack((graph.home[worst], graph.weight_gradients[worst])),
        keys=stages,
        extents=delay[worst],
        delay=delay[worst],
        limit=limit,
        above=above[stages],
    )


def _versions_alive(schedule: Schedule, limit: int) -> Iterator[Faults]:
    for rank, start in enumerate(schedule.columns.starts[:-1].tolist()):
        for stage, versions in sorted(weight_versions(schedule.columns, rank).items()):
            alive, index = versions.peak()
            if alive > limit and index is not None:
                finding = rules.VERSIONS_ABOVE_LIMIT.at(
                    schedule, start + index, alive=alive, limit=limit
                )
                yield fault(finding, key=stage * schedule.ranks + rank, extent=alive)


def _activations_alive(graph: Graph, limit: int, held_until: HeldUntil) -> Iterator[Faults]:
    for rank, (peak, index) in enumerate(peak_activations(graph, held_until)):
        if peak > limit:
            finding = rules.ACTIVATIONS_ABOVE_LIMIT.at(
                graph.schedule,
                int(graph.columns.starts[rank]) + index,
                peak=peak,
                limit=limit,
                until_input=held_until == "I",
            )
            yield fault(finding, key=rank, extent=peak)
