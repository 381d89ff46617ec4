"""What the times of a timeline are: numbers, one for each action, and where they come from."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers: TypeAlias = NDArray[Any]
"""Times: all of them integers, or all floats."""


def numbers(values: ArrayLike) -> Numbers:
    """The times as an array that nobody writes: of int64 where they are integers, else float64."""
    times = np.asarray(values)
    whole = times.size > 0 and times.dtype.kind in "iu"
    times = times.astype(np.int64 if whole else np.float64)
    times.flags.writeable = False
    return times


@attrs.frozen
class Measured:
    """How a measured timeline came about: the `step` that it is of, and by how much, in its unit of
    time, the clocks of two ranks may differ at most (`clock_error`)."""

    step: int
    clock_error: float = 0.0
