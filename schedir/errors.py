"""Every error that schedir raises on purpose. Each one is a user's mistake, never a bug of schedir.

Every package raises these errors, so this module imports none of the packages. An error's
attributes that hold objects of other packages have the type Any here; the docstring names the real
type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs


class SchedirError(Exception):
    """The base of all errors that schedir raises on purpose.

    `page` names the page of the docs to read: `schedir docs PAGE`. Empty: the page of the command.

    >>> import schedir
    >>> try:
    ...     schedir.build("1f1b", ranks=2, order="ascending")
    ... except schedir.SchedirError as error:
    ...     print(error)
    1f1b has no parameter 'order'; it has: none
    """

    page = ""


@attrs.define
class ParseError(SchedirError):
    """The text of a file is malformed.

    `line` and `column` count from 1, and `column` counts characters. `binary` is True if the file
    holds no text, so that its content is not shown.

    >>> import schedir
    >>> schedir.loads("schedir 2", file="mine.sched")
    Traceback (most recent call last):
    schedir.errors.ParseError: mine.sched:1:9: format 2 is unknown; this is schedir's format 1
    """

    message: str
    file: str
    line: int
    column: int
    binary: bool = False

    page = "text-form"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


class LoadError(SchedirError):
    """schedir could not find or read a schedule, costs or a timeline, or a generator failed.

    >>> import schedir
    >>> schedir.build("1f1b", ranks=0)
    Traceback (most recent call last):
    schedir.errors.LoadError: ranks must be an int >= 1, not 0
    """

    page = "authoring"


class UnsoundError(SchedirError):
    """The structure of a schedule is too wrong for a pass, or to look up which action feeds which.

    The error names the first fault; `schedir.check` on the schedule finds them all.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0, 1], ["0B0 0F0", "1F0 1B0"])
    >>> schedir.insert_communication(schedule)
    Traceback (most recent call last):
    schedir.errors.UnsoundError: communication can't be inserted: rank 0 #0 0B0 never gets its input
    """

    page = "read-a-diagnostic"


class ScheduleError(SchedirError):
    """A schedule is wrong; `diagnostics` holds every finding, a `schedir.Diagnostic` each.

    Raises ValueError if there are no findings.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0], ["0F0 0B0 0B0"])
    >>> schedir.simulate(schedule)
    Traceback (most recent call last):
    schedir.errors.ScheduleError: S104 duplicate-action: 0B0 is listed twice at rank 0 #2 0B0
    """

    page = "read-a-diagnostic"

    def __init__(self, message: str, diagnostics: Sequence[Any]) -> None:
        super().__init__(message)
        self.diagnostics: tuple[Any, ...] = tuple(diagnostics)
        if not self.diagnostics:
            raise ValueError("a ScheduleError needs the findings that it is about")


class ExecutionError(SchedirError):
    """A schedule failed while it ran, or could not start.

    `rank`, `index` and `action` (a `schedir.Action`) name the action that failed. `index` is its
    place in the list as you gave it, before receives were moved ahead. All three are None if the
    failure belongs to no action, such as a wrong set of stages. `cause` is the exception that led
    to the failure, if any. `roots` are the ranks to blame where several processes run, a
    `schedir.diagnosis.Root` each, with `rank`, `index`, `action` and `cause`. `processes` are two
    processes that make different calls or hold different things. If the error is `one_line`, its
    message says everything, and is printed without a traceback.

    >>> import schedir
    >>> action = schedir.backward(1, 0)
    >>> print(schedir.ExecutionError("no gradient", rank=1, index=3, action=action))
    rank 1 #3 1B0: no gradient
    """

    page = "debug-a-hang"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        index: int | None = None,
        action: Any = None,
        cause: BaseException | None = None,
        roots: Sequence[Any] = (),
        processes: Sequence[int] = (),
        one_line: bool = False,
    ) -> None:
        place = f"rank {rank}" if rank is not None else ""
        if action is not None:
            place += f" #{index} {action}"
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.rank = rank
        self.index = index
        self.action = action
        self.cause = cause
        self.roots: tuple[Any, ...] = tuple(roots)
        self.processes: tuple[int, ...] = tuple(processes)
        self.one_line = one_line or bool(processes)
