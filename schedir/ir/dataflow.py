"""Who feeds whom: the rank that runs each stage on each microbatch, and what crosses ranks.

The peer of a send or receive is never computed from a formula: it is the rank that runs the
neighbouring stage on that microbatch, which is the rank whose list has its FORWARD.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from schedir.errors import UnsoundError
from schedir.ir.action import Action
from schedir.ir.columns import KIND_INDEX, KINDS, Bools, Columns, Ints
from schedir.ir.kinds import COMMUNICATION, COMPLETES_GRADIENTS, COUNTERPARTS, Kind
from schedir.ir.versions import steps_before

_FURTHER = np.array([COUNTERPARTS.get(kind, (kind, 0))[1] for kind in KINDS])
"""By kind, how many stages further on the other end of a send or receive stands."""


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

    def listed(self, kind: Kind, stage: int, microbatch: int) -> int:
        """The place of an action, -1 for what is not listed or there is not."""
        _, stages, microbatches = self.places.shape
        if not (0 <= stage < stages and 0 <= microbatch < microbatches):
            return -1
        return int(self.places[KIND_INDEX[kind], stage, microbatch])

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
        """What completes the gradient of a stage's parameters, its B or its W, as by `of`."""
        completing = [self.of(kind) for kind in COMPLETES_GRADIENTS]
        latest: Ints = np.maximum.reduce(completing)
        return latest

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
        other = action.counterpart
        if other is None or other.stage >= len(self.runs):
            return None
        rank = int(self.runs[other.stage, other.microbatch])
        return None if rank < 0 else rank

    @cached_property
    def peers(self) -> Ints:
        """The peer of every place, -1 where there is none."""
        columns = self.columns
        places = columns.where(*COMMUNICATION)
        # A row of -1 beyond either end of the pipeline.
        padded = np.pad(self.runs, ((1, 1), (0, 0)), constant_values=-1)
        neighbour = 1 + columns.stage[places] + _FURTHER[columns.kind[places]]
        peers = np.full(len(columns), -1)
        peers[places] = padded[neighbour, columns.microbatch[places]]
        return peers

    @cached_property
    def transfers(self) -> Transfers:
        """Every tensor that crosses from one rank to another."""
        activations = self._crossing(Kind.SEND_ACT, self.of(Kind.FORWARD))
        gradients = self._crossing(Kind.SEND_GRAD, self.gradients)
        return Transfers(*map(np.concatenate, zip(activations, gradients, strict=True)))

    def _crossing(self, send: Kind, payloads: Ints) -> tuple[Ints, ...]:
        """The columns of `Transfers` for one kind of send, given who makes each payload."""
        receive, further = COUNTERPARTS[send]
        # The stages that send, and those that receive; the last or the first of all takes no part.
        senders = np.arange(max(0, -further), len(self.runs) - max(0, further))
        source, target = self.runs[senders], self.runs[senders + further]
        row, microbatch = np.nonzero((source != target) & (source >= 0) & (target >= 0))
        ranks = source[row, microbatch], target[row, microbatch]
        sending, receiving = (senders[row], microbatch), (senders[row] + further, microbatch)
        return (
            receiving[0],
            microbatch,
            *ranks,
            payloads[sending],
            payloads[receiving],
            self._on(self.of(send)[sending], ranks[0]),
            self._on(self.of(receive)[receiving], ranks[1]),
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


def dataflow_of(columns: Columns, stages: int, microbatches: int) -> Dataflow:
    """Find where every action of every (stage, microbatch) stands.

    Raises UnsoundError where actions name others, or are fewer than these.
    """
    named = np.flatnonzero(columns.microbatch >= 0)
    kind, stage, microbatch = (x[named] for x in (columns.kind, columns.stage, columns.microbatch))
    # A file may claim a billion microbatches: no table is made that the lists can't fill.
    if stages * microbatches > len(columns):
        raise UnsoundError(
            f"{len(columns)} actions are too few for {stages} stages and {microbatches} "
            "microbatches"
        )
    if columns.stage.max(initial=0) >= stages or microbatch.max(initial=0) >= microbatches:
        raise UnsoundError("an action names an unknown stage or microbatch")
    pair = stage * microbatches + microbatch
    places = first_places(kind, pair, named, stages * microbatches)
    return Dataflow(columns, places.reshape(-1, stages, microbatches))


def first_places(kind: Ints, pair: Ints, places: Ints, pairs: int) -> Ints:
    """For each kind and (stage, microbatch), numbered by `pair`, its first place, or -1."""
    none = np.iinfo(np.int64).max
    table = np.full(len(KIND_INDEX) * pairs, none)
    np.minimum.at(table, kind * pairs + pair, places)
    return np.where(table == none, -1, table).reshape(len(KIND_INDEX), pairs)
