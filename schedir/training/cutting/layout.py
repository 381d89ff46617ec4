"""Megatron-LM's layout of a pipeline in one line: `Et*3|(t*2|)*6,tL`.

`E` is the embedding, `t` a transformer layer, `m` one of multi-token prediction, `L` the head and
the loss; `|` stands between stages, `x*3` is x three times, `(…)*3` what is in parentheses, and
commas mean nothing (megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from schedir.errors import ExecutionError
from schedir.training.cutting.cuts import Span
from schedir.training.cutting.deferred import type_name
from schedir.training.cutting.layers import Layer

_LETTERS = "EtmL|"
_MOST = 100_000  # letters that a layout is written out to


def is_layout(text: str) -> bool:
    """Whether a text is meant as a layout, well formed or not."""
    return "|" in text or text.startswith("E")


def written_out(layout: str) -> str:
    """The layout without repetitions and commas.

    Raises ExecutionError, with the position, where it is not well formed.
    """
    written, end = _sequence(layout, 0)
    if end < len(layout):
        raise _error(layout, end, "this parenthesis was never opened")
    return written


def _sequence(layout: str, at: int) -> tuple[str, int]:
    """Everything up to the end, or to the parenthesis that closes; and where that is."""
    written = ""
    while at < len(layout) and layout[at] != ")":
        start = at
        if layout[at] == "(":
            unit, at = _sequence(layout, at + 1)
            if at == len(layout):
                raise _error(layout, start, "this parenthesis is never closed")
        elif layout[at] in ", ":
            unit = ""
        elif layout[at] in _LETTERS:
            unit = layout[at]
        else:
            raise _error(
                layout, at, f"{layout[at]!r} is none of E, t, m, L, |, a comma, a parenthesis or *n"
            )
        at += 1
        if at < len(layout) and layout[at] == "*":
            times = layout[at + 1 :]
            digits = times[: len(times) - len(times.lstrip("0123456789"))]
            if not unit or not digits or int(digits[:9]) < 1:
                raise _error(layout, at, "* follows what is repeated, and a number follows it")
            if len(unit) * int(digits[:9]) > _MOST:
                raise _error(layout, at, f"that makes more than {_MOST} letters")
            unit *= int(digits[:9])
            at += 1 + len(digits)
        written += unit
    return written, at


def _error(layout: str, at: int, reason: str) -> ExecutionError:
    return ExecutionError(f"the layout {layout!r}, at position {at + 1}: {reason}")


def layout_spans(layout: str, layers: Sequence[Layer], stages: int) -> tuple[Span, ...]:
    """The layers of each stage as a layout says.

    Raises ExecutionError where it is not well formed, or its letters don't fit the layers or the
    number of stages.
    """
    parts = written_out(layout).split("|")
    if len(parts) != stages:
        raise ExecutionError(
            f"the layout {layout!r} has {len(parts)} stages, but the schedule has {stages}"
        )
    for stage, part in enumerate(parts):
        if not part:
            raise ExecutionError(f"the layout {layout!r} leaves stage {stage} empty")
    letters = "".join(parts)
    sizes = _sizes(layout, letters, layers)
    spans = []
    read = first = 0
    for stage, part in enumerate(parts):
        end = first + sum(sizes[read : read + len(part)])
        if end == first:
            raise ExecutionError(
                f"the layout {layout!r} leaves stage {stage} empty: {part} stands for the loss "
                f"alone, as no layer follows {layers[-1]}"
            )
        spans.append((first, end))
        read, first = read + len(part), end
    return tuple(spans)


def _sizes(layout: str, letters: str, layers: Sequence[Layer]) -> list[int]:
    """How many layers each letter stands for."""
    blocks, predictions = letters.count("t"), letters.count("m")
    if letters != f"E{'t' * blocks}{'m' * predictions}L":
        raise ExecutionError(
            f"the layout {layout!r} must begin with one E and end with one L, and have its t "
            "before its m"
        )
    kinds = [type_name(layer.given) for layer in layers]
    first, length = _longest_run(kinds)
    rest = len(layers) - first - length - predictions
    if length == blocks and first and rest >= 0:
        return [first, *[1] * (blocks + predictions), rest]
    if len(layers) != len(letters):
        run = f"{layers[first].name} to {layers[first + length - 1].name}"
        raise ExecutionError(
            f"the layout {layout!r} has {blocks} t and {predictions} m, but of {len(layers)} "
            f"layers the longest run of one class is {length} × {kinds[first]}, layers {run}, with "
            f"{first} before it and {len(layers) - first - length} after; t stands for a layer of "
            "that run, E for all before, m for one layer after it, and L for the rest"
        )
    return [1] * len(letters)


def _longest_run(kinds: Sequence[str]) -> tuple[int, int]:
    """Where the first of the longest runs of the same begins, and how long it is."""
    best = first = length = 0
    for _, run in groupby(kinds):
        number = len(list(run))
        if number > length:
            best, length = first, number
        first += number
    return best, length
