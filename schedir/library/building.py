"""From a target and a shape to a schedule: `load` takes it as written, `build` completes it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from schedir.checker import CHANNELS, prove
from schedir.errors import LoadError
from schedir.ir import Schedule
from schedir.library.authoring import Generator, GeneratorFunction, Parameter, Pipeline
from schedir.library.generate import Costs, generate
from schedir.library.targets import generator_of, is_list, name_of, read_list

DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8
_MOST_PAIRS = 10**8  # (stage, microbatch) pairs, far beyond what memory can hold the actions of


@contextmanager
def _collector_held_off() -> Iterator[None]:
    """Turn off the garbage collector, which would search millions of actions in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_held_off()
def build(
    target: str | Path | Generator | GeneratorFunction,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs | Parameter = None,  # wide, so that a dict of parameters may be unpacked
    **parameters: Parameter,
) -> Schedule:
    """The complete schedule that `target` describes, with its communication.

    `target` is a name, a path, `-` for standard input, or a callable. The defaults are 4 ranks (or
    as many as `costs` were measured on), 8 microbatches, and the generator's default number of
    chunks per rank. `parameters` go to the generator. `costs` are for generators that optimise for
    given costs, by default the textbook's.

    Raises LoadError if the target can't be found or its generator fails, ParseError for a malformed
    file, and ScheduleError if the actions can't be completed.

    >>> import schedir
    >>> schedir.build("interleaved-1f1b", ranks=4, microbatches=8, chunks=2)
    <Schedule interleaved-1f1b: 4 ranks, 8 stages, 8 microbatches, 360 actions>
    """
    found = load(
        target, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=costs, **parameters
    )
    if found.is_complete:
        return found
    # What runs anywhere can be completed; on which transports is for `check` to say.
    return prove(found, CHANNELS[-1]).proved()


@_collector_held_off()
def load(
    target: str | Path | Generator | GeneratorFunction,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs | Parameter = None,  # wide, so that a dict of parameters may be unpacked
    **parameters: Parameter,
) -> Schedule:
    """Like `build`, but the actions as written, neither checked nor completed."""
    shape = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    for what, number in shape.items():
        if number is not None and (type(number) is not int or number < 1):
            raise LoadError(f"{what} must be an int >= 1, not {number!r}")
    if isinstance(costs, (str, int)):
        raise LoadError(f"costs must be a CostModel, or a function to one, not {costs!r}")
    if isinstance(target, (str, Path)) and is_list(target):
        found, name = read_list(Path(target)), name_of(target)
        taken = [*parameters, *(["chunks"] if chunks is not None else [])]
        if taken:
            raise LoadError(
                f"{name} is a list of actions and takes no parameters: {', '.join(taken)}"
            )
        for what in ("ranks", "microbatches"):
            has = getattr(found, what)
            if shape[what] not in (None, has):
                raise LoadError(f"{name} has {has} {what}, not {shape[what]}; leave {what} out")
        return found
    generator = generator_of(target)
    ranks = ranks or getattr(costs, "ranks", None) or DEFAULT_RANKS
    microbatches = DEFAULT_MICROBATCHES if microbatches is None else microbatches
    chunks = generator.chunks if chunks is None else chunks
    expect_fewer(ranks, chunks, microbatches)
    pipe = Pipeline(ranks, microbatches, chunks, placement=())
    found = generate(generator, pipe, parameters, costs)
    others = {"ranks": ranks, "chunks": chunks, "costs": costs, **parameters}
    return attrs.evolve(found, rebuild=partial(_again, generator, others))


def _again(generator: Generator, others: dict[str, Any], microbatches: int) -> Schedule:
    """The same schedule for another number of microbatches, as written."""
    return load(generator, microbatches=microbatches, **others)


def expect_fewer(ranks: int, chunks: int, microbatches: int) -> None:
    """Raise LoadError for a shape with more work than memory can hold."""
    if ranks * chunks * microbatches > _MOST_PAIRS:
        raise LoadError(
            f"{ranks} ranks, {chunks} chunks on each and {microbatches} microbatches are too many: "
            f"their product may be at most {_MOST_PAIRS}"
        )
