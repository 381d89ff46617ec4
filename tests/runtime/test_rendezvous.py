"""Processes that do not find each other, perhaps on several hosts, are told what to set."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from schedir.errors import ExecutionError
from schedir.runtime.processes import noticeboard

SET = "on each host set GLOO_SOCKET_IFNAME to the name of a network interface"


@pytest.fixture(autouse=True)
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of two, and the other one never comes."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, unlisted
    monkeypatch.setattr(noticeboard, "rendezvous", lambda url, timeout: iter([(store, 0, 2)]))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def said() -> str:
    """What is said after a second of waiting."""
    with pytest.raises(ExecutionError) as found:
        noticeboard.init_process_group(timedelta(seconds=1))
    assert not dist.is_initialized()
    assert found.value.cause is not None
    return str(found.value)


@pytest.mark.parametrize("here", [None, "1", "2"])
def test_on_several_hosts_the_interface_is_named(
    monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    found = said()
    assert found.startswith("making the executor: not all processes have come together: ")
    assert (SET in found) is (here != "2")
    missing = "missing: process 1; make the executor on all of them"
    assert missing in found or here != "2"


def test_nor_where_no_time_was_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unsupported gloo device")

    monkeypatch.setattr(noticeboard, "hello", lambda *_: [])
    monkeypatch.setattr(dist, "init_process_group", refuse)
    assert said().endswith("unsupported gloo device")
