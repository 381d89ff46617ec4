"""Improves an order, trial by trial: late acceptance (Burke and Bykov 2017). A trial counts if it
is no worse than the search was a number of trials ago.

The value of an order is a chain of steps, each of which starts when the one before it is done. No
order with the same chain can be quicker, so each trial changes a rank's list around a step of the
chain: it moves that step ahead, or the step before it back, makes a backward whole, splits it, or
starts or stops running a forward again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from schedir.finder.orders import Run, fits, lengths, timed
from schedir.finder.terms import BACKWARD, FORWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task

_MEMORIES = (60, 300)  # trials: short ones climb, long ones cross plateaus
_EVENLY = 0.05
_FAR = 0.25  # moves are by 1 + a geometric number of places
_CHANGED_KIND = 0.2
_ANYWHERE = 0.2  # how often a change is made off the chain
_MORE = 1.2  # changes at once are 1 + an exponential of this rate


def improved(task: Task, run: Run, random: Random) -> Iterator[Run | None]:
    """One trial after the other: the result of each, None if it is nothing."""
    at = _score(task, run)
    past = [at] * random.choice(_MEMORIES)
    chain = critical(task, run)
    for trial in count(1):
        changed = [*run.order]
        for _ in range(1 + int(random.expovariate(_MORE))):
            rank, place = chain[random.randrange(len(chain))]
            if random.random() < _ANYWHERE:
                rank = random.randrange(task.ranks)
                place = random.randrange(len(run.order[rank]))
            steps = _changed_list(task, changed[rank], min(place, len(changed[rank]) - 1), random)
            if steps is not None:
                changed[rank] = steps
        fitting = all(
            now is before or fits(task, rank, now)
            for rank, (now, before) in enumerate(zip(changed, run.order, strict=True))
        )
        new = timed(task, changed) if fitting and changed != run.order else None
        if new is not None:
            now = _score(task, new)
            if now <= at or now <= past[trial % len(past)]:
                run, at = new, now
                chain = critical(task, run)
            past[trial % len(past)] = at
        yield new


def _score(task: Task, run: Run) -> float:
    """What a trial makes less: mostly the value, and to a small part when all ranks are done."""
    return run.value + _EVENLY * run.ties / task.ranks


def critical(task: Task, run: Run) -> list[tuple[int, int]]:
    """The chain of steps (rank, place) that adds up to the value, the last step first."""
    order, starts = run.order, run.starts
    needs, feeds, lasts = task.steps.needs, task.steps.feeds, task.steps.lasts
    makers: list[list[tuple[int, int]]] = [[] for _ in task.steps.channel]
    for rank, steps in enumerate(order):
        for place, step in enumerate(steps):
            if feeds[step] >= 0:
                makers[feeds[step]].append((rank, place))
    lasting = lengths(task, starts, run.ends)
    rank = lasting.index(max(lasting))
    place = len(order[rank]) - 1
    chain = []
    while place >= 0:
        chain.append((rank, place))
        start = starts[rank][place]
        if start <= 0:
            break
        before = place - 1
        if before >= 0 and starts[rank][before] + lasts[order[rank][before]] >= start:
            place = before
        else:
            queue = needs[order[rank][place]]
            if queue < 0:
                break
            turn = [needs[step] for step in order[rank][:place]].count(queue)
            rank, place = makers[queue][turn]
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
    """The list with a backward split or made whole, or with a forward that starts or stops being
    run again."""
    stages = task.stages
    way, stage = divmod(steps[place], stages)
    found = [*steps]

    def places(*ways: int) -> list[int]:
        """Where the stage's steps of these ways are."""
        wanted = [way * stages + stage for way in ways]
        return [n for n, step in enumerate(steps) if step in wanted]

    if way == BACKWARD:
        if not task.split:
            return None
        found[place] = INPUT * stages + stage
        found.insert(place + 1 + int(random.expovariate(0.5)), WEIGHT * stages + stage)
    elif way in (INPUT, WEIGHT):
        # The next W after an I, or the last I before a W.
        if way == INPUT:
            pair = [place, *(n for n in places(WEIGHT) if n > place)][:2]
        else:
            pair = [*(n for n in places(INPUT) if n < place), place][-2:]
        if len(pair) < 2:
            return None
        found[pair[0]] = BACKWARD * stages + stage
        found.pop(pair[1])
    elif not task.recompute:
        return None
    elif way == FORWARD:
        back = places(BACKWARD, INPUT)[places(FORWARD, LEAN).index(place)]
        found[place] = LEAN * stages + stage
        again = max(place + 1, back - int(random.expovariate(1)))
        found.insert(again, RECOMPUTE * stages + stage)
    else:
        turn = places(way).index(place)
        found[places(LEAN)[turn]] = stage
        found.pop(places(RECOMPUTE)[turn])
    return found
