"""Work that all processes do together outside of a step: all fail where one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from schedir.errors import ExecutionError, SchedirError
from schedir.runtime.processes.failure import describe

T = TypeVar("T")

Gather: TypeAlias = Callable[[Any], list[Any]]
"""Takes what one process gives, and returns what all give, on each: `executor.gather`."""


def alone(value: Any) -> list[Any]:
    """Gather where one process is on its own."""
    return [value]


def everywhere(gather: Gather, part: Callable[[], T]) -> list[T]:
    """Call `part` on each process, and return what all of them return, on each.

    Raises ExecutionError on all where the part of any fails, so that nobody waits for it, and the
    subclass of it that the part of the first such process raised.
    """
    value, failure, told = None, None, None
    try:
        value = part()
    except Exception as error:
        failed_as = type(error) if isinstance(error, ExecutionError) else ExecutionError
        text = str(error) if isinstance(error, SchedirError) else describe(error)
        failure, told = error, (failed_as, text)
    found = gather((value, told))
    failed = {number: told for number, (_, told) in enumerate(found) if told is not None}
    if not failed:
        return [value for value, _ in found]
    (number, (kind, text)), *_ = failed.items()
    # What fails alike everywhere is no matter of one process.
    where = "" if len(failed) == len(found) else f"process {number} of {len(found)}: "
    raise kind(f"{where}{text}", cause=failure) from failure
