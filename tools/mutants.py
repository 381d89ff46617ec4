"""Breaks the code in small ways, and counts which tests notice: the strength of the test suite.

    python tools/mutants.py cover FOLDER [--seed 1 2] [--count 60]  # takes as long as all tests
    python tools/mutants.py run FOLDER [--tests COMMIT] [--limit S] # continues where it ended
    python tools/mutants.py show FOLDER                            # the verdicts; the survivors

`cover` draws mutants of the commit that is checked out, spread over the packages by their lines:
another operator, another constant, the other branch, a call left out, each inside a function. It
runs all tests once in a copy that records when each mutant's expression runs. FOLDER then has the
mutants, the tests that run each of them, and the time of each test. `run` tries every mutant with
the tests that run it: one of each file first, quick ones first, tests on ranks last; first those of
`make test`, and, if none fails, those of `make test-all`; up to the first failure, for at most 120
s. A test that hangs for a minute has noticed the mutant. `--tests COMMIT` takes tests/ of another
commit; if a test has other cases there, all its cases are tried.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from at_commit import ROOT, checkout, environment
from attrs import asdict, frozen

HANG = 60  # seconds, of one test
ON_RANKS = re.compile(r"\[\d+ ranks?\b")  # in the name of a test that starts processes
FIRST = 30  # tests in the first of the rounds, each of which has ten times as many
KINDS = ("operator", "constant", "branch", "call")
OPERATORS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NOT_RUN = {"annotation", "returns", "decorator_list", "pattern", "type_params"}  # fields
PROBE = "schedir_mutant_probe"  # a module at the top of the copy whose tests tell what they run
PROBE_SOURCE = """\
import os

_told = set()


def hit(mutant):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (mutant, test) not in _told:
        _told.add((mutant, test))
        with open(os.path.join(FOLDER, str(os.getpid())), "a") as file:
            print(mutant, test, file=file)
"""


@frozen
class Mutant:
    """One expression of a module, and what stands there instead."""

    path: str
    line: int
    kind: str
    start: int  # bytes of the source
    end: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        """The module's source with the mutant in it. The lines stay where they are."""
        return self._replaced(source, self.new)

    def probed(self, source: bytes, number: int) -> bytes:
        """The module's source, which tells when the expression is run."""
        return self._replaced(source, f"(__import__({PROBE!r}).hit({number}) or ({self.old}))")

    def _replaced(self, source: bytes, text: str) -> bytes:
        if source[self.start : self.end].decode() != self.old:
            raise ValueError(f"{self.path}:{self.line}: {self.old!r} does not stand here any more")
        return source[: self.start] + text.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of a module, in the order of the syntax tree."""
    starts = [0]
    for row in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def mutant(node: ast.expr, kind: str, new: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        # As many lines as before, so that findings and tracebacks name the same ones.
        new += "\n" * (node.end_lineno - node.lineno)
        return Mutant(path, node.lineno, kind, start, end, source[start:end].decode(), f"({new})")

    for node in _run_nodes(ast.parse(source)):
        match node:
            case ast.Compare(ops=[op]) if type(op) in OPERATORS:
                yield mutant(node, "operator", _with_other(node, "ops", [OPERATORS[type(op)]()]))
            case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
                yield mutant(node, "operator", _with_other(node, "op", OPERATORS[type(op)]()))
            case ast.Constant(value=bool(value)):
                yield mutant(node, "constant", str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield mutant(node, "constant", str(value + 1))
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield mutant(test, "branch", f"not ({ast.unparse(test)})")
            case ast.Expr(value=ast.Call() as call):
                yield mutant(call, "call", "None")


def _with_other(node: ast.expr, field: str, value: object) -> str:
    return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), field: value}))


def _run_nodes(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """The nodes that run in a function; annotations, patterns and texts are none of them."""
    if inside:
        yield tree
    for name, value in ast.iter_fields(tree):
        if name in NOT_RUN or (name == "args" and isinstance(value, ast.arguments)):
            continue
        function = isinstance(tree, ast.FunctionDef | ast.Lambda) and name == "body"
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _run_nodes(child, inside or function)


def pick(sources: Mapping[str, bytes], seed: int, count: int) -> list[Mutant]:
    """Draw mutants: of each package as many as its lines are worth, of every kind alike."""
    draw = random.Random(seed)
    possible: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    lines: Counter[str] = Counter()
    for path, source in sorted(sources.items()):
        package = "/".join(Path(path).parts[:2]) if path.count("/") > 1 else Path(path).parts[0]
        lines[package] += source.count(b"\n")
        for mutant in mutants_of(path, source):
            possible[package][mutant.kind].append(mutant)
    picked: list[Mutant] = []
    for package, own in _shares(lines, count).items():
        kinds = draw.sample(KINDS, len(KINDS))
        for number in range(own):
            left = {(mutant.path, mutant.line) for mutant in picked}
            among = possible[package][kinds[number % len(KINDS)]] or [
                mutant for kind in KINDS for mutant in possible[package][kind]
            ]
            free = [mutant for mutant in among if (mutant.path, mutant.line) not in left]
            if free:
                picked.append(draw.choice(free))
    return _apart(sorted(picked, key=lambda mutant: (mutant.path, mutant.start)))


def _shares(lines: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide so many mutants among the packages: the largest remainders get what is left."""
    total = sum(lines.values())
    shares = {package: count * own // total for package, own in sorted(lines.items())}
    by_rest = sorted(shares, key=lambda package: count * lines[package] % total, reverse=True)
    for package in by_rest[: count - sum(shares.values())]:
        shares[package] += 1
    return shares


def _apart(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those that do not stand inside another, as probes of both would."""
    kept: list[Mutant] = []
    for mutant in mutants:
        if not kept or kept[-1].path != mutant.path or kept[-1].end <= mutant.start:
            kept.append(mutant)
    return kept


def sources_in(tree: Path) -> dict[str, bytes]:
    """The modules of schedir and of its schedules."""
    files = [*(tree / "schedir").rglob("*.py"), *(tree / "schedules").rglob("*.py")]
    return {
        str(file.relative_to(tree)): file.read_bytes() for file in files if not _linked(file, tree)
    }


def _linked(file: Path, tree: Path) -> bool:
    return any(folder.is_symlink() for folder in file.parents if folder.is_relative_to(tree))


def copy(commit: str, target: Path) -> None:
    """Lay a commit's files in a folder, as a repository of one commit: some tests ask git."""
    shutil.rmtree(target, ignore_errors=True)
    with checkout(commit) as tree:
        shutil.copytree(tree, target, symlinks=True)
    git = ["git", "-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
    for command in (["init"], ["add", "-A"], ["commit", "-m", "A copy"]):
        subprocess.run([*git, *command], cwd=target, check=True, stdout=subprocess.DEVNULL)


def cover(folder: Path, seeds: Sequence[int], count: int, options: Sequence[str]) -> None:
    """Draw mutants from each seed, and run all tests to see which of them run each mutant, and how
    long."""
    folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    tree, hits = folder / "probed", folder / "hits"
    copy(commit, tree)
    hits.mkdir(exist_ok=True)
    drawn = {m for seed in seeds for m in pick(sources_in(tree), seed, count)}
    mutants = _apart(sorted(drawn, key=lambda mutant: (mutant.path, mutant.start)))
    for number in reversed(range(len(mutants))):  # from each module's end, so that places hold
        file = tree / mutants[number].path
        file.write_bytes(mutants[number].probed(file.read_bytes(), number))
    probe = PROBE_SOURCE.replace("FOLDER", repr(str(hits.resolve())))
    (tree / f"{PROBE}.py").write_text(probe)
    record = {"commit": commit, "seeds": [*seeds], "mutants": [*map(asdict, mutants)]}
    (folder / "mutants.json").write_text(json.dumps(record, indent=1))
    report = (folder / "report.jsonl").resolve()
    report.unlink(missing_ok=True)
    (tree / "schedir_mutant_times.py").write_text(TIMES_SOURCE.replace("FILE", repr(str(report))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "schedir_mutant_times", *options]
    subprocess.run(command, cwd=tree, env=environment(tree), check=False)


TIMES_SOURCE = """\
import json
import os


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and "SCHEDIR_TEST_REPORTS" not in os.environ:
        line = {"test": report.nodeid, "seconds": report.duration, "outcome": report.outcome}
        line["when"] = report.when
        with open(FILE, "a") as file:
            print(json.dumps(line), file=file)
"""


def times_of(folder: Path) -> dict[str, float]:
    """How long each test took, all its phases together."""
    times: Counter[str] = Counter()
    for line in (folder / "report.jsonl").read_text().splitlines():
        read = json.loads(line)
        times[read["test"]] += read["seconds"]
    return dict(times)


def hits_of(folder: Path) -> dict[int, set[str]]:
    """The tests that run each mutant; an empty name is an import, outside of any test."""
    found: dict[int, set[str]] = defaultdict(set)
    for file in (folder / "hits").iterdir():
        for line in file.read_text().splitlines():
            mutant, _, test = line.partition(" ")
            found[int(mutant)].add(test)
    return found


def in_turns(tests: Iterable[str], times: Mapping[str, float]) -> list[str]:
    """The tests in the order in which they are tried: the quickest of each file, then the next."""
    by_file: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (times.get(test, 0.0), test)):
        by_file[ON_RANKS.search(test) is not None, test.partition("::")[0]].append(test)
    turns = [
        (on_ranks, turn, times.get(test, 0.0), test)
        for (on_ranks, _), own in by_file.items()
        for turn, test in enumerate(own)
    ]
    return [test for *_, test in sorted(turns)]


def try_tests(
    tree: Path, tests: Sequence[str], limit: float, options: Sequence[str]
) -> tuple[str, float]:
    """The first test that fails, if any does in the time that there is; and how long it took."""
    start, at, size = time.monotonic(), 0, FIRST
    names = tree.parent / "tests.txt"
    while at < len(tests) and (left := limit - (time.monotonic() - start)) > 0:
        own = sorted(tests[at : at + size], key=lambda test: test.partition("::")[0])
        names.write_text("\n".join(own))
        always = ["-x", "-q", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider"]
        always += [f"--timeout={HANG}", "--timeout-method=thread"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *always, *options, f"@{names.resolve()}"],
            cwd=tree,
            env=environment(tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.communicate()
            break
        if "ERROR: not found" in printed:
            raise RuntimeError(printed[-1000:])
        if process.returncode:
            failed = [row for row in printed.splitlines() if row.startswith(("FAILED", "ERROR"))]
            return (failed or printed.splitlines()[-1:])[0][:160], time.monotonic() - start
        at, size = at + size, size * 10
    return "", time.monotonic() - start


def names_in(tree: Path, *options: str) -> set[str]:
    """The tests that pytest finds with these options."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *options]
    found = subprocess.run(
        command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, text=True, check=True
    )
    return {row for row in found.stdout.splitlines() if "::" in row}


def now_called(tests: Iterable[str], existing: Iterable[str]) -> set[str]:
    """Of tests that had these names, those that there are: all cases where one has another name."""
    by_function: dict[str, set[str]] = defaultdict(set)
    for test in existing:
        by_function[test.partition("[")[0]].add(test)
    found = set()
    for test in tests:
        cases = by_function[test.partition("[")[0]]
        found |= {test} if test in cases else cases
    return found


def run(folder: Path, commit: str | None, limit: float) -> None:
    """Try the tests on each mutant that has no verdict yet."""
    record = json.loads((folder / "mutants.json").read_text())
    tree = folder / "mutated"
    copy(record["commit"], tree)
    if commit:
        with checkout(commit) as other:
            for part in ("tests", "examples"):  # the tests train plainly as the examples do
                shutil.rmtree(tree / part)
                shutil.copytree(other / part, tree / part)
            shutil.copy(other / "pyproject.toml", tree)
    times, hits = times_of(folder), hits_of(folder)
    existing, quick = names_in(tree), names_in(tree, "--quick")
    verdicts = folder / "verdicts.jsonl"
    done = {row["mutant"] for row in _rows(verdicts)}
    for number, mutant in enumerate(Mutant(**fields) for fields in record["mutants"]):
        if number in done:
            continue
        tests = hits.get(number, set())
        among = now_called(times if tests == {""} else tests - {""}, existing)
        file = tree / mutant.path
        source = file.read_bytes()
        file.write_bytes(mutant.applied(source))
        row: dict[str, object] = {"mutant": number, "tests": len(among), "quick": "", "all": ""}
        try:
            first, rest = in_turns(among & quick, times), in_turns(among - quick, times)
            row["quick"], row["seconds"] = try_tests(tree, first, limit, ["--quick"])
            if not row["quick"]:  # those of before draw more examples now
                row["all"], row["seconds_all"] = try_tests(tree, [*rest, *first], limit, [])
        finally:
            file.write_bytes(source)
        with verdicts.open("a") as out:
            print(json.dumps(row), file=out)
        print(number, mutant.path, mutant.line, row, flush=True)


def _rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def show(folder: Path) -> None:
    """Print how many mutants are noticed by which tests, and those that are not."""
    mutants = [
        Mutant(**fields) for fields in json.loads((folder / "mutants.json").read_text())["mutants"]
    ]
    rows = {int(str(row["mutant"])): row for row in _rows(folder / "verdicts.jsonl")}
    quick = [number for number, row in rows.items() if row["quick"]]
    rest = [number for number, row in rows.items() if row["all"]]
    print(f"{len(mutants)} mutants, {len(rows)} tried")
    print(f"{len(quick)} noticed by make test, {len(quick) + len(rest)} by make test-all")
    for number, row in sorted(rows.items()):
        if not row["quick"]:
            mutant = mutants[number]
            by = row["all"] or f"not noticed by {row['tests']} tests"
            print(f"{mutant.path}:{mutant.line}: {mutant.old!r} → {mutant.new!r}: {by}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("cover", "run", "show"))
    parser.add_argument("folder", type=Path, help="where mutants, times and verdicts are kept")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--count", type=int, default=60, help="how many mutants of each seed")
    parser.add_argument("--tests", metavar="COMMIT", help="whose tests run")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds (default: 120)")
    args, options = parser.parse_known_args()
    if args.command == "cover":
        cover(args.folder, args.seed, args.count, options or ["-n", "2"])
    elif args.command == "run":
        run(args.folder, args.tests, args.limit)
    else:
        show(args.folder)


if __name__ == "__main__":
    main()
