"""Times this tree and another commit in pairs, to see what a change costs or gains.

    python tools/bench_drift.py COMMIT [--quick] [--only NAME ...]

Both code bases are copied to a temporary folder and measured in separate processes, in turns, each
first in every other pair. The tool prints the medians, and the median and quartiles of the pairs'
ratios, now ÷ then. A figure that one code base can't give is "-", and stderr says why. Times are
processor times, because other programs disturb them least; times of steps are clock times. NAME:

    cold      `schedir check 1f1b` as a command, with bytecode
    bare      the same without bytecode: the files have just been copied
    import    `import schedir`, with bytecode
    3k        3,000 actions, interleaved 1F1B with 2 chunks on 8 ranks: build, check, simulate
    391k      the same on 64 ranks; and torch's time ÷ ours, if torch is installed
    988k      988,000 actions of 1F1B on 64 ranks: time and memory of a process's first cycle
    wrong     the check of lists with thousands of faults ÷ the check of the right list
    step      1F1B's steps of a tiny model, on 2 ranks with gloo
    10M       as 988k, with ten million actions of interleaved 1F1B; only if you name it
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
from at_commit import ROOT, checkout, environment
from in_processes import ProcessError, run, torchrun

Figures: TypeAlias = dict[str, float]

TOOLS = ROOT / "tools"
LIMIT = 600  # seconds for one process
CHECK = "import sys; from schedir.cli import main; sys.exit(main(['check', '1f1b']))"


@attrs.frozen
class CodeBase:
    """A copy of a code base, and one in which no bytecode is ever written."""

    name: str
    tree: Path
    bare: Path


def copied(name: str, source: Path, folder: Path) -> CodeBase:
    """The code base with no bytecode yet."""
    found = CodeBase(name, folder / name, folder / f"{name}-bare")
    for tree in (found.tree, found.bare):
        for part in ("schedir", "schedules"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / part, tree / part, symlinks=True, ignore=ignored)
    return found


# What is measured: each takes a code base and the number of the pair.


def command(what: str, code: str, base: CodeBase, pair: int, bare: bool = False) -> Figures:
    """How long a Python process keeps the processor busy, from its start to its end."""
    env = environment(base.bare if bare else base.tree)
    env["PYTHONDONTWRITEBYTECODE"] = "1" if bare else ""
    before = of_children()
    run([sys.executable, "-P", "-c", code], 60, env)  # -P: schedir may lie in this folder
    return {what: of_children() - before}


def of_children() -> float:
    """The milliseconds of processor that ended children have had."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (used.ru_utime + used.ru_stime)


def figures(what: str, command: Sequence[str], base: CodeBase, pair: int) -> Figures:
    """The figures that a process prints."""
    found = {}
    for line in run(command, LIMIT, environment(base.tree)).splitlines():
        name, value = json.loads(line)
        if name is None:
            complain(base, what, value)
        else:
            found[f"{what}: {name}"] = value
    return found


def static(script: str) -> list[str]:
    return [sys.executable, str(TOOLS / "drift_run.py"), script]


def beside_torch(what: str, base: CodeBase, pair: int) -> Figures:
    found = figures(what, static("391k"), base, pair)
    ours = found.get(f"{what}: in all, ms")
    if ours is not None and find_spec("torch"):
        found[f"{what}: torch ÷ schedir"] = torch_ms(pair) / ours
    return found


@cache
def torch_ms(pair: int) -> float:
    """What torch takes for the same: once in a pair, for neither code base has a part in it."""
    name, value = json.loads(run(static("torch"), LIMIT, environment(ROOT)))
    if name is None:
        raise ProcessError(value)
    return float(value)


@attrs.frozen
class Group:
    """What is measured together, and in how many pairs: of a full run, and of a quick one. Where it
    is `warm`, a first run of each is discarded: it writes bytecode, and fills the disk's cache."""

    measure: Callable[[CodeBase, int], Figures]
    pairs: tuple[int, int]
    warm: bool = False


COLD = "schedir check 1f1b"
GROUPS = {
    "cold": Group(partial(command, f"{COLD}, ms", CHECK), (30, 6), warm=True),
    "bare": Group(
        partial(command, f"{COLD}, no bytecode, ms", CHECK, bare=True), (30, 6), warm=True
    ),
    "import": Group(partial(command, "import schedir, ms", "import schedir"), (30, 6), warm=True),
    "3k": Group(partial(figures, "3k actions", static("3k")), (7, 2)),
    "391k": Group(partial(beside_torch, "391k actions"), (7, 2)),
    "988k": Group(partial(figures, "988k actions", static("988k")), (5, 2)),
    "wrong": Group(partial(figures, "a wrong list ÷ the right one", static("wrong")), (3, 1)),
    "step": Group(
        partial(figures, "on 2 ranks", torchrun(2, TOOLS / "step_run.py")), (7, 2), warm=True
    ),
    "10M": Group(partial(figures, "10M actions", static("10M")), (2, 1)),
}


# In pairs.


@cache  # once
def complain(base: CodeBase, what: str, why: str) -> None:
    print(f"{base.name}: {what}: {why}", file=sys.stderr, flush=True)


def in_pairs(name: str, group: Group, pairs: int, bases: Sequence[CodeBase]) -> Iterator[str]:
    """The rows of a group."""
    found: dict[str, list[Figures]] = {base.name: [] for base in bases}
    able = list(bases)
    for pair in range(-group.warm, pairs):
        for base in able[:: 1 if pair % 2 else -1]:
            try:
                measured = group.measure(base, pair)
            except ProcessError as error:
                complain(base, name, str(error))
                able = [each for each in able if each is not base]
                continue
            if pair >= 0:
                found[base.name].append(measured)
    then, now = found.values()
    for figure in {key: None for each in (*now, *then) for key in each} or (name,):
        yield row(figure, *([each.get(figure, np.nan) for each in side] for side in (then, now)))


def row(figure: str, then: list[float], now: list[float]) -> str:
    """A figure of both sides, NaN where there is none, and the ratios of the pairs."""
    both = min(len(then), len(now))
    ratios = np.divide(now[:both], then[:both])
    ratios = ratios[~np.isnan(ratios)]
    spread = "-"
    if len(ratios):
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        spread = f"{median:.3f} ({low:.3f} to {high:.3f})"
    return f"| {figure} | {middle(then)} | {middle(now)} | {spread} | {len(ratios)} |"


def middle(values: list[float]) -> str:
    known = [value for value in values if value == value]
    return f"{np.median(known):,.4g}" if known else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--quick", action="store_true", help="few pairs")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="some of the figures")
    args = parser.parse_args()
    print("| | then | now | now ÷ then | pairs |\n| --- | --- | --- | --- | --- |", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="schedir-") as folder,
        checkout(args.commit) as tree,
    ):
        bases = copied("then", tree, Path(folder)), copied("now", ROOT, Path(folder))
        for name in args.only or [name for name in GROUPS if name != "10M"]:
            group = GROUPS[name]
            for line in in_pairs(name, group, group.pairs[args.quick], bases):
                print(line, flush=True)


if __name__ == "__main__":
    main()
