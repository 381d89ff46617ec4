"""What processes do together outside of a step: each its part, and all fail where one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from schedir.errors import ExecutionError, SchedirError
from schedir.runtime.processes.failure import describe

T = TypeVar("T")

Gather: TypeAlias = Callable[[Any], list[Any]]
"""From what one process gives to what all give, on each: `executor.gather`."""


def alone(value: Any) -> list[Any]:
    """The `Gather` of a process that is on its own."""
    return [value]


def everywhere(gather: Gather, part: Callable[[], T]) -> list[T]:
    """What each process's `part` returns, on all of them.

    Raises ExecutionError on all where the part of any fails, so that nobody waits for it, and the
    subclass of it that the part of the first such process raised.
    """
    value, failure, told = None, None, None
    try:
        value = part()
    except Exception as error:
        failure = error
    if failure is not None:
        kind = type(failure) if isinstance(failure, ExecutionError) else ExecutionError
        told = kind, str(failure) if isinstance(failure, SchedirError) else describe(failure)
    found = gather((value, told))
    failed = {number: told for number, (_, told) in enumerate(found) if told is not None}
    if not failed:
        return [value for value, _ in found]
    (number, (kind, text)), *_ = failed.items()
    # What fails alike everywhere is no matter of one process.
    where = "" if len(failed) == len(found) else f"process {number} of {len(found)}: "
    raise kind(f"{where}{text}", cause=failure) from failure
