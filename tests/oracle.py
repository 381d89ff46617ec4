"""Runs small schedules for real, under each channel model, and says what happened.

An interpreter of the meaning of actions (blocking, data and all), written apart from schedir's
checker: it fires whatever can fire, in random order, until nothing can. Payloads are tokens that
say what was computed from what, so that wrong data shows.

    completes  every action ran, and each stage applied the right gradients once
    wrong      every action ran, but some payload or gradient was not what it should be
    blocks     some action can never run

Stages that share parameters (`ties`) sum their gradients before any of them steps: an OPTIM_STEP
waits until each rank has what it gives to that sum.

A forward that the list runs again (R) keeps nothing that its backward can use; R does. Copies to
the host and back happen in list order beside the rank's compute, and a backward waits for the copy
that brings back what it needs.

Of a stage that some list gathers, a rank has its shard. It computes while the weights are gathered,
and updates while they are not.

An overlapped pair fires as one. The sends and receives of a batch fire one by one, in any order,
but whoever waits for one of them waits for the whole batch, and it is not posted before each of
them may be. Calls that block (`host`) know no batches: there it is one end after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Literal

import attrs

from schedir import Action, Kind, Schedule, Together
from schedir.ir import COMPLETES_GRADIENTS, COMPUTE, READS_WEIGHTS, RECEIVES, SENDS, Entry

Outcome = Literal["completes", "wrong", "blocks"]
COPIES = {Kind.OFFLOAD, Kind.RELOAD}
GRADIENTS = {Kind.SEND_GRAD, Kind.RECV_GRAD}
MEETINGS = {Kind.REDUCE_GRAD, Kind.UNSHARD}


def parts(entry: Entry) -> tuple[Action, ...]:
    return entry.actions if isinstance(entry, Together) else (entry,)


@attrs.define
class Rank:
    actions: tuple[Action, ...]
    entry: list[int]  # of each action, the number of its entry
    done: list[bool]
    inputs: dict[tuple[int, int], Any] = attrs.field(factory=dict)  # received activations
    grads: dict[tuple[int, int], Any] = attrs.field(factory=dict)  # received gradients
    outputs: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    input_grads: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    summed: set[int] = attrs.field(factory=set)  # stages reduced since their last step
    split: set[tuple[int, int]] = attrs.field(factory=set)  # whose input gradient is done
    steps: dict[int, int] = attrs.field(factory=dict)
    accumulated: dict[int, list[Any]] = attrs.field(factory=dict)
    applied: dict[int, list[list[Any]]] = attrs.field(factory=dict)
    read: dict[tuple[int, int], int] = attrs.field(factory=dict)  # weight versions
    kept: set[tuple[int, int]] = attrs.field(factory=set)  # whose activation is there
    stored: set[tuple[int, int]] = attrs.field(factory=set)  # whose activation is on the host
    gathered: set[int] = attrs.field(factory=set)  # stages
    faults: list[str] = attrs.field(factory=list)


def own(action: Action) -> tuple[int, int | None]:
    return action.stage, action.microbatch


class Oracle:
    def __init__(
        self, schedule: Schedule, channel: str, seed: int = 0, ties: Iterable[tuple[int, ...]] = ()
    ) -> None:
        self.schedule = schedule
        self.ties = tuple(ties)
        self.channel = channel
        self.random = random.Random(seed)
        self.ranks = [
            Rank(
                tuple(action for entry in entries for action in parts(entry)),
                [number for number, entry in enumerate(entries) for _ in parts(entry)],
                [False for entry in entries for _ in parts(entry)],
            )
            for entries in schedule.actions
        ]
        self.runs: dict[tuple[int, int], int] = {}
        self.summed: set[int] = set()
        self.not_summed: set[int] = set()
        own = [a for me in self.ranks for a in me.actions]
        self.sharded = {a.stage for a in own if a.kind in (Kind.UNSHARD, Kind.RESHARD)}
        for rank, me in enumerate(self.ranks):
            for a in me.actions:
                if a.kind is Kind.FORWARD and a.microbatch is not None:
                    self.runs.setdefault((a.stage, a.microbatch), rank)

    def run(self) -> Outcome:
        progress = True
        while progress:
            progress = False
            order = list(range(len(self.ranks)))
            self.random.shuffle(order)
            for rank in order:
                for index in range(len(self.ranks[rank].actions)):
                    if not self.ranks[rank].done[index] and self.fire(rank, index):
                        progress = True
        if not all(all(rank.done) for rank in self.ranks):
            return "blocks"
        return "wrong" if self.wrong() else "completes"

    # What may happen now.

    def posted(self, rank: int, index: int) -> bool:
        """Whether nothing in the rank's list holds this communication action back."""
        me = self.ranks[rank]
        action = me.actions[index]
        if self.channel == "host":
            return all(me.done[:index])
        batch = self.batch(rank, index)
        for earlier in range(batch[0]):
            other = me.actions[earlier]
            if other.kind in COMPUTE or other.kind is Kind.RESHARD:
                if not me.done[earlier]:
                    return False
            elif action.kind is Kind.RESHARD:
                if not me.done[earlier] and (other.kind, other.stage) == (
                    Kind.UNSHARD,
                    action.stage,
                ):
                    return False
            elif COPIES & {action.kind, other.kind}:
                # A rank's copies are a queue of their own.
                if {action.kind, other.kind} <= COPIES and not me.done[earlier]:
                    return False
            elif self.channel == "async":
                # Nothing holds a post back, but the j-th send still meets the j-th receive.
                if not me.done[earlier] and self.same_channel(rank, action, other):
                    return False
            elif not self.over(rank, earlier) and any(
                self.same_queue(rank, me.actions[part], other) for part in batch
            ):
                return False
        return True

    def batch(self, rank: int, index: int) -> range:
        """The actions of an action's entry."""
        entry = self.ranks[rank].entry
        first = entry.index(entry[index])
        return range(first, first + entry.count(entry[index]))

    def over(self, rank: int, index: int) -> bool:
        """Whether all actions of an action's entry are done."""
        return all(self.ranks[rank].done[part] for part in self.batch(rank, index))

    def same_queue(self, rank: int, one: Action, other: Action) -> bool:
        if self.channel == "rank":
            return True
        if MEETINGS & {one.kind, other.kind}:
            return {one.kind, other.kind} <= MEETINGS and one.stage == other.stage
        if self.channel == "pair":
            return self.peer(one) == self.peer(other)
        if self.channel == "direction":
            return (one.kind in GRADIENTS) == (other.kind in GRADIENTS)
        return self.same_channel(rank, one, other)

    def same_channel(self, rank: int, one: Action, other: Action) -> bool:
        return self.channel_of(rank, one) == self.channel_of(rank, other)

    def peer(self, action: Action) -> int | None:
        step = 1 if action.kind in (Kind.SEND_ACT, Kind.RECV_GRAD) else -1
        return self.runs.get((action.stage + step, action.microbatch or 0))

    def channel_of(self, rank: int, action: Action) -> tuple[Any, ...] | None:
        if action.kind in MEETINGS:
            return ("group", action.stage)
        peer = self.peer(action)
        return (rank, peer) if action.kind in SENDS else (peer, rank)

    def fire(self, rank: int, index: int) -> bool:
        me = self.ranks[rank]
        action = me.actions[index]
        if action.kind in COMPUTE:
            return self.compute(rank, index)
        if not self.posted(rank, index):
            return False
        if action.kind in MEETINGS:
            return self.meet(rank, index)
        if action.kind is Kind.RESHARD:
            if action.stage not in me.gathered:
                me.faults.append(f"{action} gives up what is not gathered")
            me.gathered.discard(action.stage)
            me.done[index] = True
            return True
        if action.kind in COPIES:
            return self.copy(rank, index)
        if action.kind in RECEIVES:
            return False  # fired from the send's side
        # A payload exists once the compute that makes it has run; sends never run before it.
        target = self.peer(action)
        if target is None or target == rank:
            me.faults.append(f"{action} has no peer")
            me.done[index] = True
            return True
        sends, receives = SENDS, RECEIVES
        if self.channel == "direction":  # whose two communicators have channels of their own
            sends = frozenset({action.kind})
            receives = RECEIVES & GRADIENTS if sends & GRADIENTS else RECEIVES - GRADIENTS
        if self.next_on_channel(rank, sends, target) != index:
            return False
        other = self.ranks[target]
        there = self.next_on_channel(target, receives, rank)
        if there is None or not self.posted(target, there):
            return False
        if not any(self.makes(earlier, action) for earlier in me.actions[:index]):
            me.faults.append(f"{action} does not wait for its payload")
        self.transfer(me, action, other, other.actions[there])
        me.done[index] = other.done[there] = True
        return True

    def next_on_channel(self, rank: int, ends: Iterable[Kind], peer: int) -> int | None:
        """The first send to a peer, or receive from it, that has not happened yet."""
        me = self.ranks[rank]
        listed = zip(me.actions, me.done, strict=True)
        return next(
            (
                i
                for i, (a, d) in enumerate(listed)
                if not d and a.kind in ends and self.peer(a) == peer
            ),
            None,
        )

    def compute(self, rank: int, index: int) -> bool:
        """Run the entry of a compute action, an overlapped pair as one."""
        me = self.ranks[rank]
        entry = self.batch(rank, index)
        for earlier in range(entry[0]):
            other = me.actions[earlier]
            in_order = other.kind in COMPUTE or other.kind is Kind.RESHARD
            if not me.done[earlier] and (in_order or self.channel == "host"):
                return False
            needed = any(self.consumes(me.actions[part], other) for part in entry)
            if needed and not (
                me.done[earlier] if self.channel == "host" else self.over(rank, earlier)
            ):
                return False
        action = me.actions[index]
        if action.kind is Kind.OPTIM_STEP and not self.summed_over_ties(rank, index):
            return False
        for part in entry:
            self.note_order(rank, part)
            self.run_compute(rank, me.actions[part])
        for part in entry:
            me.done[part] = True
        return True

    def note_order(self, rank: int, index: int) -> None:
        """What is wrong with an action where it stands."""
        me = self.ranks[rank]
        action = me.actions[index]
        before = [attrs.evolve(earlier, version=None) for earlier in me.actions[:index]]
        if action.microbatch is not None and attrs.evolve(action, version=None) in before:
            me.faults.append(f"{action} runs again")
        sums = [a for a, done in zip(me.actions[:index], me.done, strict=False) if not done]
        touches = action.kind in COMPLETES_GRADIENTS or action.kind is Kind.OPTIM_STEP
        if touches and any(a.kind is Kind.REDUCE_GRAD and a.stage == action.stage for a in sums):
            me.faults.append(f"{action} runs beside the sum that it comes after")
        if self.races(rank, index):
            me.faults.append(f"{action} does not wait for its receive")

    def summed_over_ties(self, rank: int, index: int) -> bool:
        """Whether all that share parameters with a stage have reached the step of the same number.

        Those that do through a third stage wait for each other's sums too.
        """
        stage = self.ranks[rank].actions[index].stage
        turn = self.steps_of(rank, stage).index(index)
        tied = {stage}
        for _ in self.ties:
            tied |= {s for tie in self.ties if tied & set(tie) for s in tie}
        ranks = {held for other in tied for held in self.schedule.placement[other]}
        # A sum over ranks is communication, which some transports keep in order.
        queued = self.channel == "host" or (self.channel == "rank" and len(ranks) > 1)
        return len(tied) == 1 or all(
            self.reached(held, index, queued)
            for other in tied
            for held in self.schedule.placement[other]
            for index in self.steps_of(held, other)[turn : turn + 1]
        )

    def steps_of(self, rank: int, stage: int) -> list[int]:
        return [
            i
            for i, a in enumerate(self.ranks[rank].actions)
            if a.kind is Kind.OPTIM_STEP and a.stage == stage
        ]

    def reached(self, rank: int, index: int, queued: bool) -> bool:
        """Whether nothing but other steps stands before a step: its gradients are there, and if it
        is `queued` behind all communication, that is over."""
        me = self.ranks[rank]
        for earlier, done in zip(me.actions[:index], me.done, strict=False):
            if done or earlier.kind is Kind.OPTIM_STEP:
                continue
            if earlier.kind in COMPUTE or queued:
                return False
            if self.consumes(me.actions[index], earlier):
                return False
        return True

    def races(self, rank: int, index: int) -> bool:
        """Whether the action takes what another rank sends without a receive listed before it."""
        me = self.ranks[rank]
        action = me.actions[index]
        neighbour = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        source = self.runs.get((neighbour, action.microbatch or 0))
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return False
        if source is None or source == rank:
            return False
        return not any(self.consumes(action, earlier) for earlier in me.actions[:index])

    @staticmethod
    def makes(compute: Action, send: Action) -> bool:
        kinds = (
            (Kind.FORWARD,) if send.kind is Kind.SEND_ACT else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        )
        same = (compute.stage, compute.microbatch) == (send.stage, send.microbatch)
        return same and compute.kind in kinds

    @staticmethod
    def consumes(compute: Action, other: Action) -> bool:
        if other.kind is Kind.UNSHARD:
            return compute.kind in READS_WEIGHTS and other.stage == compute.stage
        if compute.kind is Kind.OPTIM_STEP:
            return other.kind is Kind.REDUCE_GRAD and other.stage == compute.stage
        needed = {
            Kind.FORWARD: Kind.RECV_ACT,
            Kind.BACKWARD: Kind.RECV_GRAD,
            Kind.BACKWARD_INPUT: Kind.RECV_GRAD,
        }.get(compute.kind)
        if needed is Kind.RECV_GRAD and other.kind is Kind.RELOAD:
            needed = other.kind
        return (
            other.kind is needed
            and other.stage == compute.stage
            and other.microbatch == compute.microbatch
        )

    # What happens then.

    def copy(self, rank: int, index: int) -> bool:
        """Move an activation to the host, or back."""
        me = self.ranks[rank]
        action = me.actions[index]
        source, target = me.kept, me.stored
        if action.kind is Kind.RELOAD:
            source, target = target, source
        key = action.stage, action.microbatch or 0
        if key not in source or any(a == action for a in me.actions[:index]):
            me.faults.append(f"{action} copies what is not there")
        source.discard(key)
        target.add(key)
        me.done[index] = True
        return True

    def transfer(self, me: Rank, send: Action, other: Rank, receive: Action) -> None:
        source = me.outputs if send.kind is Kind.SEND_ACT else me.input_grads
        payload = source.get((send.stage, send.microbatch or 0), "garbage")
        into = other.inputs if receive.kind is Kind.RECV_ACT else other.grads
        if (receive.stage, receive.microbatch or 0) in into:
            other.faults.append(f"{receive} comes again")
        into[receive.stage, receive.microbatch or 0] = payload

    def meet(self, rank: int, index: int) -> bool:
        """The k-th REDUCE_GRADs and UNSHARDs of a stage happen on all its ranks at once."""
        stage = self.ranks[rank].actions[index].stage
        places = []
        for held in self.schedule.placement[stage]:
            there = next(
                (
                    i
                    for i, a in enumerate(self.ranks[held].actions)
                    if a.kind in MEETINGS and a.stage == stage and not self.ranks[held].done[i]
                ),
                None,
            )
            if there is None or not self.posted(held, there):
                return False
            places.append((held, there))
        kinds = {self.ranks[held].actions[there].kind for held, there in places}
        if kinds != {Kind.REDUCE_GRAD}:
            for held, there in places:
                me = self.ranks[held]
                if stage in me.gathered or len(kinds) > 1:
                    me.faults.append(f"stage {stage} is gathered again, or meets {kinds}")
                me.gathered.add(stage)
                me.done[there] = True
            return True
        total = sorted(
            (g for held, _ in places for g in self.ranks[held].accumulated.get(stage, [])), key=str
        )
        for held, there in places:
            new = total and stage not in self.ranks[held].summed
            if stage in self.sharded and not new:
                self.ranks[held].faults.append(f"shards of stage {stage} get a sum of nothing new")
            self.ranks[held].accumulated[stage] = list(total)
            self.ranks[held].summed.add(stage)
            self.ranks[held].done[there] = True
        return True

    def run_compute(self, rank: int, action: Action) -> None:
        me = self.ranks[rank]
        stage, m = action.stage, action.microbatch or 0
        last = self.schedule.stages - 1
        if stage in self.sharded and (
            (stage in me.gathered) is not (action.kind in READS_WEIGHTS)
            or action.version is not None
        ):
            me.faults.append(f"{action} finds weights gathered, or not, or names a version")
        if action.kind is Kind.FORWARD:
            newest = me.steps.get(stage, 0)
            if action.version is not None and action.version > newest:
                me.faults.append(f"{action} reads a version to come")
            me.read[stage, m] = newest if action.version is None else action.version
            local = self.runs.get((stage - 1, m)) == rank
            source = me.outputs.get((stage - 1, m)) if local else me.inputs.get((stage, m))
            me.outputs[stage, m] = (m if stage == 0 else source, f"F{stage}")
            if not any(a.kind is Kind.RECOMPUTE and own(a) == own(action) for a in me.actions):
                me.kept.add((stage, m))
        elif action.kind is Kind.RECOMPUTE:
            if (stage, m) not in me.read:
                me.faults.append(f"{action} runs again what has not run here")
            elif action.version not in (None, me.read[stage, m]):
                me.faults.append(f"{action} runs again at another version")
            me.kept.add((stage, m))
        elif action.kind is Kind.OPTIM_STEP:
            me.steps[stage] = me.steps.get(stage, 0) + 1
            me.applied.setdefault(stage, []).append(me.accumulated.pop(stage, []))
            self.note_sum(rank, stage)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            if (stage, m) not in me.split:
                me.faults.append(f"{action} before its input gradient")
            self.accumulate(me, stage, m)
        else:
            assert action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT), f"what does {action} do?"
            if (stage, m) in me.input_grads:
                me.faults.append(f"{action} differentiates again")
            if (stage, m) not in me.kept:
                me.faults.append(f"{action} differentiates what is not kept")
            me.kept.discard((stage, m))
            made = me.outputs.get((stage, m))
            if made != self.activation(stage, m):
                me.faults.append(f"{action} differentiates {made}")
            local = self.runs.get((stage + 1, m)) == rank
            grad = me.input_grads.get((stage + 1, m)) if local else me.grads.get((stage, m))
            if stage != last and grad != ("grad", stage + 1, m):
                me.faults.append(f"{action} gets {grad}")
            me.input_grads[stage, m] = ("grad", stage, m)
            if action.kind is Kind.BACKWARD:
                self.accumulate(me, stage, m)
            else:
                me.split.add((stage, m))

    def accumulate(self, me: Rank, stage: int, m: int) -> None:
        if stage in me.summed:
            me.faults.append(f"a gradient of stage {stage} comes after its sum")
        me.accumulated.setdefault(stage, []).append(m)

    def note_sum(self, rank: int, stage: int) -> None:
        """Of a stage on one rank, REDUCE_GRAD sums over ranks that the schedule does not show."""
        if stage in self.sharded:
            if stage not in self.ranks[rank].summed:
                self.ranks[rank].faults.append(f"stage {stage} has shards without a sum")
        elif len(self.schedule.placement[stage]) == 1:
            (self.summed if stage in self.ranks[rank].summed else self.not_summed).add(stage)
        self.ranks[rank].summed.discard(stage)

    def activation(self, stage: int, m: int) -> Any:
        token: Any = m
        for s in range(stage + 1):
            token = (token, f"F{s}")
        return token

    def wrong(self) -> list[str]:
        faults = [fault for rank in self.ranks for fault in rank.faults]
        several = (stage for stage in self.sharded if len(self.schedule.placement[stage]) > 1)
        faults += [f"stage {stage} has shards on several ranks" for stage in several]
        faults += [f"{key} stays on the host" for rank in self.ranks for key in rank.stored]
        faults += [f"{stage} stays gathered" for rank in self.ranks for stage in rank.gathered]
        everything = sorted(range(self.schedule.microbatches))
        any_step = any(a.kind is Kind.OPTIM_STEP for me in self.ranks for a in me.actions)
        groups = []
        for stage, held in enumerate(self.schedule.placement):
            by_rank = []
            for rank in held:
                me = self.ranks[rank]
                steps = me.applied.get(stage, [])
                rest = me.accumulated.get(stage, [])
                if any_step and rest:
                    faults.append(f"stage {stage}: {rest} never applied")
                if rest:
                    self.note_sum(rank, stage)
                by_rank.append([sorted(step) for step in ([rest] if not any_step else steps)])
            if any(one != by_rank[0] for one in by_rank):
                faults.append(f"stage {stage}: replicas differ")
            flat = sorted(m for step in by_rank[0] for m in step)
            if flat != everything:
                faults.append(f"stage {stage}: applied {flat}")
            if any_step:
                groups.append(by_rank[0])
                if any(not step for step in by_rank[0]):
                    faults.append(f"stage {stage}: an empty step")
        for tie in self.ties:
            read = [
                {m: v for me in self.ranks for (s, m), v in me.read.items() if s == stage}
                for stage in tie
            ]
            if any(one != read[0] for one in read):
                faults.append(f"stages {tie} share parameters, but read versions {read}")
        if self.summed and self.not_summed:
            faults.append(f"stages {self.summed} are summed, {self.not_summed} are not")
        for tie in self.ties if any_step else ():
            if any(groups[stage] != groups[tie[0]] for stage in tie):
                faults.append(f"stages {tie} share parameters, but group differently: {groups}")
        return faults


def happens(
    schedule: Schedule, channel: str, seed: int = 0, ties: Iterable[tuple[int, ...]] = ()
) -> Outcome:
    """What running the schedule under a channel model comes to."""
    return Oracle(schedule, channel, seed, ties).run()
