"""How Sphinx makes the guides and the API reference: `make docs`, with warnings as errors."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from sphinx.application import Sphinx

import schedir
from schedir.display import Displayed
from schedir.ir.schedule import Placed

MODULES = (
    *("schedir", "schedir.simulator", "schedir.finder"),
    *("schedir.render", "schedir.runtime", "schedir.training"),
)
"""The public modules: `reference/api/` has a page for each, filled from its `__all__`."""

project = "schedir"
author = "The schedir authors"
release = schedir.__version__
html_title = f"schedir {release}"
html_theme = "furo"
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3  # as on GitHub
exclude_patterns = ["_build"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True  # `count=rows`, rather than the function's address
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False

nitpicky = True  # a reference that leads nowhere is a warning
# But for types in signatures that have no page here: torch's and Python's, and our own within.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!schedir\b).*"),
    (r"py:.*", r"schedir\.(\w+\.)+\w+"),
]


def owners() -> dict[str, list[str]]:
    """The public names of each module, less those that a module before has too."""
    seen: list[object] = []
    owned: dict[str, list[str]] = {}
    for module in MODULES:
        held = importlib.import_module(module)
        values = {name: getattr(held, name) for name in held.__all__ if not name.startswith("__")}
        owned[module] = [n for n, v in values.items() if not any(v is each for each in seen)]
        seen += values.values()
    return owned


OWNED = owners()
PLACES = {name: f"{module}.{name}" for module in reversed(OWNED) for name in OWNED[module]}


def list_names(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill a module's page of the reference: an entry for each name that the module owns."""
    module = page.rpartition("/")[2]
    if not page.startswith("reference/api/") or module not in OWNED:
        return
    lines = ["", f".. automodule:: {module}", "   :no-members:", ""]
    for name in OWNED[module]:
        value = getattr(importlib.import_module(module), name)
        kind = "class" if inspect.isclass(value) else "data"
        if inspect.isclass(value) and issubclass(value, BaseException):
            kind = "exception"
        elif inspect.isroutine(value):
            kind = "function"
        lines += [f".. auto{kind}:: {module}.{name}"]
        if inspect.isclass(value) and issubclass(value, Displayed | Placed):
            lines.append("   :inherited-members:")
        lines.append("")
    source[0] += "\n".join([*lines, ""])


_CODE = re.compile(r"(?<![`\w:])`([^`\n]+(?:\n *[^`\n]+)?)`(?![`_])")


def to_rst(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turn a docstring, in which `code` and drawings are as in Markdown, into what Sphinx reads."""
    if what == "data":  # a constant has no docstring but that of its type
        lines.clear()
    drawn = list(_drawn(lines))
    for line, (here, after) in enumerate(pairwise(drawn)):
        if after and not here:
            lines[line - 1] += ":"
    text = []
    for drawing, block in groupby(zip(lines, drawn, strict=True), key=itemgetter(1)):
        part = "\n".join(line for line, _ in block)
        text.append(part.replace("`", "") if drawing else _CODE.sub(_marked, part))
    lines[:] = "\n".join(text).split("\n")


def _drawn(lines: list[str]) -> Iterator[bool]:
    """Whether each line is to be shown as it stands: indented by 4, after one that ends in `:`."""
    last, base = "", -1  # the last line with text; the indent around a drawing, -1 outside
    for line, before in zip(lines, ["", *lines], strict=False):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            if base >= 0 and indent <= base:
                base = -1
            of_last = len(last) - len(last.lstrip())
            if base < 0 and not before and last.endswith(":") and indent >= of_last + 4:
                base = of_last
            last = line
        yield base >= 0


def _marked(found: re.Match[str]) -> str:
    """A link where the code in backticks is a public name, else just code."""
    code = " ".join(found[1].split())
    head, _, rest = code.removesuffix("()").removeprefix("schedir.").partition(".")
    if head in PLACES and not rest:
        return f":py:obj:`{code} <{PLACES[head]}>`"
    return f"``{code}``"


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("source-read", list_names)
    app.connect("autodoc-process-docstring", to_rst)
