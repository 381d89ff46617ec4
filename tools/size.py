"""Counts the modules, tokens and lines of each package of schedir.

    python tools/size.py            # of this tree
    python tools/size.py COMMIT     # beside a commit, with the ratio

Only tokens of code count: comments, docstrings and layout are free.
`core` is ir, passes, checker, simulator and library; `all` is schedir without its schedules.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from at_commit import ROOT, checkout

CORE = ("ir", "passes", "checker", "simulator", "library")
TOTALS = {"core": CORE, "core, graph": (*CORE, "graph")}
LAST = (*TOTALS, "all", "schedules")
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}

Size: TypeAlias = tuple[int, int, int]
"""Modules, tokens, lines."""


def tokens(source: bytes) -> int:
    """The tokens of code in a module. A string that is a statement of its own is a docstring."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        each.type not in LAYOUT
        and not (each.type == tokenize.STRING and each.start[0] in docstrings)
        for each in tokenize.tokenize(io.BytesIO(source).readline)
    )


def added(sizes: Iterable[Size]) -> Size:
    modules, tokens, lines = (sum(column) for column in zip((0, 0, 0), *sizes, strict=True))
    return modules, tokens, lines


def sizes(tree: Path) -> dict[str, Size]:
    """The sizes of the packages, of several together, of all, and of the schedules."""
    each: dict[str, list[Size]] = {}
    for top in ("schedir", "schedules"):
        for folder, _, files in os.walk(tree / top):  # schedir/schedules is a link
            # The modules of schedir that are in no package are a row of their own.
            package = "/".join(Path(folder).relative_to(tree).parts[:2])
            for source in (Path(folder, f).read_bytes() for f in files if f.endswith(".py")):
                each.setdefault(package, []).append((1, tokens(source), source.count(b"\n")))
    found = {package.removeprefix("schedir/"): added(own) for package, own in sorted(each.items())}
    schedules = found.pop("schedules")
    return {
        **found,
        **{
            name: added(found[package] for package in of if package in found)
            for name, of in TOTALS.items()
        },
        "all": added(found.values()),
        "schedules": schedules,
    }


def table(now: dict[str, Size], then: dict[str, Size] | None) -> str:
    """The sizes; with those of then before them, and the ratio behind."""
    nothing, cell = (0, 0, 0), 9 if then is None else 24
    rows = [" " * 12 + "".join(f"{head:>{cell}}" for head in ("modules", "tokens", "lines"))]
    names = {*now, *(then or ())}
    for name in sorted(names, key=lambda name: (name in LAST and LAST.index(name) + 1, name)):
        row = f"{name:12}"
        for own, before in zip(
            now.get(name, nothing), (then or now).get(name, nothing), strict=True
        ):
            ratio = f"{own / before:.2f}" if before else "new"
            row += f"{own:9,}" if then is None else f"{before:9,}{own:9,}{ratio:>6}"
        rows.append(row)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="what to compare with")
    args = parser.parse_args()
    then = None
    if args.commit:
        with checkout(args.commit) as tree:
            then = sizes(tree)
    print(table(sizes(ROOT), then))


if __name__ == "__main__":
    main()
