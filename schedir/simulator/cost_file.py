"""A cost model in a file: a JSON object with a key for each field.

    {
      "forward": [1.5, 2],
      "latency": {"0->1": 0.1, "1->0": 0.2},
      "bandwidth": "inf",
      ...
    }

A field is a number, or a list with one for each stage (or boundary). What is by link has one key
`source->target` for each, `copy_engine` one for each rank. What is left out has its default. What
is written is read back exactly: integers stay integers, and floats have all their digits. `samples`
are the columns of what the costs were fitted on.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from schedir.files import write_text
from schedir.simulator.json_file import clip, read_json
from schedir.simulator.samples import Samples, of_plain

_LINK = re.compile(r"(\d{1,9})->(\d{1,9})", re.ASCII)


def write(fields: Mapping[str, Any], path: str | Path) -> None:
    """Write the fields of a cost model. Raises OSError where the file can't be written."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(_written(value), allow_nan=False)}"
        for name, value in fields.items()
        if name != "samples" or value is not None
    ]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _written(value: Any) -> Any:
    if isinstance(value, Samples):
        return value.plain()
    if isinstance(value, Mapping):
        return {
            "->".join(map(str, key)) if isinstance(key, tuple) else str(key): _written(one)
            for key, one in value.items()
        }
    return "inf" if value == math.inf else value


def read(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """The fields of a cost model, of those that are `known`, as `write` got them.

    Raises what `read_json` does, and ValueError for other keys.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f'costs must be an object, as in {{"forward": 1}}, not {clip(content)}')
    for name in content:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            mend = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"unknown key {clip(name)}; {mend}")
    return {name: _read(name, value) for name, value in content.items()}


def _read(name: str, value: Any) -> Any:
    if name == "samples":
        return None if value is None else of_plain(value)
    if isinstance(value, dict):
        key_of = _rank if name == "copy_engine" else _link
        return {key_of(name, key): _read(name, one) for key, one in value.items()}
    return math.inf if value == "inf" else value


def _rank(name: str, key: str) -> int:
    if not re.fullmatch(r"\d{1,9}", key, re.ASCII):
        raise ValueError(f'{name}: a rank is given as "0", not {clip(key)}')
    return int(key)


def _link(name: str, key: str) -> tuple[int, int]:
    link = _LINK.fullmatch(key)
    if link is None:
        raise ValueError(
            f'{name}: a link is given as "0->1", from rank 0 to rank 1, not {clip(key)}'
        )
    return int(link[1]), int(link[2])
