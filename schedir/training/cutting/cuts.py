"""Where a list of layers is cut into stages: by costs, at given layers, or by a layout.

A layout is Megatron-LM's pipeline in one line, `Et*3|(t*2|)*6,tL`: `E` is the embedding, `t` a
transformer layer, `m` a layer of multi-token prediction, `L` the head and the loss. `|` separates
stages, `x*3` and `(…)*3` repeat three times, and commas mean nothing
(megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, groupby, islice, pairwise
from operator import attrgetter

import numpy as np

from schedir.errors import ExecutionError
from schedir.finder.planning import balanced_cut
from schedir.ir import Schedule, is_number
from schedir.training.cutting.stages import (
    Part,
    Span,
    Stages,
    Uncut,
    held_stages,
    parameters_of,
    summary_of,
    ties_across,
)

_WAYS = (
    'by= is "parameters", "uniform", "type:REGEX" of the layers\' classes, or a layout such as '
    '"Et*3|(t*2|)*6,tL"'
)
_LETTERS = "EtmL|"
_MOST = 100_000  # letters of a layout without repetitions


def balanced(costs: Sequence[float], stages: int) -> tuple[Span, ...]:
    """Cut a list of layers into contiguous stages, so that the most costly stage costs the least.

    >>> from schedir.training import balanced
    >>> balanced([4, 1, 1, 2], stages=2)
    ((0, 1), (1, 4))

    `costs` has one number per layer, in any unit. No stage is empty. Of equally good cuts it takes
    the one with the least sum of squares, and then the one whose earlier stages are longer, so that
    a layer of no cost stays with the layer before it. If all costs are 0, all layers count the
    same. It is dynamic programming, O(stages × layers²). (Bokhari, IEEE Trans. Computers 37(1),
    1988, solves the same by shortest paths.)

    Returns (first layer, layer after the last) for each stage. Raises ExecutionError for more
    stages than layers, and for costs that are negative, not finite or no numbers.
    """
    _check_number(len(costs), stages)
    for number, value in enumerate(costs):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise ExecutionError(f"costs: that of layer {number} must be a number, not {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ExecutionError(
                f"costs: that of layer {number} must be finite and at least 0, not {value!r}"
            )
    return spans_of(balanced_cut(costs, stages), len(costs))


def cut(
    model: Uncut,
    stages: Schedule | int,
    by: str | None,
    costs: Sequence[float] | None,
    boundaries: Sequence[int | str] | None,
    rank: int | None,
) -> Stages:
    """Cut a model by the arguments of `partition`, and make the stages of this process.

    Raises ExecutionError for several ways at once, an unknown one, or one that does not fit.
    """
    parts = model.parts
    number = stages.stages if isinstance(stages, Schedule) else stages
    _check_number(len(parts), number)
    spans, told = _spans(parts, number, by, costs, boundaries)
    here = held_stages(stages, rank)
    ties = ties_across(parts, spans)
    summaries = tuple(
        summary_of(parts[slice(*span)], None if told is None else told[slice(*span)])
        for span in spans
    )
    return Stages(dict(model.make(spans, here)), ties, summaries)


def spans_of(starts: Sequence[int], parts: int) -> tuple[Span, ...]:
    """The parts of each stage: the first stage begins at part 0, the others at `starts`."""
    return tuple(pairwise([0, *starts, parts]))


def _spans(
    parts: Sequence[Part],
    stages: int,
    by: str | None,
    costs: Sequence[float] | None,
    boundaries: Sequence[int | str] | None,
) -> tuple[tuple[Span, ...], Sequence[float] | None]:
    """The parts of each stage and, for cuts by costs or by types, the cost of each part."""
    given = {"by": by, "costs": costs, "boundaries": boundaries}
    ways = [f"{name}=" for name, value in given.items() if value is not None]
    if len(ways) > 1:
        raise ExecutionError(f"{' and '.join(ways)}: a model is cut in one way; pass one of them")
    if boundaries is not None:
        return spans_of(_starts(boundaries, parts, stages), len(parts)), None
    told = costs
    if isinstance(by, str) and by.lower().startswith("type:"):
        told = _matching(by[len("type:") :], parts)
    elif isinstance(by, str) and ("|" in by or by.startswith("E")):
        return _layout_spans(by, parts, stages), None
    elif by not in (None, "parameters", "uniform"):
        raise ExecutionError(f"{_WAYS}, not {by!r}")
    elif costs is None:
        sizes = [1 if by == "uniform" else parameters_of([part]) for part in parts]
        return balanced(sizes, stages), None
    if not isinstance(told, (Sequence, np.ndarray)):
        raise ExecutionError(f"costs: a list of numbers, one per layer, not {type(told).__name__}")
    if len(told) != len(parts):
        raise ExecutionError(
            f"costs: {len(told)} numbers for {len(parts)} layers; give one for each"
        )
    return balanced(told, stages), told


def _check_number(layers: int, stages: int) -> None:
    """Raise ExecutionError if a stage would be empty."""
    if not (is_number(stages) and stages):
        raise ExecutionError(f"a model is cut into 1 stage or more, not {stages!r}")
    if stages > layers:
        raise ExecutionError(
            f"{stages} stages can't be made of {layers} layer{'s' * (layers != 1)}, because no "
            "stage may be empty; take fewer stages, or cut the model into more and smaller layers"
        )


def _starts(boundaries: Sequence[int | str], parts: Sequence[Part], stages: int) -> Sequence[int]:
    """The numbers of the parts that `boundaries` names."""
    if isinstance(boundaries, str) or not isinstance(boundaries, Sequence):
        raise ExecutionError(f"boundaries: a list of layers, by number or name, not {boundaries!r}")
    if len(boundaries) != stages - 1:
        raise ExecutionError(
            f"boundaries: {stages} stages have {stages - 1} between them, but there are "
            f"{len(boundaries)}; name the first layer of each stage except stage 0"
        )
    names = {part.name: number for number, part in enumerate(parts)}
    starts: list[int] = []
    for boundary in boundaries:
        start = names.get(boundary) if isinstance(boundary, str) else boundary
        if isinstance(start, bool) or not isinstance(start, int) or start not in range(len(parts)):
            raise ExecutionError(
                f"boundaries: there is no layer {boundary!r}, only {parts[0].name} to "
                f"{parts[-1].name}, or numbers below {len(parts)}"
            )
        if start <= (starts[-1] if starts else 0):
            raise ExecutionError(
                f"boundaries: layer {boundary!r} does not come after the beginning of the stage "
                "before it, which would be empty; list the layers in the model's order"
            )
        starts.append(start)
    return starts


def _matching(pattern: str, parts: Sequence[Part]) -> list[int]:
    """How many layers of each part have a class or function whose name matches."""
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ExecutionError(f"by='type:{pattern}' is no regular expression: {error}") from None
    found = [sum(bool(expression.search(kind)) for kind in part.layers.values()) for part in parts]
    if not any(found):
        kinds = ", ".join(dict.fromkeys(kind for part in parts for kind in part.layers.values()))
        raise ExecutionError(f"by='type:{pattern}' matches none of the layers, which are {kinds}")
    return found


def written_out(layout: str) -> str:
    """Write a layout out, without repetitions and commas.

    Raises ExecutionError, with the position, if the layout is not well formed.
    """
    written = ""
    opened: list[tuple[int, str]] = []  # the position, and the text written before it
    for found in re.finditer(r"([^(])(?:\*([0-9]*))?|\(", layout):
        at, (unit, times) = found.start(), found.groups()
        if unit is None:
            opened.append((at, written))
            written = ""
            continue
        if unit == ")":
            if not opened:
                raise _error(layout, at, "this parenthesis was never opened")
            unit, written = written, opened.pop()[1]
        elif unit in ", ":
            unit = ""
        elif unit not in _LETTERS:
            raise _error(
                layout, at, f"{unit!r} is none of E, t, m, L, |, a comma, a parenthesis or *n"
            )
        if times is not None:
            number = int(times[:9] or 0)
            if not unit or not number:
                raise _error(
                    layout,
                    at + 1,
                    "* stands between a letter or parentheses and a number of at least 1",
                )
            if len(unit) * number > _MOST:
                raise _error(layout, at + 1, f"that makes more than {_MOST} letters")
            unit *= number
        written += unit
    if opened:
        raise _error(layout, opened[-1][0], "this parenthesis is never closed")
    return written


def _layout_spans(layout: str, layers: Sequence[Part], stages: int) -> tuple[Span, ...]:
    """Find the layers of each stage of a layout.

    Raises ExecutionError if the layout is not well formed, or does not fit the layers or the number
    of stages.
    """
    parts = written_out(layout).split("|")
    if len(parts) != stages:
        raise ExecutionError(
            f"the layout {layout!r} has {len(parts)} stages, but the schedule has {stages}"
        )
    sizes = iter(_sizes(layout, "".join(parts), layers))
    ends = accumulate(sum(islice(sizes, len(part))) for part in parts)
    spans = tuple(pairwise([0, *ends]))
    empty = {
        "": "",
        "E": f": E stands for nothing, because no layer comes before {layers[0]}",
        "L": f": L stands for the loss alone, because no layer follows {layers[-1]}",
    }
    for stage, (first, end) in enumerate(spans):
        if first == end:
            raise ExecutionError(
                f"the layout {layout!r} leaves stage {stage} empty{empty[parts[stage]]}"
            )
    return spans


def _sizes(layout: str, letters: str, layers: Sequence[Part]) -> list[int]:
    """The number of layers that each letter stands for."""
    blocks, predictions = letters.count("t"), letters.count("m")
    if letters != f"E{'t' * blocks}{'m' * predictions}L":
        raise ExecutionError(
            f"the layout {layout!r} must begin with one E and end with one L, and have its t "
            "before its m"
        )
    runs = (list(run) for _, run in groupby(layers, key=attrgetter("kind")))
    run = max(runs, key=len)  # of several the first
    first = layers.index(run[0])
    rest = len(layers) - first - len(run)
    if len(run) == blocks and rest >= predictions:
        return [first, *[1] * (blocks + predictions), rest - predictions]
    if len(layers) != len(letters):
        raise ExecutionError(
            f"the layout {layout!r} has {blocks} t and {predictions} m, but of {len(layers)} "
            f"layers the longest run of one class is {len(run)} × {run[0].kind}, layers "
            f"{run[0].name} to {run[-1].name}, with {first} before it and {rest} after; write one "
            "t for each layer of that run: E is all layers before it, m one layer after, and L the "
            "rest"
        )
    return [1] * len(letters)


def _error(layout: str, at: int, reason: str) -> ExecutionError:
    return ExecutionError(f"the layout {layout!r}, at position {at + 1}: {reason}")
