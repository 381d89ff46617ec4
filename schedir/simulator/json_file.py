"""JSON in a file, or an error that says where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schedir.errors import LoadError, ParseError
from schedir.ir import decode


def read_json(path: str | Path) -> object:
    """The content of a JSON file.

    Raises ParseError, with line and column, for what is no JSON, as where the file is cut short,
    LoadError where it can't be read, or has a key twice.
    """
    file = str(path)
    try:
        return json.loads(decode(Path(path).read_bytes(), file), object_pairs_hook=_once)
    except OSError as error:
        raise LoadError(f"{file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        why = f"no JSON, or cut short: {error.msg}"
        raise ParseError(why, file, error.lineno, error.colno) from None
    except _TwiceError as error:
        raise LoadError(f"{file}: the key {clip(error.key)} stands there twice") from None
    except (ValueError, RecursionError, MemoryError):
        # A number of thousands of digits, brackets in brackets without end.
        raise LoadError(f"{file}: its JSON is beyond what can be read") from None


def clip(value: object) -> str:
    """The value in short, to be quoted in an error."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class _TwiceError(ValueError):
    """A key stands twice in an object, of which only one value would count."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found
