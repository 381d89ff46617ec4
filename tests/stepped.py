"""A simulation that steps from one moment to the next, written apart from schedir's clock.

Every rank walks down its list: it posts what it comes to, and runs compute once its input is there.
At each moment whatever may start starts, until nothing else can; then time goes on to the next end.
Nothing is worked out from what it depends on: there are only states, and who is busy until when.

Under a `channel` model each end of a transfer stands in the queue of its own rank: a send until its
bytes are gone, a receive until the payload is there. Under `host` a rank comes to nothing else
before that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from schedir import Action, CostModel, Kind, Schedule, Together
from schedir.ir import COMMUNICATION, COMPUTE, CONSUMES, COPIES, SENDS

GRADIENTS = {Kind.SEND_GRAD, Kind.RECV_GRAD}
USES_SAVED = {Kind.BACKWARD, Kind.BACKWARD_INPUT}
"""What needs that an activation is back from the host."""
Key = tuple[int, int]
"""The rank and index of an entry."""


def of_stage(value: Any, stage: int) -> Any:
    return value[stage] if isinstance(value, tuple) else value


def cost_of(costs: CostModel, action: Action) -> Any:
    """What an action of compute takes alone."""
    value = getattr(costs, action.kind.name.lower())
    if action.kind is Kind.RECOMPUTE and value is None:
        value = costs.forward
    return of_stage(value, action.stage)


def of_link(value: Any, link: Key) -> Any:
    return value[link] if isinstance(value, dict) else value


@attrs.define
class Copy:
    """A copy to the host or back: when its rank came to it, and when it started."""

    key: Key
    take: Any
    posted: Any = None
    start: Any = None

    def over(self, now: Any) -> bool:
        return self.start is not None and now >= self.start + self.take


@attrs.define(eq=False)
class Exchange:
    """A transfer, or a sum: its ends as (entry, action), all of which have to be posted."""

    ends: list[tuple[Key, Action]]
    hold: Any
    take: Any
    waits: set[Key]  # the ends that are not posted yet
    start: Any = None

    def free(self, now: Any) -> bool:
        return self.start is not None and now >= self.start + self.hold

    def arrived(self, now: Any) -> bool:
        return self.start is not None and now >= self.start + self.take


class Stepped:
    def __init__(
        self,
        schedule: Schedule,
        durations: Mapping[Key, Any],
        costs: CostModel,
        receives: str,
        channel: str | None = None,
    ) -> None:
        self.schedule, self.costs, self.durations = schedule, costs, durations
        self.ahead, self.channel = receives == "ahead", channel
        self.entries = {
            (rank, index): entry.actions if isinstance(entry, Together) else (entry,)
            for rank, entries in enumerate(schedule.actions)
            for index, entry in enumerate(entries)
        }
        self.channels: dict[tuple[Key, bool], list[Exchange]] = {}
        self.sums: dict[int, list[Exchange]] = {}
        self.of_entry: dict[Key, list[Exchange]] = {key: [] for key in self.entries}
        self.runs = {
            (a.stage, a.microbatch): rank
            for (rank, _), parts in self.entries.items()
            for a in parts
            if a.kind is Kind.FORWARD
        }
        self.find_transfers()
        self.find_sums()
        self.copies: dict[Key, Copy] = {}
        for key, (action, *_) in self.entries.items():
            if action.kind in COPIES:
                size = of_stage(costs.activation_bytes, action.stage)
                usual = 0 if costs.host_bandwidth == math.inf else size // costs.host_bandwidth
                self.copies[key] = Copy(key, durations.get(key, usual))
        self.engines = self.find_engines()
        self.spans: dict[tuple[int, str], list[tuple[Any, Any]]] = {}

    # What there is.

    def find_transfers(self) -> None:
        """The j-th send on a channel meets the j-th receive, under `direction` of its kind."""
        ends: dict[tuple[Key, bool, bool], list[tuple[Key, Action]]] = {}
        for key, parts in self.entries.items():
            for action in parts:
                if action.kind not in COMMUNICATION:
                    continue
                further = 1 if action.kind in (Kind.SEND_ACT, Kind.RECV_GRAD) else -1
                peer = self.runs[action.stage + further, action.microbatch]
                sends = action.kind in SENDS
                channel = (key[0], peer) if sends else (peer, key[0])
                apart = self.channel == "direction" and action.kind in GRADIENTS
                ends.setdefault((channel, apart, sends), []).append((key, action))
        for (channel, apart, sends), listed in ends.items():
            if sends:
                met = zip(listed, ends[channel, apart, False], strict=True)
                self.channels[channel, apart] = [self.transfer(channel, *both) for both in met]

    def transfer(
        self, channel: Key, send: tuple[Key, Action], receive: tuple[Key, Action]
    ) -> Exchange:
        stage = send[1].stage
        boundary = stage if send[1].kind is Kind.SEND_ACT else stage - 1
        costs = self.costs
        latency, bandwidth = of_link(costs.latency, channel), of_link(costs.bandwidth, channel)
        size = of_stage(costs.boundary_bytes, boundary)
        hold = 0 if bandwidth == float("inf") else size // bandwidth
        take = hold + latency
        given = [self.durations[key] for key, _ in (send, receive) if key in self.durations]
        if given:
            take = max(given)
            hold = min(hold, take)
        waits = {send[0], receive[0]}
        if self.ahead and len(self.entries[receive[0]]) == 1:
            waits.discard(receive[0])
        return self.add([send, receive], hold, take, waits)

    def find_sums(self) -> None:
        for stage, held in enumerate(self.schedule.placement):
            listed = [
                [
                    key
                    for key, (a, *_) in self.entries.items()
                    if key[0] == rank and a.kind is Kind.REDUCE_GRAD and a.stage == stage
                ]
                for rank in held
            ]
            self.sums[stage] = []
            for keys in zip(*listed, strict=False):
                given = [self.durations[key] for key in keys if key in self.durations]
                take = max(given) if given else of_stage(self.costs.reduce_grad, stage)
                ends = [(key, self.entries[key][0]) for key in keys]
                self.sums[stage].append(self.add(ends, take, take, set(keys)))

    def add(
        self, ends: list[tuple[Key, Action]], hold: Any, take: Any, waits: set[Key]
    ) -> Exchange:
        made = Exchange(ends, hold, take, waits)
        for key, _ in ends:
            self.of_entry[key].append(made)
        return made

    def find_engines(self) -> list[list[Copy]]:
        """The copies of each engine. Those of several ranks in the order in which these come to
        them where no copy takes any time."""
        engines: dict[Any, list[Copy]] = {}
        shared = self.costs.copy_engine or {}
        for (rank, _), copy in self.copies.items():
            engines.setdefault(shared.get(rank, f"of {rank}"), []).append(copy)
        if shared and self.copies:
            free = {**self.durations, **dict.fromkeys(self.copies, 0)}
            alone = attrs.evolve(self.costs, copy_engine=None)
            receives = "ahead" if self.ahead else "listed"
            bare = Stepped(self.schedule, free, alone, receives, self.channel)
            bare.run()
            for copies in engines.values():
                copies.sort(key=lambda copy: (bare.copies[copy.key].posted, copy.key))
        return [*engines.values()]

    def takes(self, key: Key) -> Any:
        """How long an entry of compute does."""
        if key in self.durations:
            return self.durations[key]
        parts = self.entries[key]
        if len(parts) > 1 and self.costs.overlapped is not None:
            (forward,) = (a for a in parts if a.kind is Kind.FORWARD)
            return of_stage(self.costs.overlapped, forward.stage)
        return sum(cost_of(self.costs, a) for a in parts)

    # What may happen now.

    def over(self, key: Key, now: Any) -> bool:
        if key in self.copies:
            return self.copies[key].over(now)
        if self.channel is not None:
            return all(self.left(each, key[0], now) for each in self.of_entry[key])
        return all(each.arrived(now) for each in self.of_entry[key])

    def left(self, exchange: Exchange, rank: int, now: Any) -> bool:
        """Whether an exchange no longer stands in a queue of one of its ranks."""
        sends = [a.kind in SENDS for (own, _), a in exchange.ends if own == rank]
        return exchange.free(now) if any(sends) else exchange.arrived(now)

    def queues_of(self, key: Key) -> set[Any]:
        """Those that an entry stands in on its rank, under the channel model."""
        found: set[Any] = set()
        for exchange in self.of_entry[key]:
            (action,) = (a for end, a in exchange.ends if end == key)
            peers = [end[0] for end, _ in exchange.ends if end[0] != key[0]]
            if self.channel == "rank":
                found.add("all")
            elif self.channel in ("pair", "edge", "direction"):
                if action.kind not in COMMUNICATION:
                    found.add(("of stage", action.stage))
                elif self.channel == "pair":
                    found.add(peers[0])
                elif self.channel == "direction":
                    found.add(action.kind in GRADIENTS)
                else:
                    found.add((peers[0], action.kind in SENDS))
        return found

    def may_start(self, queue: list[Exchange], turn: int, now: Any) -> bool:
        """Whether a transfer or sum may, the `turn`-th of its channel or stage."""
        this = queue[turn]
        if this.waits or not all(other.free(now) for other in queue[:turn]):
            return False
        return all(self.comes_to(key, now) for key, _ in this.ends)

    def comes_to(self, key: Key, now: Any) -> bool:
        """Whether nothing before it in the queues of an entry, at its own rank, holds that up."""
        if self.channel is not None:
            own = self.queues_of(key)
            before = ((key[0], index) for index in range(key[1]))
            return all(self.over(each, now) for each in before if own & self.queues_of(each))
        for part in self.of_entry[key]:
            queue = self.queue_of(part)
            for other in queue[: queue.index(part)]:
                (there,) = (k for k, _ in other.ends if k[0] == key[0])
                if there == key:
                    continue
                batch = len(self.entries[there]) > 1
                if not (self.over(there, now) if batch else other.free(now)):
                    return False
        return True

    def queue_of(self, part: Exchange) -> list[Exchange]:
        queues = [*self.channels.values(), *self.sums.values()]
        return next(queue for queue in queues if part in queue)

    def ready(self, key: Key, now: Any) -> bool:
        """Whether the input of an entry of compute is there."""
        for action in self.entries[key]:
            for index in range(key[1]):
                there = key[0], index
                for a in self.entries[there]:
                    fed = a.kind is CONSUMES.get(action.kind) and a.microbatch == action.microbatch
                    summed = (a.kind, action.kind) == (Kind.REDUCE_GRAD, Kind.OPTIM_STEP)
                    back = a.kind is Kind.RELOAD and action.kind in USES_SAVED
                    back = back and a.microbatch == action.microbatch
                    if (
                        (fed or summed or back)
                        and a.stage == action.stage
                        and not self.over(there, now)
                    ):
                        return False
        return True

    # What happens.

    def run(self) -> dict[tuple[int, str], list[tuple[Any, Any]]] | None:
        """The times of everything, by rank and action in list order; None where it never ends."""
        now: Any = 0
        at = [0] * self.schedule.ranks
        until: list[Any] = [0] * self.schedule.ranks
        began: dict[Key, Any] = {}
        while True:
            moved = True
            while moved:
                moved = False
                for rank in range(self.schedule.ranks):
                    key = rank, at[rank]
                    if now < until[rank] or key not in self.entries:
                        continue
                    if key in self.copies:
                        self.copies[key].posted = now
                    elif self.entries[key][0].kind not in COMPUTE:
                        for exchange in self.of_entry[key]:
                            exchange.waits.discard(key)
                    elif self.ready(key, now):
                        began[key] = now
                        until[rank] = now + self.takes(key)
                    else:
                        continue
                    if self.channel == "host" and not (key in began or self.over(key, now)):
                        continue
                    at[rank] += 1
                    moved = True
                for queue in (*self.channels.values(), *self.sums.values()):
                    for turn, exchange in enumerate(queue):
                        if exchange.start is None and self.may_start(queue, turn, now):
                            exchange.start = now
                            moved = True
                for copies in self.engines:
                    for turn, copy in enumerate(copies):
                        free = all(other.over(now) for other in copies[:turn])
                        if copy.start is None and copy.posted is not None and free:
                            copy.start = now
                            moved = True
            ends = [*until]
            ends += (
                copy.start + copy.take for copy in self.copies.values() if copy.start is not None
            )
            for queue in (*self.channels.values(), *self.sums.values()):
                for each in queue:
                    if each.start is not None:
                        ends += each.start + each.hold, each.start + each.take
            later = [end for end in ends if end > now]
            if not later:
                break
            now = min(later)
        return (
            self.times(began)
            if len(began) == sum(parts[0].kind in COMPUTE for parts in self.entries.values())
            else None
        )

    def times(self, began: dict[Key, Any]) -> dict[tuple[int, str], list[tuple[Any, Any]]]:
        spans: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        for key, parts in self.entries.items():
            for action in parts:
                if key in self.copies:
                    start = self.copies[key].start
                    span = start, start + self.copies[key].take
                elif action.kind in COMPUTE:
                    span = began[key], began[key] + self.takes(key)
                else:
                    (own,) = (e for e in self.of_entry[key] if (key, action) in e.ends)
                    span = own.start, own.start + own.take
                spans.setdefault((key[0], str(action)), []).append(span)
        return spans
