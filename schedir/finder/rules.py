"""The rules that a search tries: a few numbers each, so that it can vary them.

Every step has an ideal time, that of a pipeline which each microbatch goes through as if alone, one
every period of the busiest rank. A rule takes what was due first, with a bias: to gradients that
others wait for, to deep chunks, away from the gradients of weights, which nobody waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import attrs

from schedir.finder.list_scheduling import ALWAYS, NEEDED, NEVER, Rule
from schedir.finder.task import Task

_FIRST = 1000.0  # periods: before all others of its rank


_PATIENCE = ("patience", "eager", "late")
_VARIED = (*_PATIENCE, "noise", "stretch", "lag", "deep", "urgent", "lazy", "cap")


@attrs.frozen(kw_only=True)
class Style:
    """How a rule ranks steps; times are in periods of the busiest rank.

    Ideal times are stretched by `stretch`. Backwards are due `urgent` earlier, forwards of each
    further chunk `deep` earlier, weights' gradients `lazy` later, and more so as the step goes on,
    `lag` more of a rank's share for its last microbatches. A rank keeps at most the part `cap` of
    its limit, or so many times what its stages keep of a microbatch. What is jittered is by up to
    `noise`, as `seed` says.
    """

    patience: float = 0.3
    eager: float = 1.0
    late: float = 0.3
    urgent: float = _FIRST
    lazy: float = _FIRST
    lag: float = 0.0
    deep: float = 0.0
    stretch: float = 1.0
    cap: float = 0.0
    split: bool = True
    again: int = NEVER
    noise: float = 0.0
    seed: int = 0


def styles(task: Task) -> Iterator[Style]:
    """The styles to begin with, the likeliest first."""
    splits = [True, False] if task.split else [False]
    agains = [NEVER, NEEDED, ALWAYS] if task.recompute else [NEVER]
    caps = [0.0] if task.memory.limited else [0.0, 2.0 * task.ranks, 1.0 * task.ranks]
    plain = Style()
    ways = [
        plain,
        attrs.evolve(plain, eager=0.6),
        attrs.evolve(plain, patience=0.0, eager=0.0, late=0.0),
        attrs.evolve(plain, lazy=0.0, urgent=0.0, lag=2.0),
        attrs.evolve(plain, patience=0.0, eager=0.3, late=1.0),
        attrs.evolve(plain, patience=0.6, late=1.0),
        attrs.evolve(plain, urgent=0.0, late=1.0),
        attrs.evolve(plain, urgent=0.0, lazy=0.0),
        attrs.evolve(plain, patience=1.0, late=1.0),
        attrs.evolve(plain, urgent=-_FIRST),
    ]
    deeps = [0.0, 1.0, _FIRST, -_FIRST] if len(task.stages_of[0]) > 1 else [0.0]
    turns = product(*(range(len(each)) for each in (ways, deeps, caps, agains, splits)))
    # Those that are likely in all respects come before those that are so in one alone.
    for way, deep, cap, again, split in sorted(turns, key=sum):
        if splits[split] or ways[way].lazy:
            yield attrs.evolve(
                ways[way],
                deep=deeps[deep],
                cap=caps[cap],
                again=agains[again],
                split=splits[split],
            )


def varied(style: Style, random: Random) -> Style:
    """Another style that is like this one."""
    changes: dict[str, Any] = {"seed": random.randrange(1 << 30)}
    for name in (
        "noise",
        "patience",
        "eager",
        "late",
        "stretch",
        "lag",
        "deep",
        "urgent",
        "lazy",
        "cap",
    ):
        if random.random() < 0.35:
            changes[name] = _varied(name, getattr(style, name), random)
    return attrs.evolve(style, **changes)


def _varied(name: str, value: float, random: Random) -> float:
    if name in _PATIENCE:
        return min(1.0, max(0.0, value + random.gauss(0, 0.2)))
    if name == "noise":
        return random.choice((0.0, 0.1, 0.3, 1.0))
    if name == "stretch":
        return max(0.1, value * random.lognormvariate(0, 0.4))
    if name == "cap":
        return value and max(1.0, value * random.lognormvariate(0, 0.3))
    if abs(value) >= _FIRST:
        return value if random.random() < 0.7 else random.gauss(0, 2)
    return value + random.gauss(0, 1)


def rule_of(task: Task, style: Style) -> Rule:
    """The rule of a style."""
    stages, costs, many, period = task.stages, task.costs, task.microbatches, task.period
    split = style.split and task.split
    back = costs.backward_input if split else costs.backward
    random = Random(style.seed)

    def jitter() -> float:
        return random.gauss(0, style.noise) * period if style.noise else 0.0

    now, forwards, backwards = 0.0, [], [0.0] * stages
    for s in range(stages):
        now += costs.down[s] * style.stretch
        forwards.append(now + jitter())
        now += costs.forward[s] * style.stretch
    for s in reversed(range(stages)):
        now += costs.up[s] * style.stretch
        backwards[s] = now + jitter()
        now += back[s] * style.stretch
    times = [period * m for m in range(many)]
    keys: list[list[float]] = [[] for _ in range(6 * stages)]
    for s in range(stages):
        rank = task.placement[s]
        chunk = task.stages_of[rank].index(s)
        due = forwards[s] - style.deep * period * chunk
        keys[s] = keys[stages + s] = [due + time for time in times]
        due = backwards[s] - style.urgent * period
        keys[2 * stages + s] = keys[3 * stages + s] = keys[5 * stages + s] = [
            due + time for time in times
        ]
        due = backwards[s] + back[s] + style.lazy * period + jitter()
        lag = style.lag * (rank + 1) / many
        keys[4 * stages + s] = [due + time * (1 + lag) for time in times]
    return Rule(
        keys,
        style.patience,
        style.eager,
        style.late,
        [
            style.cap * max(task.memory.full[s] for s in held) if style.cap else float("inf")
            for held in task.stages_of
        ],
        [[split] * many] * stages,
        [[style.again] * many] * stages,
    )
