"""What all tests share."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.command_line import run  # noqa: F401
from tests.importing import importable  # noqa: F401
from tests.runtime.forked import pytest_runtestloop  # noqa: F401
from tests.runtime.on_ranks import (  # noqa: F401
    check_names,
    generate_on_ranks,
    pytest_pyfunc_call,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    rank,
)
from tests.started import Started
from tests.sweeps import QUICK
from tests.warm import commands

# How long an example takes is no test: machines are noisy.
settings.register_profile("patient", deadline=None)
settings.register_profile(QUICK, deadline=None, max_examples=10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is printed as what is expected"
    )
    parser.addoption(
        "--quick", action="store_true", help="leave out long cases, and draw fewer examples"
    )
    parser.addoption(
        "--part", default="0/1", metavar="I/N", help="run one case in N: those of part I, from 0"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A pipe is as wide as COLUMNS says, which readline sets for the processes that tests start.
    for size in ("COLUMNS", "LINES"):
        os.environ[size] = ""
        del os.environ[size]
    settings.load_profile(QUICK if config.getoption("quick") else "patient")
    config.pluginmanager.register(Started())
    if config.getoption("numprocesses", None):
        commands()  # one server for all workers, ready by the time that they have collected


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Make no cases that `--quick` leaves out: there are more of them than of the others."""
    generate_on_ranks(metafunc)
    yield
    if metafunc.config.getoption("quick"):
        cases = metafunc._calls
        left = [case for case in cases if not any(mark.name == "long" for mark in case.marks)]
        cases[:] = left or cases[:1]  # without any there would be a test without parameters


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for. A case is in the same part in every run."""
    check_names(items)
    number, parts = map(int, config.getoption("part").split("/"))
    chosen = [
        item
        for item in items
        if not (config.getoption("quick") and item.get_closest_marker("long"))
        and zlib.crc32(item.nodeid.encode()) % parts == number % parts
    ]
    kept = {*chosen}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


class Launches(LoadScopeScheduling):  # type: ignore[misc]
    """Has one worker of pytest-xdist run all tests that share a launch, and any worker the others.

    pytest-xdist's own groups stand in the names of tests, which pytest 9.2 doesn't let it change.
    """

    def _split_scope(self, nodeid: str) -> str:
        found = re.search(r"\[(\d+ ranks?)\b", nodeid)
        if found and self.config.getoption("quick"):
            return "ranks"  # which are forked from one process
        return found[1] if found else nodeid


@pytest.hookimpl(optionalhook=True)  # not where tests run on ranks, without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Launches:
    return Launches(config, log)
