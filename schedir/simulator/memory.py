"""What a rank keeps, action by action: live activations, and live bytes.

Everything that a rank takes and frees, it does at an action of its own list, so the most that it
holds follows from the list alone; times only say when. The bytes are those that the executor holds
on a CPU:

    weights, optimiser state    always, with a copy of the weights for every version that outlives
                                its OPTIM_STEP (the copies' storage is kept from call to call)
    gradients of a stage        from the end of the first backward that completes any, which makes
                                them as it frees the activation, to the OPTIM_STEP that applies
                                them; always where the schedule has none. A sum over replicas takes
                                as much again while it goes on
    activation                  from its FORWARD to its BACKWARD or BACKWARD_WEIGHT, its input with
                                it. Where it has a RECOMPUTE, its input alone until that begins. At
                                the end of its BACKWARD_INPUT all goes but what is deferred with the
                                BACKWARD_WEIGHT
    what is received            from where the receive is listed to its use: an input becomes part
                                of the activation, a gradient goes when the backward ends
    what is sent                from where it is made until something comes back that the receiver
                                has sent after using it: then it has arrived
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.graph.compile import Transfers
from schedir.ir import (
    COMPLETES_GRADIENTS,
    COMPUTE,
    READS_WEIGHTS,
    Columns,
    Ints,
    Kind,
    Schedule,
    StageVersions,
    makes_activation,
    run_again,
    weight_versions,
)
from schedir.simulator.moments import Moments
from schedir.simulator.times import Numbers
from schedir.simulator.values import PerStage, Sizes

Amounts: TypeAlias = NDArray[np.float64]

# When an entry of the list takes and frees, in this order.
_FREED_FIRST, _TAKEN_FIRST, _TAKEN_LAST, _FREED_LAST = range(4)
_Change: TypeAlias = tuple[Ints, int, Amounts]
"""At these places, at that point of their entries, so much more is held."""


@attrs.frozen(eq=False)
class Held:
    """How much each rank holds: `base[rank]` before its list begins, and then `change` at every
    `place`, in list order: `after` where that is when its entry ends. Shape [changes], rank after
    rank from `bounds[rank]` on."""

    base: Amounts
    bounds: Ints
    place: Ints
    after: NDArray[np.bool_]
    change: Amounts

    def of_rank(self, rank: int) -> Amounts:
        """How much the rank holds, at first and after each change."""
        own = slice(self.bounds[rank], self.bounds[rank + 1])
        held: Amounts = np.cumsum(np.append(self.base[rank], self.change[own]))
        return held

    def peaks(self) -> list[float]:
        """The most that each rank holds."""
        return [float(self.of_rank(rank).max()) for rank in range(len(self.base))]

    def curve(self, rank: int, moments: Moments) -> tuple[Numbers, Amounts]:
        """When the rank holds how much: it holds `amounts[n]` from `times[n]` on."""
        own = slice(self.bounds[rank], self.bounds[rank + 1])
        place = self.place[own]
        posts = ~moments.columns.is_kind(*COMPUTE)[place]
        before = moments.compute_before[place]
        times = np.where(self.after[own], moments.ends[place], moments.begins[place]).astype(float)
        times[posts] = np.where(before[posts] < 0, 0, moments.ends[before[posts]])
        # What is not known is as early as it can be.
        return np.fmax.accumulate(np.append(0.0, times)), self.of_rank(rank)


def live_activations(columns: Columns) -> Held:
    """How many (stage, microbatch) activations each rank holds."""
    one = np.ones(1 + int(columns.stage.max(initial=0)))
    return _held(columns, np.zeros(columns.ranks), _activations(columns, one, one))


def live_bytes(schedule: Schedule, sizes: Sizes, moments: Moments) -> Held:
    """How many bytes each rank holds. Raises ValueError where the sizes are those of another number
    of stages."""
    columns, transfers, stages = schedule.columns, moments.graph.transfers, schedule.stages
    gradient = _by_stage("gradient", sizes.gradient, stages)
    boundary = _by_stage("boundary", sizes.boundary, stages - 1)
    activation = deferred = _by_stage("activation", sizes.activation, stages)
    if sizes.deferred is not None:
        deferred = _by_stage("deferred", sizes.deferred, stages)
    base = _base(schedule, sizes)
    changes = [
        *_activations(columns, activation, deferred),
        *_inputs(columns, _by_stage("input", sizes.input, stages)),
        *_gradients(schedule, gradient, base),
        *_sums(schedule, gradient, moments),
    ]
    if boundary.any():
        crossing = _boundaries(transfers.stage, transfers.is_gradient, boundary)
        changes += [*_received(transfers, crossing), *_sent(transfers, crossing)]
        changes += _handed_over(schedule, boundary)
    return _held(columns, base, changes)


def _by_stage(name: str, value: PerStage, many: int) -> Amounts:
    if isinstance(value, tuple) and len(value) != many:
        raise ValueError(f"sizes: {name} must be one number or {many}, not {len(value)}")
    return np.full(many, value, np.float64)


def _held(columns: Columns, base: Amounts, changes: Iterable[_Change]) -> Held:
    places, points, amounts = zip(*changes, strict=True)
    place: Ints = np.concatenate(places)
    point = np.repeat(points, [len(each) for each in places])
    after = point >= _TAKEN_LAST
    # All actions of an entry start together, and end together.
    place = np.where(after, columns.last[place], columns.heads[columns.entry[place]])
    order = np.argsort(4 * place + point, kind="stable")
    bounds = np.searchsorted(place[order], columns.starts)
    return Held(base, bounds, place[order], after[order], np.concatenate(amounts)[order])


def _activations(columns: Columns, size: Amounts, deferred: Amounts) -> list[_Change]:
    """All of an activation, of which `deferred` is left between I and W."""
    made = np.flatnonzero(makes_activation(columns))
    changes = [(made, _TAKEN_FIRST, size[columns.stage[made]])]
    for kind, freed in (
        (Kind.BACKWARD, size),
        (Kind.BACKWARD_INPUT, size - deferred),
        (Kind.BACKWARD_WEIGHT, deferred),
    ):
        places = columns.where(kind)
        changes.append((places, _FREED_LAST, -freed[columns.stage[places]]))
    return changes


def _inputs(columns: Columns, size: Amounts) -> list[_Change]:
    """What a forward that runs again keeps until then."""
    forwards, again = np.flatnonzero(run_again(columns)), columns.where(Kind.RECOMPUTE)
    return [
        (forwards, _TAKEN_FIRST, size[columns.stage[forwards]]),
        (again, _FREED_FIRST, -size[columns.stage[again]]),
    ]


def _base(schedule: Schedule, sizes: Sizes) -> Amounts:
    """The bytes of weights, their copies and optimiser state."""
    weight = _by_stage("weight", sizes.weight, schedule.stages)
    optimizer = _by_stage("optimizer", sizes.optimizer, schedule.stages)
    stages, ranks = (np.array(side, np.int64) for side in zip(*schedule.holdings, strict=True))
    base = np.zeros(schedule.ranks)
    np.add.at(base, ranks, (weight + optimizer)[stages])
    columns = schedule.columns
    # Where nothing of a rank's stages comes after their steps, there are no copies.
    reading = columns.is_kind(*READS_WEIGHTS) & (schedule.dataflow.steps_before > 0)
    for rank in np.unique(columns.rank[reading]).tolist():
        for stage, versions in weight_versions(columns, rank).items():
            base[rank] += _copies(versions) * weight[stage]
    return base


def _copies(versions: StageVersions) -> int:
    """The most copies of older weights at once: one of each version that outlives its OPTIM_STEP,
    from when it is made to its last read."""
    changes = []
    for version in filter(versions.outlives_its_step, range(len(versions.steps))):
        made = versions.steps[version - 1] if version else -1
        changes += [(made, 1), (versions.last_read[version], -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _gradients(schedule: Schedule, size: Amounts, base: Amounts) -> list[_Change]:
    """Those that backwards accumulate. Where no OPTIM_STEP applies them they are added to `base`:
    they are there from call to call."""
    columns = schedule.columns
    place = columns.where(*COMPLETES_GRADIENTS, Kind.OPTIM_STEP)
    place = place[np.lexsort((columns.stage[place], columns.rank[place]))]  # stable: by place
    stage, rank = columns.stage[place], columns.rank[place]
    step = columns.is_kind(Kind.OPTIM_STEP)[place]
    first = np.ones(len(place), np.bool_)
    first[1:] = (stage[1:] != stage[:-1]) | (rank[1:] != rank[:-1])
    group = np.cumsum(first) - 1
    stepped = np.zeros(int(first.sum()), np.bool_)
    stepped[group[step]] = True
    np.add.at(base, rank[first & ~stepped[group]], size[stage[first & ~stepped[group]]])
    fresh = first.copy()
    fresh[1:] |= step[:-1]
    taken = fresh & ~step & stepped[group]
    freed = step & ~fresh
    # A backward makes them as it frees the activation, which is listed before.
    return [
        (place[taken], _FREED_LAST, size[stage[taken]]),
        (place[freed], _FREED_LAST, -size[stage[freed]]),
    ]


def _sums(schedule: Schedule, size: Amounts, moments: Moments) -> list[_Change]:
    """What is summed over replicas: a second copy until the step that needs the sum."""
    columns = schedule.columns
    several = np.array([len(held) > 1 for held in schedule.placement], np.bool_)
    pairs = [(r, s) for s, r in moments.graph.sums.items() if several[columns.stage[r]]]
    reduces, steps = np.array(pairs, np.int64).reshape(-1, 2).T
    return [
        (reduces, _TAKEN_FIRST, size[columns.stage[reduces]]),
        (steps, _FREED_FIRST, -size[columns.stage[steps]]),
    ]


def _boundaries(stage: Ints, is_gradient: NDArray[np.bool_], boundary: Amounts) -> Amounts:
    """The bytes of what goes to each stage: activations come from before it, gradients from after
    it."""
    return boundary[np.where(is_gradient, stage, stage - 1)]


def _received(transfers: Transfers, size: Amounts) -> list[_Change]:
    is_gradient, listed = transfers.is_gradient, (transfers.receive >= 0) & (transfers.user >= 0)
    changes: list[_Change] = [(transfers.receive[listed], _TAKEN_FIRST, size[listed])]
    for which, freed in (
        (listed & ~is_gradient, _FREED_FIRST),
        (listed & is_gradient, _FREED_LAST),
    ):
        changes.append((transfers.user[which], freed, -size[which]))
    return changes


def _sent(transfers: Transfers, size: Amounts) -> list[_Change]:
    listed = np.flatnonzero(transfers.matched & (transfers.maker >= 0) & (transfers.user >= 0))
    known = _known_by(transfers, listed)
    over = known >= 0
    return [
        (transfers.maker[listed], _TAKEN_LAST, size[listed]),
        (known[over], _FREED_FIRST, -size[listed][over]),
    ]


def _known_by(transfers: Transfers, listed: Ints) -> Ints:
    """For each of these transfers, the compute at whose start its source knows that it has arrived,
    -1 where the source never does: it uses what its peer has sent after using the transfer.

        rank 0   SEND_ACT0 ──▶ … RECV_GRAD0  B0       known by B0: rank 1 has sent the gradient
        rank 1   RECV_ACT0  F0  B0  SEND_GRAD0        after its F0
    """
    ranks = 1 + int(max(transfers.source.max(initial=0), transfers.target.max(initial=0)))
    source, target = transfers.source[listed], transfers.target[listed]
    send, user = transfers.send[listed], transfers.user[listed]
    channel = source * ranks + target
    order = np.lexsort((send, channel))
    beyond = 1 + int(max(send.max(initial=0), user.max(initial=0)))
    # Of each answer and all after it on its channel, the one that is used first.
    soonest = np.minimum.accumulate((channel * beyond + user)[order][::-1])[::-1]
    back = target * ranks + source
    answer = np.searchsorted((channel * beyond + send)[order], back * beyond + user)
    padded = np.append(soonest, -1)
    there = (answer < len(order)) & (padded[answer] // beyond == back)
    return np.where(there, padded[answer] % beyond, -1)


def _handed_over(schedule: Schedule, boundary: Amounts) -> list[_Change]:
    """What goes from stage to stage on one rank: an output until the next stage's forward, a
    gradient until the backward that uses it has ended."""
    dataflow = schedule.dataflow
    runs, forward, backward = dataflow.runs, dataflow.of(Kind.FORWARD), dataflow.gradients
    before, microbatch = np.nonzero((runs[1:] == runs[:-1]) & (runs[1:] >= 0))
    size = boundary[before]
    there = (backward[before, microbatch] >= 0) & (backward[before + 1, microbatch] >= 0)
    gradients = before[there], microbatch[there], size[there]
    return [
        (forward[before, microbatch], _TAKEN_LAST, size),
        (forward[before + 1, microbatch], _FREED_FIRST, -size),
        (backward[gradients[0] + 1, gradients[1]], _TAKEN_LAST, gradients[2]),
        (backward[gradients[:2]], _FREED_LAST, -gradients[2]),
    ]
