"""Improves an order, trial by trial: late acceptance (Burke and Bykov 2017). A trial counts if it
is no worse than the search was a number of trials ago.

The value of an order is a chain of steps, each of which starts when the one before it is done. No
order with the same chain can be quicker, so each trial changes a rank's list around a step of the
chain: it moves that step ahead, or the step before it back, makes a backward whole, splits it, or
starts or stops running a forward again.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from schedir.finder.orders import Run, fits, score, timed
from schedir.finder.terms import BACKWARD, FORWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task
from schedir.graph.board import Order

_MEMORIES = (60, 300)  # trials: short ones climb, long ones cross plateaus
_FAR = 0.25  # moves are by 1 + a geometric number of places
_CHANGED_KIND = 0.2
_ANYWHERE = 0.2  # how often a change is made off the chain
_MORE = 1.2  # changes at once are 1 + an exponential of this rate


def improved(
    task: Task, order: Order, run: Run, random: Random
) -> Iterator[tuple[Order, Run] | None]:
    """One trial after the other: the result of each, None if it is nothing."""
    at = score(task, run)
    past = [at] * random.choice(_MEMORIES)
    chain = critical(task, order, run)
    trial = 0
    while True:
        trial += 1
        changed = [*order]
        for _ in range(1 + int(random.expovariate(_MORE))):
            rank, place = chain[random.randrange(len(chain))]
            if random.random() < _ANYWHERE:
                rank = random.randrange(task.ranks)
                place = random.randrange(len(order[rank]))
            steps = _changed_list(task, changed[rank], min(place, len(changed[rank]) - 1), random)
            if steps is not None:
                changed[rank] = steps
        fitting = all(
            now is before or fits(task, rank, now)
            for rank, (now, before) in enumerate(zip(changed, order, strict=True))
        )
        if not fitting or changed == order:
            yield None
            continue
        new = timed(task, changed)
        if new is None:
            yield None
            continue
        now = score(task, new)
        if now <= at or now <= past[trial % len(past)]:
            order, run, at = changed, new, now
            chain = critical(task, order, run)
        past[trial % len(past)] = at
        yield changed, new


def critical(task: Task, order: Order, run: Run) -> list[tuple[int, int]]:
    """The chain of steps (rank, place) that adds up to the value, the last step first."""
    needs, feeds, lasts = task.steps.needs, task.steps.feeds, task.steps.lasts
    makers: list[list[tuple[int, int]]] = [[] for _ in task.steps.channel]
    for rank, steps in enumerate(order):
        for place, step in enumerate(steps):
            if feeds[step] >= 0:
                makers[feeds[step]].append((rank, place))
    turns: list[list[int]] = []
    used = [0] * len(makers)
    for steps in order:
        own = []
        for step in steps:
            queue = needs[step]
            own.append(used[queue] if queue >= 0 else -1)
            if queue >= 0:
                used[queue] += 1
        turns.append(own)
    lasting = run.ends
    if task.objective == "span":
        lasting = [end - own[0] for own, end in zip(run.starts, run.ends, strict=True)]
    rank = max(range(task.ranks), key=lasting.__getitem__)
    place = len(order[rank]) - 1
    chain = []
    while place >= 0:
        chain.append((rank, place))
        start = run.starts[rank][place]
        if start <= 0:
            break
        before = place - 1
        if before >= 0 and run.starts[rank][before] + lasts[order[rank][before]] >= start:
            place = before
        else:
            queue = needs[order[rank][place]]
            if queue < 0:
                break
            rank, place = makers[queue][turns[rank][place]]
    return chain


def _changed_list(task: Task, steps: list[int], place: int, random: Random) -> list[int] | None:
    """A rank's list with a change around a place; None if there is nothing to change."""
    if random.random() < _CHANGED_KIND:
        return _of_other_kind(task, steps, place, random)
    far = 1
    while random.random() > _FAR and far < place:
        far += 1
    to = place - far
    if to < 0:
        return None
    found = [*steps]
    if random.random() < 0.5:
        found.insert(to, found.pop(place))
    else:
        found.insert(place, found.pop(to))
    return found


def _of_other_kind(task: Task, steps: list[int], place: int, random: Random) -> list[int] | None:
    stages = task.stages
    kind, stage = divmod(steps[place], stages)
    found = [*steps]
    if kind == BACKWARD:
        if not task.split:
            return None
        found[place] = INPUT * stages + stage
        found.insert(place + 1 + int(random.expovariate(0.5)), WEIGHT * stages + stage)
    elif kind in (INPUT, WEIGHT):
        other = (INPUT + WEIGHT - kind) * stages + stage
        if kind == INPUT:
            if other not in found[place:]:
                return None
            found.pop(found.index(other, place))
            found[place] = BACKWARD * stages + stage
        else:
            ahead = place - 1
            while ahead >= 0 and found[ahead] != other:
                ahead -= 1
            if ahead < 0:
                return None
            found[ahead] = BACKWARD * stages + stage
            found.pop(place)
    elif task.recompute and kind in (FORWARD, LEAN, RECOMPUTE):
        return _run_again(task, found, place, random)
    else:
        return None
    return found


def _run_again(task: Task, found: list[int], place: int, random: Random) -> list[int] | None:
    """The list after a forward starts, or stops, being run again."""
    stages = task.stages
    kind, stage = divmod(found[place], stages)
    forwards, backwards = (FORWARD, LEAN), (BACKWARD, INPUT)
    # Of which microbatch it is, and how many of those before it are run again.
    if kind == RECOMPUTE:
        turn = found[:place].count(found[place])
        lean = [n for n, step in enumerate(found) if step == LEAN * stages + stage]
        found[lean[turn]] = stage
        found.pop(place)
        return found
    turn = sum(step % stages == stage and step // stages in forwards for step in found[:place])
    if kind == LEAN:
        again = found[:place].count(found[place])
        runs = [n for n, step in enumerate(found) if step == RECOMPUTE * stages + stage]
        found[place] = stage
        found.pop(runs[again])
        return found
    back = [
        n for n, step in enumerate(found) if step % stages == stage and step // stages in backwards
    ]
    found[place] = LEAN * stages + stage
    found.insert(
        max(place + 1, back[turn] - int(random.expovariate(1))), RECOMPUTE * stages + stage
    )
    return found
