"""What is said to ProcessGroupNCCL when a group is made; this build of torch may have none."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schedir.runtime.processes.groups import (
    Asked,
    Group,
    Groups,
    NcclGroup,
    end,
    nccl_backend,
    shares,
)

STORE = dist.HashStore()  # type: ignore[attr-defined]  # public, unlisted


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


class Backend:
    """Notes what it is made with, and what becomes of it."""

    Options = Options

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def called(*_: object) -> str:
            self.calls.append(name)
            return f"the work of {name}"

        return called


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)


def made(max_ctas: int | None = None, seconds: int = 1800) -> Any:
    timeout = timedelta(seconds=seconds)
    return nccl_backend(STORE, 1, (2, 5), "schedir/0/channel/2-5", timeout, max_ctas)


def asked(posted: list[Any]) -> NcclGroup:
    return NcclGroup(Asked("sum", (0, 1)), None, posted)


def test_flight_recorders_tell_processes_and_groups_apart() -> None:
    backend = made()
    assert (backend.store, backend.rank, backend.size) == (STORE, 1, 2)
    assert backend.options.group_name == "schedir/0/channel/2-5"
    assert backend.options.global_ranks_in_group == [2, 5]
    assert backend.options.is_high_priority_stream


def test_the_watchdog_comes_after_the_executor() -> None:
    assert made(seconds=1800).options._timeout == timedelta(seconds=3600)
    assert made(seconds=40).options._timeout == timedelta(minutes=10)


def blocks(max_ctas: int) -> int:
    """How many multiprocessors a point-to-point kernel takes: it rounds up to a power of two."""
    return 1 << (max_ctas - 1).bit_length()


def test_kernels_of_all_communicators_fit_beside_compute() -> None:
    for processors in (1, 16, 108, 132):
        for transfers in range(1, 40):
            for sums in range(8):
                share = shares(processors, transfers, sums)
                taken = transfers * blocks(share.transfer) + sums * share.sum
                assert taken <= processors / 2 or 1 in (share.transfer, share.sum)
                assert 1 <= share.transfer <= 8
    assert made(8).options.config.max_ctas == 8
    assert not hasattr(made().options.config, "max_ctas")


def test_sums_are_not_held_to_the_share_of_transfers() -> None:
    found = [shares(132, transfers, sums) for transfers, sums in ((4, 0), (4, 3), (8, 2))]
    assert [(share.transfer, share.sum) for share in found] == [(8, 34), (8, 11), (4, 17)]


def test_a_build_without_settings_of_communicators_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Older(Options):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    monkeypatch.setattr(Backend, "Options", Older)
    assert not hasattr(made(6).options, "config")


def test_communicators_end_when_done_or_at_once() -> None:
    for abort, call in ((False, "shutdown"), (True, "abort")):
        ended = [made() for _ in range(3)]
        end(ended, abort=abort)
        assert [backend.calls for backend in ended] == [[call]] * 3
    end([], abort=True)


def test_all_are_aborted_at_the_same_time() -> None:
    """Each ends its own kernels, and then waits for those of all."""
    ended = Barrier(3)

    def aborted() -> None:
        ended.wait(timeout=100)
        raise RuntimeError("it has failed already")

    failed = [SimpleNamespace(abort=aborted) for _ in range(3)]
    end(failed, abort=True)
    assert not ended.broken


def test_an_abort_that_never_returns_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a thread of NCCL's that waits for the network; what it ends stays there."""
    monkeypatch.setattr("schedir.runtime.processes.groups.ABORT", 0.1)
    never, ended = Event(), Event()
    hanging = [made(), SimpleNamespace(abort=ended.set)]
    hanging[0].abort = never.wait
    watch = weakref.ref(hanging[0])
    try:
        end(hanging, abort=True)
        assert ended.is_set()
        hanging.clear()
        gc.collect()
        assert watch() is not None  # its destructor would wait as well
        assert all(thread.daemon for thread in threading.enumerate() if "_abort" in thread.name)
    finally:
        never.set()


def test_what_was_aborted_is_not_freed() -> None:
    """Its destructor would wait for the watchdog, for up to a minute."""
    aborted = [made()]
    watch = weakref.ref(aborted[0])
    end(aborted, abort=True)
    aborted.clear()
    gc.collect()
    assert watch() is not None


def test_connections_between_hosts_end_before_anything_is_aborted() -> None:
    groups = Groups((0,), timedelta(seconds=1))
    hosts, seen = Group("gloo"), []
    group = asked([])
    group.backend = SimpleNamespace(abort=lambda: seen.append(hosts.backend))
    groups._groups += [hosts, group]
    groups.close(abort=True)
    assert seen == [None]


def test_a_sum_is_posted_as_a_transfer_is() -> None:
    """By itself, its work would keep the gradients for as long as somebody looks at it."""
    posted: list[Any] = []
    group = asked(posted)
    group.backend = backend = made()
    group.allreduce([torch.zeros(3)])
    assert backend.calls == ["_start_coalescing", "allreduce", "_end_coalescing"]
    assert posted == ["the work of _end_coalescing"]
