"""Schedule → Graph: who makes, reads and ends each value, and what meets on which channel.

Everything here follows from the two tables of `schedir.ir.kinds`; no kind is named. The peer of a
send or receive is never computed from a formula: it is the rank that runs the neighbouring stage on
that microbatch, and that is the rank whose list has its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, reduce

import attrs
import numpy as np

from schedir.errors import UnsoundError
from schedir.ir import (
    COMMUNICATION,
    COMPUTE,
    CONSUMES,
    COPIES,
    COUNTERPARTS,
    GATHERS,
    GROUPS,
    HOMES,
    KIND_INDEX,
    KINDS,
    RELEASES,
    STEPS,
    SUMS,
    VALUES,
    Action,
    Bools,
    Columns,
    Ints,
    Kind,
    Schedule,
)
from schedir.ir.kinds import STAGE_WIDE, Use, uses_of

_BESIDE = COPIES | GATHERS | SUMS
"""The kinds that run beside compute, and whose result compute waits for."""


@attrs.frozen(eq=False)
class Pairs:
    """The places of the actions of each (stage, microbatch), in any list, however wrong.

    `numbers` are those of the pairs, ascending, each stage × microbatches + microbatch: of all
    pairs, or only of those that occur if the list can't have an action for each.
    `places[kind, row]` is the first place of each kind of action of the pair in that row, -1 if it
    is not listed; shape [kinds, pairs]. `shape` is (stages, microbatches).
    """

    shape: tuple[int, int]
    numbers: Ints
    places: Ints

    def of(self, kind: Kind) -> Ints:
        """The first places of a kind, by row."""
        places: Ints = self.places[KIND_INDEX[kind]]
        return places

    def rows(self, columns: Columns, places: Ints) -> Ints:
        """The rows of the pairs of these places, each of which occurs."""
        numbers = columns.stage[places] * self.shape[1] + columns.microbatch[places]
        return numbers if self.every else np.searchsorted(self.numbers, numbers)

    @property
    def every(self) -> bool:
        """Whether there is a row for each pair."""
        return len(self.numbers) == self.shape[0] * self.shape[1]

    def listed(self, kind: Kind, stage: int, microbatch: int) -> int:
        """The place of an action, -1 if it is not listed."""
        stages, microbatches = self.shape
        if not (0 <= stage < stages and 0 <= microbatch < microbatches):
            return -1
        number = stage * microbatches + microbatch
        row = int(np.searchsorted(self.numbers, number))
        known = row < len(self.numbers) and self.numbers[row] == number
        return int(self.of(kind)[row]) if known else -1


@attrs.frozen(eq=False, slots=False)
class Transfers:
    """Every tensor that crosses from one rank to another: activations first, by stage.

    All fields are places, -1 if the lists lack the action. `maker` and `user` are the compute that
    makes and uses the tensor, on the ranks `source` and `target`, and `send` and `receive` are on
    these ranks too. `stage` is the receiver's, `kind` the index of its receive in KINDS. All arrays
    have the shape [transfers].

    If they are `apart`, activations and gradients have channels of their own.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    source: Ints
    target: Ints
    maker: Ints
    user: Ints
    send: Ints
    receive: Ints
    apart: bool = attrs.field(default=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def is_gradient(self) -> Bools:
        """True where a transfer carries a gradient, False for an activation."""
        return np.arange(len(self)) >= len(self) // 2

    @cached_property
    def matched(self) -> Bools:
        """True where both ends are listed."""
        return (self.send >= 0) & (self.receive >= 0)

    @cached_property
    def by_channel(self) -> tuple[Ints, Bools]:
        """The matched transfers, channel by channel in the order of the sends, and which of them
        follow another one on the same channel."""
        listed = np.flatnonzero(self.matched)
        order = listed[np.lexsort((self.send[listed], self.channel[listed]))]
        return order, np.diff(self.channel[order], prepend=-1) == 0

    @property
    def in_turn(self) -> tuple[Ints, Ints]:
        """The transfers that follow another one on their channel, and those that they follow."""
        order, follows = self.by_channel
        return order[1:][follows[1:]], order[:-1][follows[1:]]

    @cached_property
    def swapped(self) -> Ints:
        """The transfers that are received before the one that they follow on their channel."""
        later, earlier = self.in_turn
        return later[self.receive[later] < self.receive[earlier]]

    @cached_property
    def channel(self) -> Ints:
        """By transfer, the number of its channel; these ascend with the source, then the target."""
        channel: Ints = self.source * (1 + self.target.max(initial=0)) + self.target
        return 2 * channel + self.is_gradient if self.apart else channel

    def beside(self, number: int) -> Ints:
        """The matched transfers on the channel of a transfer, in the order of the sends."""
        order, channel = self.by_channel[0], self.channel
        begin, end = np.searchsorted(channel[order], channel[number] + np.arange(2))
        return order[begin:end]

    def orders(self, number: int) -> tuple[Ints, Ints, Ints]:
        """The matched transfers on the channel of a transfer in the order of the sends, in that of
        the receives, and the turns at which these differ."""
        sent = self.beside(number)
        received = sent[np.argsort(self.receive[sent])]
        return sent, received, np.flatnonzero(sent != received)


@attrs.frozen(eq=False)
class Touch:
    """All places at which a kind makes, reads or ends a value, as its row of the table says.

    `values` are the numbers of the values, `places` those of the actions; shape [touches].
    """

    kind: Kind
    use: Use
    places: Ints
    values: Ints


@attrs.frozen(eq=False, slots=False)
class Graph:
    """A schedule of sound structure, compiled.

    `places[kind][stage, microbatch]` is the place of each action, -1 if it is not listed, the first
    if it is listed several times; shape [kinds, stages, microbatches].
    """

    schedule: Schedule
    places: Ints

    @property
    def columns(self) -> Columns:
        """The lists."""
        return self.schedule.columns

    # Actions.

    @cached_property
    def present(self) -> Sequence[Kind]:
        """The kinds of which some action is listed."""
        return [KINDS[code] for code in np.flatnonzero(np.bincount(self.columns.kind)).tolist()]

    def of(self, *kinds: Kind) -> Ints:
        """The places of these kinds, of several the last; shape [stages, microbatches]."""
        return reduce(np.maximum, (self.places[KIND_INDEX[kind]] for kind in kinds))

    def where(self, does: str, value: str) -> Ints:
        """The places of the compute that makes, reads or ends a value by (stage, microbatch), -1
        for none; of several kinds the last. Shape [stages, microbatches]."""
        return self.of(*(kind for kind in COMPUTE if uses_of(kind, does, value)))

    @cached_property
    def home(self) -> Ints:
        """The forward of each stage on each microbatch, shape [stages, microbatches]."""
        return self.of(*HOMES)

    @cached_property
    def weight_gradients(self) -> Ints:
        """What completes the gradient of a stage's parameters: its B or its W."""
        return self.where("make", "share")

    @property
    def runs(self) -> Ints:
        """The rank that runs each stage on each microbatch, shape [stages, microbatches]."""
        return self.neighbours(0)

    # Stages on ranks, and the rounds from one update to the next.

    @cached_property
    def holding(self) -> Ints:
        """For every place, the number of its stage on its rank, as in `schedule.holdings`.

        Raises UnsoundError for an action on a rank that does not hold its stage.
        """
        schedule, columns = self.schedule, self.columns
        held = np.array([stage * schedule.ranks + rank for stage, rank in schedule.holdings])
        wanted = columns.stage * schedule.ranks + columns.rank
        # Where each stage is on one rank, its number is all there is to find.
        holding = columns.stage if len(held) == schedule.stages else np.searchsorted(held, wanted)
        wrong = np.flatnonzero(np.append(held, -1)[holding] != wanted)
        if len(wrong):
            rank, action = columns.rank[wrong[0]], columns.action(int(wrong[0]))
            raise UnsoundError(f"rank {rank} lists {action}, but does not hold its stage")
        return holding

    @cached_property
    def steps(self) -> Ints:
        """The places of the updates of all stages, ascending."""
        return self.columns.where(*STEPS)

    @cached_property
    def steps_of(self) -> Ints:
        """How many updates each stage has on each of its ranks, as in `schedule.holdings`."""
        return np.bincount(self.holding[self.steps], minlength=len(self.schedule.holdings))

    @cached_property
    def turn(self) -> Ints:
        """For every place, how many updates of its stage are listed before it on its rank. That is
        its round, and the newest version of the weights there."""
        size, holding = len(self.columns), self.holding
        steps = np.sort(holding[self.steps] * size + self.steps)
        # The steps of this holding, and of those before it.
        passed = np.searchsorted(steps, holding * size + np.arange(size))
        return passed - self.first_round[holding] + holding

    @cached_property
    def reads(self) -> Ints:
        """The weight version that each forward reads, shape [stages, microbatches]."""
        named = self.columns.version[self.home]
        return np.where(named >= 0, named, self.turn[self.home])

    @cached_property
    def summed(self) -> Bools:
        """True for each stage whose gradients are summed over ranks: it lives on several, its
        weights are sharded, or it is on one rank and some such stage lists a sum, over a
        data-parallel group outside the schedule."""
        several = np.array([len(held) > 1 for held in self.schedule.placement])
        alone = ~(several | self.sharded)
        return ~alone | alone[self.columns.stage[self.columns.where(*SUMS)]].any()

    @cached_property
    def sharded(self) -> Bools:
        """True for each stage whose weights are sharded over ranks: the lists gather them."""
        gathered = self.columns.stage[self.columns.where(*GATHERS, *RELEASES)]
        return np.isin(np.arange(self.schedule.stages), gathered)

    # What meets: transfers, and the collectives of a stage's ranks.

    def peer(self, action: Action) -> int | None:
        """The rank at the other end of a send or receive; None if there is no such rank."""
        other = action.counterpart
        if other is None:
            return None
        rank = int(self._framed[1 + other.stage, other.microbatch])
        return None if rank < 0 else rank

    @cached_property
    def peers(self) -> Ints:
        """The rank at the other end of every place, -1 where there is none."""
        columns = self.columns
        peers: Ints = np.full(len(columns), -1)
        for kind, (_, further) in COUNTERPARTS.items():
            places = columns.where(kind)
            beside = self.neighbours(further)
            peers[places] = beside[columns.stage[places], columns.microbatch[places]]
        return peers.clip(-1)

    def neighbours(self, further: int) -> Ints:
        """The rank that runs the stage `further` on, -1 if nobody does, and -2 if there is no such
        stage; shape [stages, microbatches]."""
        return self._framed[1 + further : 1 + further + self.schedule.stages]

    @cached_property
    def _framed(self) -> Ints:
        """The `runs`, with a row before and after them for stages that do not exist."""
        framed = np.full((self.schedule.stages + 2, self.schedule.microbatches), -2)
        framed[1:-1] = np.where(self.home >= 0, self.columns.rank[self.home], -1)
        return framed

    @cached_property
    def transfers(self) -> Transfers:
        """Every tensor that crosses from one rank to another."""
        receives = sorted({*CONSUMES.values()}, key=lambda receive: COUNTERPARTS[receive][1])
        columns = [self._crossing(receive) for receive in receives]
        return Transfers(*map(np.concatenate, zip(*columns, strict=True)))

    @cached_property
    def transfers_apart(self) -> Transfers:
        """The same, on channels of their own for activations and gradients."""
        return attrs.evolve(self.transfers, apart=True)

    def _crossing(self, receive: Kind) -> tuple[Ints, ...]:
        """The columns of `Transfers` for one kind of receive."""
        send, back = COUNTERPARTS[receive]
        made = self.where("make", uses_of(send)[0].value)
        used = self.where("end", uses_of(receive)[0].value)
        target, source = self.runs, self.neighbours(back)
        receiving = np.nonzero((source != target) & (source >= 0) & (target >= 0))
        stage, microbatch = receiving
        source, target, sending = source[receiving], target[receiving], (stage + back, microbatch)
        ends = (self.of(send)[sending], source), (self.of(receive)[receiving], target)
        return (
            np.full_like(stage, KIND_INDEX[receive]),
            stage,
            microbatch,
            source,
            target,
            made[sending],
            used[receiving],
            *(np.where(self.columns.rank[places] == rank, places, -1) for places, rank in ends),
        )

    @cached_property
    def crossing(self) -> Ints:
        """For every place, the number of the transfer that it sends, receives or uses, or -1."""
        transfers = self.transfers
        crossing = np.full(len(self.columns) + 1, -1)
        for places in (transfers.user, transfers.receive, transfers.send):
            crossing[places[::-1]] = np.arange(len(transfers))[::-1]  # of several the first
        return crossing

    @cached_property
    def lone(self) -> Ints:
        """The sends and receives that meet nobody: no other rank is at their other end, or their
        rank does not run their stage."""
        lone = np.append(self.columns.is_kind(*COMMUNICATION), False)
        lone[self.transfers.send] = lone[self.transfers.receive] = False
        return np.flatnonzero(lone)

    @cached_property
    def collectives_of(self) -> dict[int, dict[int, list[int]]]:
        """For each stage with collectives, the places of its collectives on each of its ranks.

        Raises UnsoundError for an action on a rank that does not hold its stage.
        """
        placement, places = self.schedule.placement, self.columns.where(*GROUPS)
        found: dict[int, dict[int, list[int]]] = {
            stage: {rank: [] for rank in placement[stage]}
            for stage in sorted({*self.columns.stage[places].tolist()})
        }
        for number, place in zip(self.holding[places].tolist(), places.tolist(), strict=True):
            stage, rank = self.schedule.holdings[number]
            found[stage][rank].append(place)
        return found

    @cached_property
    def collectives(self) -> list[tuple[int, ...]]:
        """The places of each collective: the k-th ones of a stage on its ranks.

        Collectives that some rank lacks, or at whose turn ranks list other kinds, are left out.
        """
        by_stage, kind = self.collectives_of.values(), self.columns.kind
        turns = [turn for by_rank in by_stage for turn in zip(*by_rank.values(), strict=False)]
        return [turn for turn in turns if len(turn) == 1 or len({*kind[[*turn]].tolist()}) == 1]

    @cached_property
    def sums(self) -> dict[int, int]:
        """For each update that applies a sum, the place of the update and the place of the sum."""
        user, made = self.needs
        summed = self.columns.is_kind(*SUMS)[made]
        return dict(zip(user[summed].tolist(), made[summed].tolist(), strict=True))

    # Values.

    @cached_property
    def first_round(self) -> Ints:
        """Of each stage on each rank, the number of its first round, counted over all of them; one
        more entry for how many there are."""
        return np.cumsum(np.append(0, self.steps_of + 1))

    @cached_property
    def base(self) -> dict[str, int]:
        """By name, the number of the first of its values; "" for how many there are in all.

        Those of a microbatch are numbered by stage, then microbatch; the others as `first_round`.
        """
        found, size = {}, 0
        for name, value in VALUES.items():
            found[name] = size
            size += self.runs.size if value.per == "microbatch" else int(self.first_round[-1])
        return found | {"": size}

    def numbers(self, name: str) -> Ints:
        """The numbers of a name's values by (stage, microbatch): those of a neighbour, where one
        rank runs both stages and they are one. Shape [stages × microbatches]."""
        pairs, (other, further) = np.arange(self.runs.size), VALUES[name].link or (name, 0)
        own = self.base[name] + pairs
        same = (self.runs == self.neighbours(further)) & (self.runs >= 0)
        others = self.base[other] + pairs + further * self.schedule.microbatches
        return np.where(same.ravel(), others, own)

    def touches(self, *names: str) -> Iterator[Touch]:
        """All that is done to the values of these names, or of all; kind by kind. A send or receive
        that meets nobody does nothing."""
        numbers: dict[str, Ints] = {}
        for kind in self.present:
            alike: dict[tuple[str, ...], tuple[Ints, Ints]] = {}
            for use in kind.meaning.uses:
                if names and use.value not in names:
                    continue
                where = use.where, use.beside, use.without
                if where not in alike:
                    alike[where] = self._restricted(kind, use)
                places, at = alike[where]
                value = VALUES[use.value]
                if value.link:
                    if use.value not in numbers:
                        numbers[use.value] = self.numbers(use.value)
                    values = numbers[use.value][at]
                elif value.per == "microbatch":
                    values = self.base[use.value] + at
                else:
                    holding, turn = self.holding[places], self.turn[places]
                    turn += use.version == "next"
                    if use.version in ("named", "of home"):
                        turn = self.reads.ravel()[at]
                    # A version that nobody makes has the number of none.
                    known = turn <= self.steps_of[holding]
                    values = np.where(
                        known, self.base[use.value] + self.first_round[holding] + turn, -1
                    )
                yield Touch(kind, use, places, values)

    def _restricted(self, kind: Kind, use: Use) -> tuple[Ints, Ints]:
        """The places of a kind at which a use takes place, and the numbers of their (stage,
        microbatch), of which a kind for a whole stage has none."""
        stages = self._stages[use.where]
        if kind in STAGE_WIDE:
            listed = self.columns.where(kind)
            return listed[stages[self.columns.stage[listed]]], np.zeros(0, np.int64)
        places = self.of(kind)
        takes_place = (places >= 0) & stages[:, None]
        for other, wanted in ((use.beside, True), (use.without, False)):
            if other:
                takes_place &= (self.of(Kind(other)) >= 0) == wanted
        if kind in COMMUNICATION and len(self.lone):
            takes_place &= ~np.isin(places, self.lone)
        return places[takes_place], np.flatnonzero(takes_place)

    @cached_property
    def _stages(self) -> dict[str, Bools]:
        """The stages to which a use may be restricted."""
        number = np.arange(self.schedule.stages)
        found = {
            "any": number >= 0,
            "first": number == 0,
            "last": number == len(number) - 1,
            "summed": self.summed,
            "sharded": self.sharded,
        }
        return found | {f"not {where}": ~stages for where, stages in found.items()}

    @cached_property
    def needs(self) -> tuple[Ints, Ints]:
        """The places that wait for their inputs, and the places that make those inputs: a receive
        (or the maker on another rank, if the lists have no communication yet), a copy, a sum, or a
        gathering of weights."""
        transfers, size = self.transfers, len(self.columns)
        made = transfers.receive if self.schedule.is_complete else transfers.maker
        crosses = (transfers.user >= 0) & (made >= 0)
        rows = [(transfers.user[crosses], made[crosses])]
        names = {use.value for kind in _BESIDE & {*self.present} for use in uses_of(kind, "make")}
        touches = [*self.touches(*names)] if names else []
        # Each as one number, the value first; before all makers one of nothing.
        makes = [touch for touch in touches if touch.use.does == "make" and touch.kind in _BESIDE]
        keys = [touch.values * size + touch.places for touch in makes]
        makers = np.sort(np.concatenate(([-3 * size], *keys)))
        for touch in touches:
            if touch.use.does != "make":
                # The last one before each place that made the same value.
                before = np.searchsorted(makers, touch.values * size + touch.places) - 1
                known = makers[before] // size == touch.values
                rows.append((touch.places[known], makers[before[known]] % size))
        user, made = map(np.concatenate, zip(*rows, strict=True))
        return user, made


def graph_of(schedule: Schedule) -> Graph:
    """The graph of a schedule, made once for each Schedule object.

    Raises UnsoundError if actions name unknown stages or microbatches, or are fewer than the stages
    and microbatches.
    """

    def found() -> Graph:
        columns, pairs = schedule.columns, pairs_of(schedule)
        stages, microbatches = pairs.shape
        if not pairs.every:
            raise UnsoundError(
                f"{len(columns)} actions are too few for {stages} stages and {microbatches} "
                "microbatches"
            )
        if (
            columns.stage.max(initial=0) >= stages
            or columns.microbatch.max(initial=0) >= microbatches
        ):
            raise UnsoundError("an action names an unknown stage or microbatch")
        # Of a copy: the schedule itself remembers the graph, and each would keep the other alive.
        own = attrs.evolve(schedule)
        own.memo["pairs"] = pairs
        return Graph(own, pairs.places.reshape(-1, stages, microbatches))

    return schedule.once("graph", found)


def pairs_of(schedule: Schedule) -> Pairs:
    """The (stage, microbatch) pairs of a schedule, found once for each Schedule object. Actions
    that name unknown stages or microbatches are left out."""

    def found() -> Pairs:
        columns, stages, microbatches = schedule.columns, schedule.stages, schedule.microbatches
        named = (columns.microbatch >= 0) & (columns.microbatch < microbatches)
        places = np.flatnonzero(named & (columns.stage < stages))
        row = columns.stage[places] * microbatches + columns.microbatch[places]
        # A file may claim a billion microbatches: no table is made that the lists can't fill.
        if stages * microbatches <= len(columns):
            numbers = np.arange(stages * microbatches)
        else:
            numbers, row = np.unique(row, return_inverse=True)
        table = np.full(len(KINDS) * len(numbers), -1)
        # Of several that are written to one cell the last stays.
        table[(columns.kind[places] * len(numbers) + row)[::-1]] = places[::-1]
        return Pairs((stages, microbatches), numbers, table.reshape(len(KINDS), -1))

    return schedule.once("pairs", found)
