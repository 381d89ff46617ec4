"""Report errors in a user's code in one line, with the user's file and line."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import FrameType, FunctionType
from typing import Any

from schedir.errors import LoadError
from schedir.ir import Source
from schedir.library.authoring import Generator

_PACKAGE = Path(__file__).resolve().parents[1]
_LONGEST_VALUE = 60


def call_user_code(call: Callable[[], Any], what: str) -> Any:
    """Run a user's code; `what` names that code.

    Raises LoadError, with the user's line, for anything that the code raises.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise LoadError(f"{user_line(error) or what}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An exception's type and message on one line."""
    # A SyntaxError's text repeats the file and line.
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}".rstrip(": ")


def describe_value(value: object) -> str:
    """A value and its type, shortened to fit a message."""
    text = repr(value)
    if len(text) > _LONGEST_VALUE:
        text = text[: _LONGEST_VALUE - 3] + "..."
    return f"{text} ({type(value).__name__})"


def user_line(error: BaseException) -> str:
    """The innermost `file:line` of a traceback that is neither schedir's nor the import
    system's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown_path(error.filename)}:{error.lineno}"
    lines = [
        f"{_shown_path(frame.f_code.co_filename)}:{line}"
        for frame, line in walk_tb(error.__traceback__)
        if _belongs_to_user(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else ""


def source_of(file: str, line: int) -> Source:
    """A line of Python as it is shown."""
    return Source(_shown_path(file), line)


def blamed_line(frame: FrameType | None, generator: Generator) -> str:
    """The line that a frame has reached; without a frame, the line that defines the generator."""
    function = generator.function
    if frame is not None:
        code, line = frame.f_code, frame.f_lineno
    elif isinstance(function, FunctionType):
        code = function.__code__
        line = code.co_firstlineno
    else:
        return generator.name
    return str(source_of(code.co_filename, line))


def _belongs_to_user(file: str) -> bool:
    """True if a line of `file` is the author's; the built-in schedules count as an author's."""
    if file.startswith("<"):
        return False  # the import system, or methods that attrs has generated
    path = Path(file).resolve()
    own = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "schedules")
    return not own and not path.is_relative_to(Path(importlib.__file__).resolve().parent)


def _shown_path(file: str) -> str:
    """A file's real path, relative to the working directory if that is shorter."""
    path = Path(file).resolve()
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except FileNotFoundError:  # the working directory has been removed
        return str(path)
