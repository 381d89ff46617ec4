"""What all tests share."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.runtime.on_ranks import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    rank,
)

# How long an example takes is no test: machines are noisy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is printed as what is expected"
    )


class Launches(LoadScopeScheduling):  # type: ignore[misc]
    """Has one worker of pytest-xdist run all tests that share a launch, and any worker the others.

    pytest-xdist's own groups stand in the names of tests, which pytest 9.2 doesn't let it change.
    """

    def _split_scope(self, nodeid: str) -> str:
        found = re.search(r"\[(\d+ ranks?)\b", nodeid)
        return found[1] if found else nodeid


@pytest.hookimpl(optionalhook=True)  # not where tests run on ranks, without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Launches:
    return Launches(config, log)
