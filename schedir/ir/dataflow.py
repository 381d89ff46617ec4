"""Who feeds whom: the rank that runs each stage on each microbatch, and what crosses ranks.

The peer of a send or receive is never computed from a formula: it is the rank that runs the
neighbouring stage on that microbatch, which is the rank whose list has its FORWARD.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from schedir.errors import ScheduleError
from schedir.ir.actions import COMMUNICATION, Action, Kind
from schedir.ir.columns import KIND_INDEX, Bools, Columns, Ints
from schedir.ir.schedule import Schedule
from schedir.ir.versions import steps_before


@attrs.frozen(eq=False, slots=False)
class Transfers:
    """Every tensor that crosses from one rank to another: activations first, by stage.

    Places of what takes part, -1 where the lists lack it: `maker` and `user` are the compute that
    makes and consumes it, on the ranks `source` and `target`; `send` and `receive` stand there too.
    `stage` is the receiver's; all arrays have the shape [transfers].
    """

    stage: Ints
    microbatch: Ints
    source: Ints
    target: Ints
    maker: Ints
    user: Ints
    send: Ints
    receive: Ints

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def is_gradient(self) -> Bools:
        """Where a gradient travels, and no activation."""
        return np.arange(len(self)) >= len(self) // 2

    @cached_property
    def matched(self) -> Bools:
        """Where both ends are listed."""
        return (self.send >= 0) & (self.receive >= 0)

    @cached_property
    def by_channel(self) -> tuple[Ints, Bools]:
        """The matched transfers channel by channel in the order of the sends, and which of them
        follow another one on the same channel."""
        listed = np.flatnonzero(self.matched)
        # Places ascend with the rank, so the order of the sends is that of their ranks too.
        order = listed[np.lexsort((self.send[listed], self.target[listed], self.source[listed]))]
        source, target = self.source[order], self.target[order]
        follows = np.zeros(len(order), dtype=np.bool_)
        follows[1:] = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
        return order, follows


@attrs.frozen(eq=False, slots=False)
class Dataflow:
    """Where everything stands: `places[kind][stage, microbatch]`, -1 for what is not listed.

    `places` has the shape [kinds, stages, microbatches]; the first counts where several stand.
    """

    columns: Columns
    places: Ints

    def of(self, kind: Kind) -> Ints:
        """The places of one kind, shape [stages, microbatches]."""
        kind_places: Ints = self.places[KIND_INDEX[kind]]
        return kind_places

    @cached_property
    def runs(self) -> Ints:
        """The rank that runs each stage on each microbatch, shape [stages, microbatches]."""
        forward = self.of(Kind.FORWARD)
        return np.where(forward >= 0, self.columns.rank[forward], -1)

    @cached_property
    def gradients(self) -> Ints:
        """What makes the gradient of a stage's input, its BACKWARD or its I, as by `of`."""
        backward = self.of(Kind.BACKWARD)
        return np.where(backward >= 0, backward, self.of(Kind.BACKWARD_INPUT))

    @cached_property
    def weight_gradients(self) -> Ints:
        """What makes the gradient of a stage's parameters, its BACKWARD or its W, as by `of`."""
        return np.maximum(self.of(Kind.BACKWARD), self.of(Kind.BACKWARD_WEIGHT))

    @cached_property
    def starved(self) -> Bools:
        """Which (stage, microbatch) has compute that lacks its input: nothing makes that, or
        something that stands behind it on its rank. What crosses ranks is for `transfers` to say.
        """
        forward, above = self.of(Kind.FORWARD), self.gradients[1:]
        full, split = self.of(Kind.BACKWARD), self.of(Kind.BACKWARD_INPUT)
        rank = self.columns.rank
        starved = np.zeros(forward.shape, np.bool_)
        for lacks, user, source, crosses in (
            (starved[1:], forward[1:], forward[:-1], True),
            (starved[:-1], full[:-1], above, True),
            (starved[:-1], split[:-1], above, True),
            (starved, full, forward, False),
            (starved, split, forward, False),
            (starved, self.of(Kind.BACKWARD_WEIGHT), split, False),
        ):
            local = rank[user] == rank[source]
            there = (source >= 0) & (crosses & ~local | local & (source < user))
            lacks |= (user >= 0) & ~there
        return starved

    @cached_property
    def steps_before(self) -> Ints:
        """For every place, how many OPTIM_STEPs of its stage stand before it on its rank."""
        return steps_before(self.columns)

    @cached_property
    def reads(self) -> Ints:
        """The weight version that each FORWARD reads, shape [stages, microbatches]."""
        forward = self.of(Kind.FORWARD)
        named = self.columns.version[forward]
        return np.where(named >= 0, named, self.steps_before[forward])

    def peer(self, action: Action) -> int | None:
        """The rank at the other end of a send or receive; None if there is no such rank."""
        neighbour = action.stage + (1 if action.kind in (Kind.SEND_ACT, Kind.RECV_GRAD) else -1)
        if action.microbatch is None or not 0 <= neighbour < len(self.runs):
            return None
        rank = int(self.runs[neighbour, action.microbatch])
        return None if rank < 0 else rank

    @cached_property
    def peers(self) -> Ints:
        """The peer of every place, -1 where there is none."""
        columns = self.columns
        places = columns.where(*COMMUNICATION)
        up = columns.is_kind(Kind.SEND_ACT, Kind.RECV_GRAD)[places]
        # A row of -1 beyond either end of the pipeline.
        padded = np.pad(self.runs, ((1, 1), (0, 0)), constant_values=-1)
        neighbour = columns.stage[places] + np.where(up, 2, 0)
        peers = np.full(len(columns), -1)
        peers[places] = padded[neighbour, columns.microbatch[places]]
        return peers

    @cached_property
    def transfers(self) -> Transfers:
        """Every tensor that crosses from one rank to another."""
        below, above = self.runs[:-1], self.runs[1:]
        stage, microbatch = np.nonzero((below != above) & (below >= 0) & (above >= 0))
        lower, upper = (stage, microbatch), (stage + 1, microbatch)

        def both(activations: Ints, gradients: Ints) -> Ints:
            return np.concatenate((activations, gradients))

        source = both(self.runs[lower], self.runs[upper])
        target = both(self.runs[upper], self.runs[lower])
        return Transfers(
            stage=both(upper[0], lower[0]),
            microbatch=both(microbatch, microbatch),
            source=source,
            target=target,
            maker=both(self.of(Kind.FORWARD)[lower], self.gradients[upper]),
            user=both(self.of(Kind.FORWARD)[upper], self.gradients[lower]),
            send=self._on(
                both(self.of(Kind.SEND_ACT)[lower], self.of(Kind.SEND_GRAD)[upper]), source
            ),
            receive=self._on(
                both(self.of(Kind.RECV_ACT)[upper], self.of(Kind.RECV_GRAD)[lower]), target
            ),
        )

    @cached_property
    def arrivals(self) -> Ints:
        """For every place, the transfer that brings it its input, -1 where none does."""
        user = self.transfers.user
        used = np.flatnonzero(user >= 0)
        arrivals = np.full(len(self.columns), -1)
        arrivals[user[used]] = used
        return arrivals

    def _on(self, places: Ints, rank: Ints) -> Ints:
        """The places that are on their rank; -1 for the others."""
        return np.where((places >= 0) & (self.columns.rank[places] == rank), places, -1)


def trace(schedule: Schedule) -> Dataflow:
    """Find where every action of every (stage, microbatch) stands.

    Raises ScheduleError where actions name others, or are fewer than these.
    """
    columns, stages, microbatches = schedule.columns, schedule.stages, schedule.microbatches
    named = np.flatnonzero(columns.microbatch >= 0)
    kind, stage, microbatch = (x[named] for x in (columns.kind, columns.stage, columns.microbatch))
    # A file may claim a billion microbatches: no table is made that the lists can't fill.
    if stages * microbatches > len(columns):
        raise ScheduleError(
            f"{len(columns)} actions are too few for {stages} stages and {microbatches} "
            "microbatches",
            (),
        )
    if columns.stage.max(initial=0) >= stages or microbatch.max(initial=0) >= microbatches:
        raise ScheduleError("an action names an unknown stage or microbatch", ())
    pair = stage * microbatches + microbatch
    places = first_places(kind, pair, named, stages * microbatches)
    return Dataflow(columns, places.reshape(-1, stages, microbatches))


def reduces_by_stage(schedule: Schedule) -> dict[int, dict[int, list[int]]]:
    """For each stage that has any, the places of its REDUCE_GRADs on each of its ranks.

    Raises ScheduleError for one where its stage does not live.
    """
    columns = schedule.columns
    found: dict[int, dict[int, list[int]]] = {}
    for place in columns.where(Kind.REDUCE_GRAD).tolist():
        stage, rank = int(columns.stage[place]), int(columns.rank[place])
        if stage not in found:
            held = schedule.placement[stage] if stage < schedule.stages else ()
            found[stage] = {rank: [] for rank in held}
        if rank not in found[stage]:
            raise ScheduleError(f"rank {rank} sums the gradients of stage {stage}, not its own", ())
        found[stage][rank].append(place)
    return {stage: found[stage] for stage in sorted(found)}


def collective_turns(schedule: Schedule) -> list[tuple[int, ...]]:
    """The places of the REDUCE_GRADs that belong together: the k-th ones of a stage on its ranks.

    Turns that some replica lacks are left out.
    """
    by_stage = reduces_by_stage(schedule).values()
    return [turn for by_rank in by_stage for turn in zip(*by_rank.values(), strict=False)]


def sums_of_steps(schedule: Schedule) -> list[tuple[int, int]]:
    """For each OPTIM_STEP behind a REDUCE_GRAD of its stage on its rank, its place and the place of
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


def first_places(kind: Ints, pair: Ints, places: Ints, pairs: int) -> Ints:
    """For each kind and (stage, microbatch), numbered by `pair`, its first place, or -1."""
    none = np.iinfo(np.int64).max
    table = np.full(len(KIND_INDEX) * pairs, none)
    np.minimum.at(table, kind * pairs + pair, places)
    return np.where(table == none, -1, table).reshape(len(KIND_INDEX), pairs)
