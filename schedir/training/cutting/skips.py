"""Skip connections: a value is put aside at one layer and taken up at a later one.

Between the two it crosses the boundaries of stages beside the layers' own values, so that any cut
computes the same. The idea is torchgpipe's `@skippable` (Kim et al., arXiv 2004.09910, section
3.3), where the value goes straight to the stage that takes it up; here it goes along the pipeline,
whose neighbours alone talk to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from schedir.errors import ExecutionError


@attrs.frozen(eq=False)
class Stash:
    """Puts the present value aside under a name, and passes it on."""

    name: str


@attrs.frozen(eq=False)
class Pop:
    """Joins the present value with the one that was put aside under a name."""

    name: str
    join: Callable[[Any, Any], Any]


def stash(name: str) -> Stash:
    """A layer for `partition` that puts the present value aside for a later `pop(name, …)`."""
    return Stash(_checked(name))


def pop(name: str, join: Callable[[Any, Any], Any]) -> Pop:
    """A layer for `partition` whose value is `join(present, put aside)`, such as
    `pop("in", torch.add)`.

    `join` is a function without parameters of its own. What was put aside is kept until the last
    `pop` of its name, or until the name is put aside anew.

    Raises ExecutionError where `join` is not callable.
    """
    if not callable(join):
        raise ExecutionError(
            f"pop({name!r}) needs a function of both values, not {type(join).__name__}"
        )
    return Pop(_checked(name), join)


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ExecutionError(f"what is put aside needs a name, a string, not {name!r}")
    return name


def kept_before(layers: Sequence[object]) -> list[tuple[str, ...]]:
    """The names of what is put aside before each layer and taken up there or later.

    Raises ExecutionError where nothing is taken up, or nothing has been put aside.
    """
    wanted: dict[str, int] = {}
    kept: list[tuple[str, ...]] = [()] * len(layers)
    for number in reversed(range(len(layers))):
        layer = layers[number]
        if isinstance(layer, Stash) and wanted.pop(layer.name, None) is None:
            raise ExecutionError(
                f"layer {number} puts {layer.name!r} aside, but no later layer takes it up by "
                f"pop({layer.name!r}, …)"
            )
        if isinstance(layer, Pop):
            wanted[layer.name] = number
        kept[number] = tuple(sorted(wanted))
    for name, number in wanted.items():
        raise ExecutionError(
            f"layer {number} takes up {name!r}, which no earlier layer puts aside by "
            f"stash({name!r})"
        )
    return kept
