"""The ways in which a list of layers is cut, as users name them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import numpy as np

from schedir.errors import ExecutionError
from schedir.training.cutting.cuts import Span, balanced, check_costs, check_number, spans_of
from schedir.training.cutting.deferred import type_name
from schedir.training.cutting.layers import Layer
from schedir.training.cutting.layout import is_layout, layout_spans
from schedir.training.cutting.sharing import Inventory

_WAYS = (
    'by= is "parameters", "uniform", "type:REGEX" of the layers\' classes, or a layout such as '
    '"Et*3|(t*2|)*6,tL"'
)


@attrs.frozen
class Cut:
    """The layers of each stage, and what each layer was taken to cost, where that is to be told."""

    spans: tuple[Span, ...]
    costs: Sequence[float] | None = None


def cut_of(
    inventory: Inventory,
    stages: int,
    by: str | None,
    costs: Sequence[float] | None,
    boundaries: Sequence[int | str] | None,
) -> Cut:
    """The cut that `partition` was asked for; see there.

    Raises ExecutionError where it was asked for none, or two, or one that doesn't fit the layers.
    """
    layers = inventory.layers
    given = {"by": by, "costs": costs, "boundaries": boundaries}
    ways = [name for name, value in given.items() if value is not None]
    if len(ways) > 1:
        raise ExecutionError(
            f"{' and '.join(f'{way}=' for way in ways)}: a model is cut in one way"
        )
    check_number(len(layers), stages)
    if costs is not None:
        return _by_costs(costs, layers, stages)
    if boundaries is not None:
        return Cut(spans_of(_starts(boundaries, layers, stages), len(layers)))
    if by == "uniform":
        return Cut(balanced([1] * len(layers), stages))
    if by is None or by == "parameters":
        own = [inventory.parameters((number, number + 1)) for number in range(len(layers))]
        return Cut(balanced(own, stages))
    if not isinstance(by, str):
        raise ExecutionError(f"{_WAYS}, not {by!r}")
    if by.lower().startswith("type:"):
        matching = _matching(by[len("type:") :], layers)
        return Cut(balanced(matching, stages), matching)
    if is_layout(by):
        return Cut(layout_spans(by, layers, stages))
    raise ExecutionError(f"{_WAYS}, not {by!r}")


def _by_costs(costs: Sequence[float], layers: Sequence[Layer], stages: int) -> Cut:
    if not isinstance(costs, (Sequence, np.ndarray)):
        raise ExecutionError(f"costs: a list of numbers, one per layer, not {type(costs).__name__}")
    if len(costs) != len(layers):
        raise ExecutionError(
            f"costs: {len(costs)} numbers for {len(layers)} layers; give one for each"
        )
    check_costs(costs)
    return Cut(balanced(costs, stages), costs)


def _starts(boundaries: Sequence[int | str], layers: Sequence[Layer], stages: int) -> Sequence[int]:
    """The numbers of the layers that stages begin with."""
    if isinstance(boundaries, str) or not isinstance(boundaries, Sequence):
        raise ExecutionError(f"boundaries: a list of layers, not {boundaries!r}")
    if len(boundaries) != stages - 1:
        raise ExecutionError(
            f"boundaries: {stages} stages have {stages - 1} between them, but there are "
            f"{len(boundaries)}; name the first layer of each stage but the first"
        )
    names = {layer.name: number for number, layer in enumerate(layers)}
    starts: list[int] = []
    for boundary in boundaries:
        start = names.get(boundary) if isinstance(boundary, str) else boundary
        if isinstance(start, bool) or not isinstance(start, int) or start not in range(len(layers)):
            raise ExecutionError(
                f"boundaries: there is no layer {boundary!r}, only {layers[0].name} to "
                f"{layers[-1].name}, or numbers below {len(layers)}"
            )
        if start <= (starts[-1] if starts else 0):
            raise ExecutionError(
                f"boundaries: layer {boundary!r} comes not after the beginning of the stage "
                "before, which would be empty; list them in the model's order"
            )
        starts.append(start)
    return starts


def _matching(pattern: str, layers: Sequence[Layer]) -> list[int]:
    """1 for each layer whose class or function is named so, and 0 for the others."""
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ExecutionError(f"by='type:{pattern}' is no regular expression: {error}") from None
    found = [int(bool(expression.search(type_name(layer.given)))) for layer in layers]
    if not any(found):
        kinds = ", ".join(dict.fromkeys(type_name(layer.given) for layer in layers))
        raise ExecutionError(f"by='type:{pattern}' matches none of the layers, which are {kinds}")
    return found
