"""Every error that schedir raises on purpose: a user's mistake, never a bug of schedir.

All parts raise these, so this module imports none of them: what an error carries of theirs has the
type Any here, and is named in its docstring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SchedirError(Exception):
    """The base of all errors that schedir raises on purpose.

    `page` names the page of the docs to read: `schedir docs PAGE`. Empty: the page of the command.
    """

    page = ""


class ParseError(SchedirError):
    """A schedule's text is not well formed.

    `line` and `column` count from 1; `column` counts characters. `binary` is True where the file is
    no text at all, so that nothing of it is to be shown.
    """

    page = "text-form"

    def __init__(
        self, message: str, file: str, line: int, column: int, binary: bool = False
    ) -> None:
        super().__init__(f"{file}:{line}:{column}: {message}")
        self.message = message
        self.file = file
        self.line = line
        self.column = column
        self.binary = binary


class LoadError(SchedirError):
    """A schedule, costs or a timeline could not be found or read, or a generator failed."""

    page = "authoring"


class UnsoundError(SchedirError):
    """A schedule's structure is too wrong for a pass, or for looking up what feeds what.

    It names the first such fault that was met; `schedir.check` on the schedule finds them all.
    """

    page = "read-a-diagnostic"


class ScheduleError(SchedirError):
    """A schedule is wrong; `diagnostics` holds every finding, a `schedir.Diagnostic` each.

    Raises ValueError where there is none: a schedule without findings is not wrong.
    """

    page = "read-a-diagnostic"

    def __init__(self, message: str, diagnostics: Sequence[Any]) -> None:
        super().__init__(message)
        self.diagnostics: tuple[Any, ...] = tuple(diagnostics)
        if not self.diagnostics:
            raise ValueError("a ScheduleError needs the findings that it is about")


class ExecutionError(SchedirError):
    """A schedule failed while it ran, or could not start.

    `rank`, `index` and `action` (a `schedir.Action`) name the action that failed, by its place in
    the list that was given, before receives were moved ahead in it; they are None where the failure
    belongs to no action (a wrong set of stages, say). `cause` is the exception that led to it, if
    any.
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
    ) -> None:
        place = f"rank {rank}" if rank is not None else ""
        if action is not None:
            place += f" #{index} {action}"
        super().__init__(f"{place}: {message}" if place else message)
        self.rank = rank
        self.index = index
        self.action = action
        self.cause = cause
