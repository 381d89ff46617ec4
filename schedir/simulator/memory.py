"""What a rank keeps, action by action: live activations, and live bytes.

What is alive is what the table of values says; this says how large each value is, and when the
executor takes and frees it. Everything that a rank takes and frees, it does at an action of its own
list, so the most that it holds follows from the list alone; times only say when. But for copies to
the host and back: these go on beside the list. The bytes are those that the executor holds on a
CPU:

    weights, optimiser state    always, with a copy of the weights for every version that outlives
                                its OPTIM_STEP (the copies' storage is kept from call to call)
    gradients of a stage        from the end of the first backward that completes any, which makes
                                them as it frees the activation, to the OPTIM_STEP that applies
                                them; always where the schedule has none. Those that its
                                BACKWARD_INPUT computes as well, from the end of the first of these
                                on. A sum over replicas takes as much again while it goes on
    sharded weights             a rank's part always; all of them from the end of an UNSHARD to its
                                RESHARD, and all of their gradients until REDUCE_GRAD
    activation                  from its FORWARD to its BACKWARD or BACKWARD_WEIGHT, its input with
                                it. Where it has a RECOMPUTE, its input alone until that begins. At
                                the end of its BACKWARD_INPUT all goes but what is deferred with the
                                BACKWARD_WEIGHT. On the host from the end of its OFFLOAD to that of
                                its RELOAD, which takes it again as it begins
    what is received            from where the receive is listed to its use: an input becomes part
                                of the activation, a gradient goes when the backward ends
    what is sent                from where it is made until something comes back that the receiver
                                has sent after using it: then it has arrived
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from schedir.graph.alive import StageVersions, later_versions
from schedir.graph.compile import Graph
from schedir.ir import (
    BACKWARDS,
    COMPLETES_GRADIENTS,
    COMPUTE,
    COPIES,
    SENDS,
    VALUES,
    Ints,
)
from schedir.simulator.moments import Moments
from schedir.simulator.values import Numbers, Sizes, numbers

_TRAVEL = {
    name
    for other, value in VALUES.items()
    for name in (other, *(value.link or ())[:1])
    if value.link
}
"""Values that go from stage to stage."""
Amounts: TypeAlias = NDArray[np.float64]

# When an entry of the list takes and frees, in this order: what changes at one of these does so at
# once. What it makes for another stage is there before it frees anything.
_FREED_FIRST, _TAKEN, _HANDED_ON, _ENDED, _ADDED, _FREED = range(6)
_Change: TypeAlias = tuple[Ints, int, Amounts]
"""At these places, at that point of their entries, so much more is held."""


Curve: TypeAlias = tuple[Numbers, Amounts]
"""How much a rank holds: `amounts[n]` from `times[n]` on. The times ascend from 0, and are equal if
several changes happen at once."""


def live_activations(moments: Moments) -> list[Curve]:
    """How many (stage, microbatch) activations each rank holds."""
    one = np.ones(moments.schedule.stages)
    sizes = {"saved": one, "deferred": one}
    return _curves(moments, np.zeros(moments.schedule.ranks), _changes(moments.graph, sizes))


def live_bytes(moments: Moments, sizes: Sizes | None, *, host: bool = False) -> list[Curve]:
    """How many bytes each rank holds, or has on its `host`. Raises ValueError without sizes."""
    if sizes is None:
        raise ValueError("the timeline has no sizes, so its bytes are not known")
    graph, stages = moments.graph, moments.schedule.stages
    values = {
        name: np.array(sizes.of(value.size, stages), np.float64)
        for name, value in VALUES.items()
        if value.size and value.host == host
    }
    base = np.zeros(moments.schedule.ranks)
    lasting = [] if host else _of_stages(graph, sizes, base)
    return _curves(moments, base, _changes(graph, values) + lasting)


def _curves(moments: Moments, base: Amounts, changes: Iterable[_Change]) -> list[Curve]:
    """What each rank holds, from `base[rank]` before its list begins on: the changes in the order
    of the lists, those at one point of an entry as one; what a copy changes, in the order of
    time."""
    columns = moments.columns
    nothing: _Change = np.zeros(0, np.int64), 0, np.zeros(0)
    each = zip(*(np.broadcast_arrays(*change) for change in (nothing, *changes)), strict=True)
    place, point, amount = map(np.concatenate, each)
    # All actions of an entry start together, and end together.
    place = np.where(point < _HANDED_ON, columns.heads[columns.entry[place]], columns.last[place])
    key = (_FREED + 1) * place + point
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    change: Amounts = np.add.reduceat(amount[order], first)
    place, point = np.divmod(key[order][first], _FREED + 1)
    times = np.where(point < _HANDED_ON, moments.begins[place], moments.ends[place])
    before = moments.ends[moments.compute_before[place]]
    listed = np.where(columns.is_kind(*COMPUTE)[place], times, before)
    beside = columns.is_kind(*COPIES)[place] & ~np.isnan(times)
    found = []
    for rank, (begin, end) in enumerate(pairwise(np.searchsorted(place, columns.starts).tolist())):
        # What is not known is as early as it can be.
        when = np.fmax.accumulate(np.append(0.0, listed[begin:end]))
        np.copyto(when[1:], times[begin:end], where=beside[begin:end])
        order = np.argsort(when, kind="stable")
        held = np.cumsum(np.append(base[rank], change[begin:end])[order])
        found.append((numbers(when[order]), numbers(held)))
    return found


def _changes(graph: Graph, sizes: Mapping[str, Amounts]) -> list[_Change]:
    """What making and ending values of some names changes, of so many bytes by stage."""
    stage, touches = graph.columns.stage, [*graph.touches(*sizes)]
    arrived = stage if _TRAVEL.isdisjoint(sizes) else _arrived(graph)
    done = {does: np.zeros(graph.base[""], np.bool_) for does in ("make", "read", "end")}
    for touch in touches:
        done[touch.use.does][touch.values] = True
    whole = done["make"] & done["end"]
    found = []
    for touch in touches:
        name, make, places = touch.use.value, touch.use.does == "make", touch.places
        if touch.use.does == "read":
            continue
        size, at_end = sizes[name][stage[places]], touch.use.at == "end"
        point = _ENDED if at_end else _TAKEN if make else _FREED_FIRST
        if name in _TRAVEL:
            if touch.kind in COMPUTE:
                point = _HANDED_ON if make else _FREED if at_end else _FREED_FIRST
            elif touch.kind in SENDS:
                places, point = arrived[places], _FREED_FIRST
            # Nobody's is what crosses ranks in a list without communication.
            known = whole[touch.values] & (places >= 0) & (size != 0)
            places, size = places[known], size[known]
        found.append((places, point, size if make else -size))
    return found


def _of_stages(graph: Graph, sizes: Sizes, base: Amounts) -> list[_Change]:
    """What whole stages keep. `base` is increased by what stays from call to call: weights, their
    copies and optimiser state, and gradients that no OPTIM_STEP applies.

    The other gradients are accumulated until an OPTIM_STEP applies them, in each round from one to
    the next; the early ones come with the first part of a backward. What is summed over replicas
    has a second copy until that step. A rank has one part in so many `ways` of what is sharded,
    and of its gradients after their sum.
    """
    schedule, columns, holding = graph.schedule, graph.columns, graph.holding
    stage, steps, rounds = columns.stage, graph.steps, graph.first_round[holding] + graph.turn
    weight, gradient = (
        np.full(schedule.stages, size, np.float64) for size in (sizes.weight, sizes.gradient)
    )
    early = np.minimum(sizes.early_gradient, gradient)
    ways = np.where(graph.sharded, sizes.shard_ways, 1)
    stages, ranks = np.array(schedule.holdings).T
    np.add.at(base, ranks, ((weight + sizes.optimizer) / ways)[stages])
    for rank, held in later_versions(graph).items():
        for own, versions in held.items():
            base[rank] += _copies(versions) * weight[own]
    changes: list[_Change] = []
    for kinds, part in ((COMPLETES_GRADIENTS, gradient - early), (BACKWARDS, early)):
        if not part.any():
            continue
        makers = columns.where(*kinds)
        each, first = np.unique(rounds[makers], return_index=True)
        taken, freed = makers[first], steps[np.isin(rounds[steps], each)]
        stays = graph.steps_of[holding[taken]] == 0
        lasting, taken = taken[stays], taken[~stays]
        np.add.at(base, columns.rank[lasting], (part / ways)[stage[lasting]])
        changes += (
            (taken, _ADDED, part[stage[taken]]),
            (freed, _FREED, -(part / ways)[stage[freed]]),
        )
    summing, sums = np.array([*graph.sums.items()], np.int64).reshape(-1, 2).T
    several = np.array([len(held) > 1 for held in schedule.placement])[stage[sums]]
    shard = ways[stage[sums]] > 1
    shards, again = sums[shard], several & ~shard
    return [
        *changes,
        (shards, _FREED, (gradient / ways - gradient)[stage[shards]]),
        (sums[again], _TAKEN, gradient[stage[sums[again]]]),
        (summing[again], _FREED_FIRST, -gradient[stage[sums[again]]]),
    ]


def _copies(versions: StageVersions) -> int:
    """The most copies of older weights at once. There is a copy of each version that outlives its
    OPTIM_STEP, from when it is made to its last read."""
    kept = [*filter(versions.outlives_its_step, range(len(versions.steps)))]
    made, gone = [-1, *versions.steps], sorted(versions.last_read[version] for version in kept)
    return max((n - bisect(gone, made[v]) for n, v in enumerate(kept, 1)), default=0)


def _arrived(graph: Graph) -> Ints:
    """By the place of a send, the compute at whose start its rank knows that it has arrived: it
    uses what its peer has sent after using the transfer. -1 where the rank never knows.

        rank 0   SEND_ACT0 ──▶ … RECV_GRAD0  B0       known by B0: rank 1 has sent the gradient
        rank 1   RECV_ACT0  F0  B0  SEND_GRAD0        after its F0
    """
    transfers, ranks, places = graph.transfers, graph.columns.ranks, len(graph.columns)
    listed = transfers.matched & (transfers.maker >= 0) & (transfers.user >= 0)
    source, target = transfers.source[listed], transfers.target[listed]
    send, user = transfers.send[listed], transfers.user[listed]
    channel, back = source * ranks + target, target * ranks + source
    sent = channel * places + send
    order = np.argsort(sent)
    # Of each answer and all after it on its channel, the one that is used first.
    soonest = np.minimum.accumulate((channel * places + user)[order][::-1])[::-1]
    answer = np.append(soonest, -1)[np.searchsorted(sent[order], back * places + user)]
    found = np.full(places, -1)
    found[send] = np.where(answer // places == back, answer % places, -1)
    return found
