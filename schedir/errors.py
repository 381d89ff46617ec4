"""Every error that schedir raises on purpose: a user's mistake, never a bug of schedir."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedir.checker.diagnostics import Diagnostic
    from schedir.ir import Action


class SchedirError(Exception):
    """The base of all errors that schedir raises on purpose."""


class ParseError(SchedirError):
    """A schedule's text is not well formed.

    `line` and `column` count from 1; `column` counts characters.
    """

    def __init__(self, message: str, file: str, line: int, column: int) -> None:
        super().__init__(f"{file}:{line}:{column}: {message}")
        self.message = message
        self.file = file
        self.line = line
        self.column = column


class LoadError(SchedirError):
    """A schedule could not be found, or its generator failed."""


class ScheduleError(SchedirError):
    """A schedule is wrong; `diagnostics` holds every finding."""

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic]) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)


class ExecutionError(SchedirError):
    """A schedule failed while it ran, or could not start.

    `rank`, `index` and `action` name the action that failed; they are None where the failure
    belongs to no action (a wrong set of stages, say). `cause` is the exception behind it, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        index: int | None = None,
        action: Action | None = None,
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
