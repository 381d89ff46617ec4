"""Work that all processes do together, outside of a step: if one fails, all fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from schedir.diagnosis import Root
from schedir.errors import ExecutionError, SchedirError
from schedir.runtime.processes.failure import describe, in_one_line

T = TypeVar("T")

Gather: TypeAlias = Callable[..., list[Any]]
"""Takes a value from each process, and perhaps `what` it is for, and returns all values on each:
`executor.gather`."""


def alone(value: Any, what: str = "") -> list[Any]:
    """Gather for a single process."""
    return [value]


def everywhere(gather: Gather, part: Callable[[], T]) -> list[T]:
    """Call `part` on each process, and return the results of all of them, on each.

    If any process fails, raises ExecutionError on all of them, so that no process waits; it is of
    the subclass that the first failing process raised.
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
    # If all processes fail, no process is named.
    where = "" if len(failed) == len(found) else f"process {number} of {len(found)}: "
    roots = [Root(each, 0, None, None, in_one_line(said)) for each, (_, said) in failed.items()]
    raise kind(f"{where}{text}", cause=failure, roots=roots) from failure
