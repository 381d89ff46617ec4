"""Scenarios by name, with the ranks that each needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Scenario: TypeAlias = Callable[[int], list[str]]
"""Of a rank: what is wrong on it."""


class Scenarios(dict[str, tuple[int, Scenario]]):
    def on(self, *ranks: int) -> Callable[[Scenario], Scenario]:
        """Run it on each of these numbers of ranks."""

        def keep(function: Scenario) -> Scenario:
            for number in ranks:
                name = function.__name__ if len(ranks) == 1 else f"{function.__name__}_{number}"
                self[name] = (number, function)
            return function

        return keep
