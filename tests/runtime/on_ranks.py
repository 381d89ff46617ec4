"""`@on_ranks(2)`: a plain test that runs on two ranks, each a process of its own.

    pytest                       rank 0                   rank 1
    test_a[2 ranks] ─ torchrun ► pytest: test_a, test_b   pytest: test_a, test_b
                                     │ a line per test        │ a line per test
    test_a[2 ranks] ◄────────────────┴────────────────────────┘
    test_b[2 ranks] ◄── both pass if every rank says so; else they show what each rank says

Starting processes takes seconds, so all tests on as many ranks share a launch, which the first of
them makes: by torchrun, or, in `make test`, by forking what has imported all already, as
`forked.py` does. In it each test has a process group of its own: where one fails on some rank, its
connections end, so the other ranks notice, and the next test starts afresh. A rank that dies, gets
no process group, or hangs in a test for `TEST_LIMIT` seconds, ends the launch: the test that it has
not finished fails with what it has printed, and those that it has not reached are launched again.
Fixtures are set up in all these processes, but the test itself runs on the ranks alone.
`--durations` shows how long the slowest rank took, and the start of a launch at its first test.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch.distributed.rendezvous import rendezvous

from tests.runtime.forked import Stem, leave
from tests.runtime.launch import Launched, torchrun

TEST_LIMIT = 150  # seconds, of one test on one rank
WAIT_LIMIT = 120  # of waiting for another rank, so that one that waits in vain says so itself
LAUNCH_LIMIT = 600  # of all that are launched together
_REPORTS = "SCHEDIR_TEST_REPORTS"  # the folder of the ranks' reports: set on the ranks alone
_TAIL = 6000  # characters of what a rank has printed


def on_ranks(*ranks: int) -> pytest.MarkDecorator:
    """Run the test on this number of ranks; of several numbers, once on each.

    A test without numbers here has `ranks` as its first parameter, with `name_of` for ids.
    """
    return pytest.mark.on_ranks(*ranks)


def name_of(value: object) -> str:
    """A parameter in the name of a test; a number of ranks is found by it in there."""
    return str(value) if not isinstance(value, int) else f"{value} rank{'s' * (value > 1)}"


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """The rank of this process, in a process group that the test has for itself."""
    if _REPORTS not in os.environ:
        yield -1  # nobody reads it: the test runs on the ranks
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store, number, ranks = next(rendezvous("env://"))
    own = dist.PrefixStore(request.node.nodeid, store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=WAIT_LIMIT)
    try:
        dist.init_process_group("gloo", store=own, rank=number, world_size=ranks, timeout=limit)
        dist.barrier()  # a rank that is done at once must not leave while others still connect
    except RuntimeError as error:
        pytest.exit(f"rank {number} has no process group: {error}", returncode=1)
    yield number
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # it keeps meshes whose groups have ended


def generate_on_ranks(metafunc: pytest.Metafunc) -> None:
    """Make a case of a test for each number of ranks."""
    marker = metafunc.definition.get_closest_marker("on_ranks")
    if marker is not None and marker.args:
        metafunc.fixturenames.append("ranks")
        metafunc.parametrize("ranks", marker.args, ids=name_of)


def check_names(items: Sequence[pytest.Item]) -> None:
    """Take away the limit of a test here: it has one on the ranks, and the first of a launch waits
    for all."""
    for item in items:
        if (ranks := _ranks_of(item)) and _REPORTS not in os.environ:
            if f"[{name_of(ranks)}" not in item.nodeid:  # two workers would launch it
                raise pytest.UsageError(f"{item.nodeid}: the parameter ranks needs ids=name_of")
            item.add_marker(pytest.mark.timeout(0), append=False)


def _ranks_of(item: pytest.Item) -> int:
    """The ranks that a test runs on; 0 if it runs here."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("on_ranks"):
        ranks: Any = item.callspec.params["ranks"]
        return int(ranks)
    return 0


@frozen
class _Ended:
    """How a test has ended, on one rank or on all of them."""

    failure: str  # empty if it has passed
    seconds: float


_ENDED = pytest.StashKey[dict[int, dict[str, _Ended]]]()
"""By the number of ranks, by test: what the ranks say of it."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In place of the test, look up what the ranks say of it."""
    ranks = _ranks_of(pyfuncitem)
    if not ranks or _REPORTS in os.environ:
        return None
    session = pyfuncitem.session
    launched = session.stash.setdefault(_ENDED, {})
    if ranks not in launched:
        tests = [item.nodeid for item in session.items if _ranks_of(item) == ranks]
        launched[ranks] = _run(ranks, tests, session)
    if failure := launched[ranks][pyfuncitem.nodeid].failure:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report how long a test took on the ranks, not how long looking it up took."""
    report = yield
    launched = item.session.stash.get(_ENDED, {}).get(_ranks_of(item), {})
    if call.when == "call" and item.nodeid in launched:
        report.duration = launched[item.nodeid].seconds
    return report


def _run(ranks: int, tests: Sequence[str], session: pytest.Session) -> dict[str, _Ended]:
    """How each test has ended on all ranks."""
    ended: dict[str, _Ended] = {}
    while left := [test for test in tests if test not in ended]:
        start = time.perf_counter()
        launch = _launch(ranks, left, session)
        whole = [test for test in left if all(test in reports for reports in launch.reports)]
        # The first that some rank has not ended is what has ended the launch.
        own = {test: launch.ended(test) for test in left[: len(whole) + 1]}
        rest = time.perf_counter() - start - sum(each.seconds for each in own.values())
        own[left[0]] = evolve(own[left[0]], seconds=own[left[0]].seconds + rest)
        ended |= own
    return ended


@frozen
class _Launch:
    """What became of the tests that were launched together."""

    reports: Sequence[dict[str, _Ended]]  # of each rank, of the tests that have ended
    result: Launched

    def ended(self, test: str) -> _Ended:
        """How the test has ended on all ranks."""
        found = []
        for rank, reports in enumerate(self.reports):
            printed = (self.result.outputs[rank] + self.result.errors[rank])[-_TAIL:]
            unended = _Ended(f"has not ended this test; it has printed:\n{printed}", 0)
            if failure := reports.get(test, unended).failure:
                found.append(f"rank {rank} of {len(self.reports)}: {failure}")
        if not all(test in reports for reports in self.reports):
            found.append(self.result.summary[self.result.summary.find("Root Cause") :])
        took = [reports[test].seconds for reports in self.reports if test in reports]
        return _Ended("\n".join(found), max(took, default=0.0))


_OPTIONS = ["-q", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider"]
_OPTIONS += [f"--timeout={TEST_LIMIT}", "--timeout-method=thread"]
_STEM = pytest.StashKey[Stem]()


def _launch(ranks: int, tests: Sequence[str], session: pytest.Session) -> _Launch:
    with tempfile.TemporaryDirectory() as folder:
        own = {_REPORTS: folder, "PYTEST_ADDOPTS": ""}
        if session.config.getoption("quick"):
            order = {"tests": tests, "folder": folder, "environment": own}
            result = _stem_of(session).launch(ranks, order, LAUNCH_LIMIT)
        else:
            command = ["-m", "pytest", *_OPTIONS, *tests]
            root = session.config.rootpath
            result = torchrun(ranks, *command, timeout=LAUNCH_LIMIT, cwd=root, environment=own)
        return _Launch([_read(Path(folder, str(rank))) for rank in range(ranks)], result)


def _stem_of(session: pytest.Session) -> Stem:
    """The process that forks the ranks of this session: a new one where the last has ended."""
    if _STEM not in session.stash or session.stash[_STEM].ended:
        tests = [item.nodeid for item in session.items if _ranks_of(item)]
        session.stash[_STEM] = Stem(["--quick", *_OPTIONS], tests)
        session.config.add_cleanup(session.stash[_STEM].close)
    return session.stash[_STEM]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """On a rank: a script that made a process group, for a mesh, leaves it to the process's end."""
    if _REPORTS in os.environ and dist.is_initialized():
        dist.destroy_process_group()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On a rank: write how a phase of a test has ended."""
    if folder := os.environ.get(_REPORTS):
        sections = [f"{title}\n{text}" for title, text in report.sections]
        failure = "\n".join((report.longreprtext, *sections)) if report.failed else ""
        line = {"test": report.nodeid, "phase": report.when, "seconds": report.duration}
        with Path(folder, os.environ["RANK"]).open("a") as file:
            print(json.dumps({**line, "failure": failure}), file=file)


def _read(file: Path) -> dict[str, _Ended]:
    """How each test has ended on a rank."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    phases: dict[str, list[Any]] = {}
    for line in lines:
        phases.setdefault(line["test"], []).append(line)
    return {
        test: _Ended("".join(each["failure"] for each in of), sum(each["seconds"] for each in of))
        for test, of in phases.items()
        if of[-1]["phase"] == "teardown"
    }


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A rank on which tests have failed has done its work; torchrun would end the others."""
    if _REPORTS in os.environ:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK
        leave(int(session.exitstatus))
