"""The timeline of a schedule under given costs, on the `edge` channel model.

A rank runs its compute in list order, each action as soon as the one before it is done and its
receive has arrived. A send or receive is posted when the compute listed before it is done; a
transfer starts when both its ends are posted and its channel has finished the transfer before it.

    rank 0   0F0 0SEND_ACT0 0F1 ...         posted at 1 ─┐
    rank 1   1RECV_ACT0 1F0 ...             posted at 0 ─┴─ starts at 1, 1F0 when it is done
"""

from __future__ import annotations

from collections import deque

import attrs

from schedir.check import check
from schedir.errors import ScheduleError
from schedir.ir import (
    COMPUTE,
    Action,
    Dataflow,
    Kind,
    Schedule,
    channel_of,
    trace,
    transfer_of,
    weight_versions,
)
from schedir.passes import insert_communication
from schedir.simulate.costs import CostModel
from schedir.simulate.memory import peak_activations


@attrs.frozen
class Span:
    """One entry of a rank's list and the time that it took; `index` is its place in the list.

    The span of a send or receive is that of its transfer.
    """

    index: int
    action: Action
    start: float
    end: float


@attrs.frozen
class RankStats:
    """One rank's share of a timeline, in the cost model's unit of time.

    `busy` is the time in compute, `idle` the rest of the makespan, `span` the time from its first
    FORWARD to the end of its last compute. `peak_activations` counts (stage, microbatch) pairs;
    `weight_versions` the most versions alive at once in any of its stages, the newest included.
    """

    rank: int
    busy: float
    idle: float
    span: float
    peak_activations: int
    weight_versions: int


@attrs.frozen
class Timeline:
    """When every action of a schedule runs: `spans[rank]` in list order, and what follows."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...] = attrs.field(repr=False)
    makespan: float
    bubble_fraction: float
    ranks: tuple[RankStats, ...]


def simulate(schedule: Schedule, costs: CostModel | None = None) -> Timeline:
    """Run the schedule under a cost model (by default the textbook's, `CostModel()`).

    A compute-only schedule gets its communication first. Raises ScheduleError, with what
    `schedir.check` finds, where the schedule blocks.
    """
    try:
        schedule = insert_communication(schedule)
        spans = _Run(schedule, costs or CostModel()).spans()
    except ScheduleError:
        check(schedule).raise_if_errors()
        raise
    makespan = max((span.end for rank_spans in spans for span in rank_spans), default=0)
    ranks = tuple(
        _rank_stats(schedule, rank, rank_spans, makespan) for rank, rank_spans in enumerate(spans)
    )
    busy = sum(rank.busy for rank in ranks)
    bubble = 1 - busy / (schedule.ranks * makespan) if makespan else 0.0
    return Timeline(schedule, spans, makespan, bubble, ranks)


def _rank_stats(
    schedule: Schedule, rank: int, spans: tuple[Span, ...], makespan: float
) -> RankStats:
    compute = [span for span in spans if span.action.kind in COMPUTE]
    busy = sum(span.end - span.start for span in compute)
    first = next((span.start for span in compute if span.action.kind is Kind.FORWARD), 0)
    last = compute[-1].end if compute else first
    versions = weight_versions(schedule.actions[rank])
    return RankStats(
        rank=rank,
        busy=busy,
        idle=makespan - busy,
        span=last - first,
        peak_activations=peak_activations(schedule.actions[rank]),
        weight_versions=max((stage.peak() for stage in versions.values()), default=1),
    )


class _Run:
    """The state of one simulation. `clock[rank]` is when its last compute so far ends."""

    def __init__(self, schedule: Schedule, costs: CostModel) -> None:
        self.schedule = schedule
        self.costs = costs.by_kind()
        self.dataflow: Dataflow = trace(schedule)
        self.clock: list[float] = [0] * schedule.ranks
        self.times: list[list[tuple[float, float] | None]] = [
            [None] * len(actions) for actions in schedule.actions
        ]
        # A transfer is keyed by its receive, a collective by its stage and turn.
        self.posted: dict[Action | tuple[int, int], list[tuple[int, int, float]]] = {}
        self.arrived: dict[Action | tuple[int, int], float] = {}
        self.waiting: dict[Action | tuple[int, int], list[int]] = {}
        self.channel_free: dict[tuple[int, int], float] = {}
        self.ready = deque(range(schedule.ranks))

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        reached = [0] * self.schedule.ranks
        turns: list[dict[int, int]] = [{} for _ in reached]
        while self.ready:
            rank = self.ready.popleft()
            reached[rank] = self._advance(rank, reached[rank], turns[rank])
        result = []
        for rank, (actions, times) in enumerate(
            zip(self.schedule.actions, self.times, strict=True)
        ):
            spans = []
            for index, (action, time) in enumerate(zip(actions, times, strict=True)):
                if time is None:
                    raise ScheduleError(
                        f"the schedule blocks: rank {rank} #{index} {action} never runs; "
                        "`schedir check` says why",
                        (),
                    )
                spans.append(Span(index, action, *time))
            result.append(tuple(spans))
        return tuple(result)

    def _advance(self, rank: int, index: int, turns: dict[int, int]) -> int:
        """Run `rank` from `index` until it waits; `turns` counts its REDUCE_GRADs by stage."""
        actions = self.schedule.actions[rank]
        while index < len(actions):
            action = actions[index]
            kind = action.kind
            if kind in COMPUTE:
                # An OPTIM_STEP waits for the stage's last REDUCE_GRAD, other compute for its
                # receive.
                need = self.dataflow.needs(action, rank) or (
                    (action.stage, turns[action.stage])
                    if kind is Kind.OPTIM_STEP and action.stage in turns
                    else None
                )
                start = self.clock[rank]
                if need is not None:
                    if need not in self.arrived:
                        self.waiting.setdefault(need, []).append(rank)
                        return index
                    start = max(start, self.arrived[need])
                end = start + self.costs[kind]
                self.clock[rank] = end
                self.times[rank][index] = (start, end)
            elif kind is Kind.REDUCE_GRAD:
                turns[action.stage] = turns.get(action.stage, 0) + 1
                self._post((action.stage, turns[action.stage]), rank, index, action)
            else:
                self._post(transfer_of(action), rank, index, action)
            index += 1
        return index

    def _post(self, key: Action | tuple[int, int], rank: int, index: int, action: Action) -> None:
        """Post one end of a transfer or collective; the last end makes it happen."""
        ends = self.posted.setdefault(key, [])
        ends.append((rank, index, self.clock[rank]))
        start = max(time for _, _, time in ends)
        if action.kind is Kind.REDUCE_GRAD:
            if len(ends) < len(self.schedule.placement[action.stage]):
                return
            end = start + self.costs[action.kind]
        else:
            if len(ends) < 2:
                return
            peer = self.dataflow.peer(action)
            channel = channel_of(action, rank, -1 if peer is None else peer)
            start = max(start, self.channel_free.get(channel, 0))
            end = start + self.costs[action.kind]
            self.channel_free[channel] = end
        self.arrived[key] = end
        for end_rank, end_index, _ in self.posted.pop(key):
            self.times[end_rank][end_index] = (start, end)
        self.ready.extend(self.waiting.pop(key, ()))
