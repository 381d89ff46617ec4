"""Puts an order together anew, most of it as it was: list scheduling by the times that it had.

Whatever has started earlier is put first, but for a few microbatches of a kind of step, at a stage,
a rank, or a whole side of the pipeline, that are made due earlier or later:

    due   W0 3  W1 6  W2 9   ──▶   W0 3  W1 10  W2 13         what else moves, the rule finds out
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import attrs

from schedir.finder.evaluating import Run, score, timed
from schedir.finder.list_scheduling import ALWAYS, NEVER, Rule, scheduled
from schedir.finder.task import BACKWARD, FORWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task
from schedir.graph.board import Order

_MEMORY = 20  # trials
_FEW = 3  # microbatches that are due at another time, on average


def rescheduled(
    task: Task, order: Order, run: Run, random: Random
) -> Iterator[tuple[Order, Run] | None]:
    """One trial after the other: what each has made, None where it is nothing."""
    at = score(task, run)
    past = [at] * _MEMORY
    rule = as_it_was(task, order, run)
    trial = 0
    while True:
        trial += 1
        other = _changed(task, rule, random)
        new = scheduled(task, other)
        ran = None if new is None else timed(task, new)
        if new is None or ran is None:
            yield None
            continue
        now = score(task, ran)
        if now <= at or now <= past[trial % _MEMORY]:
            at = now
            rule = attrs.evolve(
                as_it_was(task, new, ran),
                patience=other.patience,
                eager=other.eager,
                late=other.late,
            )
        past[trial % _MEMORY] = at
        yield new, ran


def as_it_was(task: Task, order: Order, run: Run) -> Rule:
    """The rule whose keys are the times of an order."""
    stages, many = task.stages, task.microbatches
    rows: list[list[float]] = [[] for _ in range(6 * stages)]
    split: list[list[bool]] = [[] for _ in range(stages)]
    again: list[list[int]] = [[] for _ in range(stages)]
    for steps, starts in zip(order, run.starts, strict=True):
        for step, start in zip(steps, starts, strict=True):
            kind, stage = divmod(step, stages)
            if kind <= LEAN:
                rows[stage].append(start)
                again[stage].append(ALWAYS if kind == LEAN else NEVER)
            elif kind in (BACKWARD, INPUT):
                rows[BACKWARD * stages + stage].append(start)
                split[stage].append(kind == INPUT)
            elif kind == WEIGHT:
                rows[step].append(start)
    for stage in range(stages):
        rows[LEAN * stages + stage] = rows[stage]
        for kind in (INPUT, RECOMPUTE):
            rows[kind * stages + stage] = rows[BACKWARD * stages + stage]
        # Of those that are whole now, last.
        due = rows[WEIGHT * stages + stage]
        due += [math.inf] * (many - len(due))
    return Rule(rows, 0.3, 1.0, 0.3, [math.inf] * task.ranks, split, again)


def _changed(task: Task, rule: Rule, random: Random) -> Rule:
    """The rule with a few steps due at other times."""
    stages, ranks, many = task.stages, task.ranks, task.microbatches
    keys = [*rule.keys]
    for _ in range(1 + int(random.expovariate(1))):
        kind = random.choice((FORWARD, BACKWARD, WEIGHT))
        rank = random.randrange(ranks)
        where = random.choice(
            (
                [random.choice(task.stages_of[rank])],
                [random.choice(task.stages_of[rank])],
                task.stages_of[rank],
                [s for s in range(stages) if task.placement[s] <= rank],
                [s for s in range(stages) if task.placement[s] >= rank],
            )
        )
        first = random.randrange(many)
        until = first + 1 + int(random.expovariate(1 / _FEW))
        later = random.gauss(0, 1) * task.period * random.choice((0.3, 1, 3))
        for stage in where:
            row = [*keys[kind * stages + stage]]
            row[first:until] = [due + later for due in row[first:until]]
            for same in _SAME[kind]:
                keys[same * stages + stage] = row
    return attrs.evolve(
        rule,
        keys=keys,
        patience=_near(rule.patience, random),
        eager=_near(rule.eager, random),
        late=_near(rule.late, random),
        split=_flipped(rule.split, random) if task.split else rule.split,
        again=_flipped_again(rule.again, random) if task.recompute else rule.again,
    )


_SAME = {
    FORWARD: (FORWARD, LEAN),
    BACKWARD: (BACKWARD, INPUT, RECOMPUTE),
    WEIGHT: (WEIGHT,),
}


def _near(patience: float, random: Random) -> float:
    return min(1.0, max(0.0, patience + random.gauss(0, 0.1)))


def _flipped(table: list[list[bool]], random: Random) -> list[list[bool]]:
    """The table, now and then with a few microbatches of a stage the other way."""
    if random.random() < 0.7:
        return table
    stage, found = random.randrange(len(table)), [*table]
    row = [*table[stage]]
    first = random.randrange(len(row))
    until = first + 1 + int(random.expovariate(1 / _FEW))
    value = not row[first]
    row[first:until] = [value] * len(row[first:until])
    found[stage] = row
    return found


def _flipped_again(table: list[list[int]], random: Random) -> list[list[int]]:
    flipped = _flipped([[way != NEVER for way in row] for row in table], random)
    return [[ALWAYS if way else NEVER for way in row] for row in flipped]
