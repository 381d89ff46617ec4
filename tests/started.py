"""Counts the processes that tests start, for the budget that `make test` has of them.

A command counts as one process, whatever it starts, and each forked rank as one.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import Config

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_started = 0


def count(more: int = 1) -> None:
    """Count processes that are started otherwise than by subprocess."""
    global _started
    _started += more


class Started:
    """Counts in this process. The controller of pytest-xdist adds what its workers have counted."""

    def __init__(self) -> None:
        start = subprocess.Popen.__init__

        def counted(process: Any, *arguments: Any, **options: Any) -> None:
            count()
            start(process, *arguments, **options)

        subprocess.Popen.__init__ = counted  # type: ignore[assignment, method-assign]

    @pytest.hookimpl(optionalhook=True)  # not without pytest-xdist
    def pytest_testnodedown(self, node: Any) -> None:
        count(node.workeroutput["started"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["started"] = _started
        elif _is_make_test(session.config) and _started > _planned():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: Config) -> None:
        if _is_make_test(config):
            too_many = ": TOO MANY" if _started > _planned() else ""
            terminalreporter.line(f"{_started} processes, planned {_planned()}{too_many}")


def _planned() -> int:
    planned: int = tomllib.loads(_PROJECT.read_text())["tool"]["schedir"]["suite"]["processes"]
    return planned


def _is_make_test(config: Config) -> bool:
    chosen = config.getoption("keyword") or config.getoption("markexpr")
    quick: bool = config.getoption("quick")
    return quick and not chosen and config.args_source == Config.ArgsSource.TESTPATHS
