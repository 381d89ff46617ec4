"""All of the path over NCCL but NCCL itself, which `nccl_over_gloo` stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from schedir.runtime.accelerator import Accelerator, Host
from schedir.runtime.processes import groups as module
from schedir.runtime.processes.control import Control
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Groups, Post
from schedir.runtime.transports import GlooTransport, NcclTransport
from tests.built_in import NAMES
from tests.runtime.kit import (
    MSE,
    everyone,
    linear_stages,
    message_of,
    random_batch,
    random_batches,
    sgd,
    train_on_rank,
)
from tests.runtime.lists import megatron
from tests.runtime.nccl_over_gloo import NcclOverGloo, Work, connect_all, nccl_over_gloo
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import long, sweep


def executor_on(
    rank: int, stage: nn.Module | None = None, microbatches: int = 3, timeout: float = 60
) -> Executor:
    schedule = schedir.build("1f1b", ranks=2, microbatches=microbatches)
    return Executor(schedule, {rank: stage or nn.Linear(4, 4)}, MSE, sgd, timeout=timeout)


@on_ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_training_over_nccl(name: str, rank: int) -> None:
    schedule = schedir.build(name, ranks=2, microbatches=4)
    stage = {s: nn.Linear(4, 4) for s in schedule.stages_of(rank)}
    with nccl_over_gloo() as log, Executor(schedule, stage, MSE, sgd) as executor:
        assert executor.schedule == schedir.advance_receives(schedule, "rank")
        made = [*log]
        for x, y in random_batches(3):
            executor.step(x, target=y)
        executor.evaluate(x, target=y)
        assert executor.schedule == schedir.advance_receives(schedule, "rank", 10**6)
        assert log == made
    assert made


class Widened(nn.Linear):
    """Sends numbers of many types beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y = super().forward(x)
        whole = (100 * x.detach()).abs()
        others = [whole.to(dtype) for dtype in (torch.int16, torch.uint16, torch.bool)]
        return y, torch.complex(y, 2 * y), *others, whole.sum().to(torch.complex128)


class Narrowed(nn.Linear):
    def forward(self, x: Tensor, z: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        mixed = super().forward(x + z.real - 3 * z.imag)
        return mixed * sum(other.to(torch.float32).mean() for other in others[:3]) + others[3].real


@on_ranks(2)
def test_what_nccl_does_not_take_travels_as_bytes(rank: int) -> None:
    torch.manual_seed(3)
    with nccl_over_gloo():
        train_on_rank(rank, [Widened(4, 4), Narrowed(4, 4)], random_batches(2))


@on_ranks(4)
def test_groups_are_made_in_one_order_at_construction(rank: int) -> None:
    """Channels first, then sums, then ties of the same stages; on all ranks of both pipelines."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    own = mesh.get_local_rank("pp")
    stages = linear_stages(4)
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    local = {s: stages[s] for s in schedule.stages_of(own)}
    ties = [[(0, name), (3, name)] for name in ("0.weight", "0.bias")]
    stages[3].load_state_dict(stages[0].state_dict())
    x, y = random_batch(8, seed=rank // 2)
    with nccl_over_gloo() as log:
        with Executor(schedule, local, MSE, sgd, mesh=mesh, ties=ties) as executor:
            made = [*log]
            executor.step(x, target=y)
            assert log == made
        assert log[len(made) :] == [f"shutdown {entry.split()[1]}" for entry in reversed(made)]
    a, b = (0, 1) if rank < 2 else (2, 3)
    sums = f"stages/{own},{own + 2}/{own},{own + 2}"
    names = f"channel/{a}-{b}", f"channel/{b}-{a}", sums, f"ties/0,3/{a},{b}"
    assert made == [f"make {name} whole" for name in names]


@on_ranks(3)
def test_channels_that_go_together_go_over_one_communicator(rank: int) -> None:
    """Alone or in a batch, each in its own order; ranks may differ in which is which."""
    groups = Groups((0, 1, 2), None)
    own = {
        0: ([(1, True), (1, False)], [(1, True)]),
        1: ([(0, True), (2, False)], [(0, False), (2, True)], [(0, False)]),
        2: ([(1, True)], [(1, False)]),
    }
    channels = ((0, 1), (1, 0), (1, 2), (2, 1))
    with nccl_over_gloo() as log:
        transport = NcclTransport((0, 1, 2), rank, [channels], torch.device("cpu"), groups)
        connect_all(groups, (0, 1, 2))
        assert log == ["make channel/0-1,1-0,1-2,2-1 whole"]
        posted: Counter[tuple[int, bool]] = Counter()
        for batch in own[rank]:
            values = []
            for peer, sends in batch:
                posted[peer, sends] += 1
                source, target = (rank, peer) if sends else (peer, rank)
                values.append(100 * source + 10 * target + posted[peer, sends])
            posts = [
                Post(torch.full((3,), float(sends * value)), peer, sends)
                for value, (peer, sends) in zip(values, batch, strict=True)
            ]
            if len(posts) == 1:
                post_one = transport.send if posts[0].sends else transport.receive
                works = [post_one(posts[0].tensor, posts[0].peer)]
            else:
                works = transport.together(posts)
            assert len(works) == len(posts)
            for work in works:
                work.wait()
            assert [post.tensor.tolist() for post in posts] == [[value] * 3 for value in values]
        assert len(log) == 1
    everyone(rank)
    groups.close()


@on_ranks(2)
def test_equal_processes_share_a_group_for_numbers(rank: int) -> None:
    with nccl_over_gloo() as log:
        groups = Groups((0, 1), None)
        samples, norms = (groups.for_numbers(p, torch.device("cpu")) for p in ((0, 1), (1, 0)))
        assert samples is norms
        connect_all(groups, (0, 1))
        assert log == ["make numbers/0,1 whole"]
        everyone(rank)
        groups.close()


@on_ranks(2)
def test_over_gloo_nothing_that_goes_together_blocks(rank: int) -> None:
    groups = Groups((0, 1), None)
    transport = GlooTransport((0, 1), rank, groups)
    posts = [Post(torch.full((2,), float(rank)), 1 - rank, sends=True) for _ in range(2)]
    posts += [Post(torch.empty(2), 1 - rank, sends=False) for _ in range(2)]
    for work in transport.together(posts):
        work.wait()
    assert [post.tensor.tolist() for post in posts[2:]] == [[1.0 - rank] * 2] * 2
    everyone(rank)
    groups.close()


@on_ranks(3)
def test_the_first_group_of_a_process_tells_its_rank(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else flight recorders of several processes would write the same file."""
    monkeypatch.setattr(Groups, "_told_rank", False)
    made: list[tuple[int, Sequence[int], int]] = []
    with nccl_over_gloo():
        backend = vars(module)["nccl_backend"]

        def noted(store: Any, position: int, processes: Sequence[int], *rest: Any) -> Any:
            made.append((position, [*processes], rest[-1]))
            return backend(store, position, processes, *rest)

        monkeypatch.setattr(module, "nccl_backend", noted)
        if rank:
            groups = Groups((1, 2), None)
            NcclTransport((1, 2), rank - 1, [[(0, 1)], [(1, 0)]], torch.device("cpu"), groups)
            connect_all(groups, (1, 2))
            assert made == [(rank, [0, 1, 2], 1), *[(rank - 1, [1, 2], 8)] * 2]
            groups.close()
        everyone(rank)


@on_ranks(2)
def test_who_does_not_come_to_connect_is_waited_for_within_the_timeout(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL itself would wait for ever, and nobody would see it."""
    with nccl_over_gloo() as log:
        groups = Groups((0, 1), timedelta(seconds=100 if rank else 2))
        NcclTransport((0, 1), rank, [[(0, 1)]], torch.device("cpu"), groups)
        if rank:
            monkeypatch.setattr(Control, "meet", lambda *_: None)
            monkeypatch.setattr(Groups, "make_asked", lambda *_: None)
            connect_all(groups, (0, 1))
        else:
            with pytest.raises(WaitError) as stalled:
                connect_all(groups, (0, 1))
            assert stalled.value.timed_out
            assert stalled.value.what == "a connection from process 1"
        assert not log
        everyone(rank)


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


def executor_that_fails(rank: int) -> Executor:
    """On rank 1."""
    return executor_on(rank, Failing(4, 4) if rank else None, 2)


FAILED = "rank 1 #1 1F0: ValueError: on purpose"


@on_ranks(2)
def test_a_failure_is_said_before_anything_is_aborted(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    x, y = random_batch()
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(NcclOverGloo, "abort", lambda _: said.append(caplog.messages[-1]))
        assert FAILED in message_of(executor_that_fails(rank).step, x, target=y)
        assert said
        assert all(FAILED in text for text in said)
        assert all("aborting NCCL's communicators now" in text for text in said)
        everyone(rank)


@on_ranks(2)
def test_a_failure_aborts_all_groups_at_once(rank: int) -> None:
    x, y = random_batch()
    with nccl_over_gloo() as log:
        executor = executor_that_fails(rank)
        made = [*log]
        assert FAILED in message_of(executor.step, x, target=y)
        ended = sorted(f"abort {entry.split()[1]}" for entry in made)
        assert sorted(log[len(made) :]) == ended
        assert "broken" in message_of(executor.step, x, target=y)
        executor.close()
        assert sorted(log[len(made) :]) == ended


@on_ranks(2)
def test_aborts_that_never_return_hold_no_rank_up(rank: int) -> None:
    x, y = random_batch()
    never = Event()
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        executor = executor_that_fails(rank)
        monkeypatch.setattr(module, "ABORT", 0.1)
        monkeypatch.setattr(NcclOverGloo, "abort", lambda _: never.wait())
        assert FAILED in message_of(executor.step, x, target=y)
        executor.close()
        everyone(rank)
        never.set()


class Failed:
    """A work that its communicator has given up: completed, as NCCL counts."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        raise RuntimeError("remote process exited or there was a network error")


@on_ranks(2)
def test_a_rank_names_what_has_failed_on_its_device(rank: int) -> None:
    x, y = random_batch(6)
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        executor = executor_on(rank)
        executor.step(x, target=y)  # goes through the hosts
        if rank == 1:
            post = NcclOverGloo._end_coalescing
            sent: list[Any] = []

            def fails(self: NcclOverGloo) -> Any:
                sent.extend(end for end in self._as_one or () if end.sends)
                work = post(self)
                return Failed() if len(sent) == 3 else work

            monkeypatch.setattr(NcclOverGloo, "_end_coalescing", fails)
        executor.step(x, target=y)
        message = message_of(executor.close)
        if rank == 1:
            assert "rank 1 #11 1SEND_GRAD2: " in message
            assert "waited for 1SEND_GRAD2 to rank 0, but the connection has ended" in message
        everyone(rank)


def _never(host: Host, timed: bool = False) -> Any:
    """A mark that the device never comes to."""
    return SimpleNamespace(query=lambda: False)


class Stuck:
    """A work that the device never comes to the end of, as far as the host can see."""

    def __init__(self, work: Work | None) -> None:
        self._work = work

    def wait(self) -> bool:
        return self._work is not None and self._work.wait()

    def is_completed(self) -> bool:
        return False


def stick(monkeypatch: pytest.MonkeyPatch, sticks: Callable[[Any], bool]) -> None:
    """The device never comes to the end of what is so posted as one, nor to what is behind it."""
    post = NcclOverGloo._end_coalescing

    def post_stuck(self: NcclOverGloo) -> Any:
        stuck = self._as_one and sticks(self._as_one)
        return Stuck(post(self)) if stuck else post(self)

    monkeypatch.setattr(NcclOverGloo, "_end_coalescing", post_stuck)
    monkeypatch.setattr(Host, "mark", _never)


@on_ranks(2)
@sweep("waits", ["loss", "close", "step", "update"], quick=["update"])
def test_a_rank_says_what_its_device_waits_for(waits: str, rank: int) -> None:
    """The host looks where it comes to wait for the device: inside a step only before updates."""
    x, y = random_batch(6)
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        executor = executor_on(rank, timeout=60 if rank else 4)
        executor.step(x, target=y)  # goes through the hosts
        if rank == 0:
            stick(monkeypatch, lambda ends: not ends[0].sends)
            if waits == "update":  # as a GPU reads
                monkeypatch.setattr(Host, "read", Accelerator.read)

        def comes_to_wait() -> None:
            result = executor.step(x, target=y)
            if waits == "close":
                executor.close()
            elif waits == "step":
                for _ in range(2):  # the host is at most one call ahead
                    executor.step(x, target=y)
            elif waits == "loss" or rank == 1:
                float(result.loss)

        message = message_of(comes_to_wait)
        if rank == 0:
            assert "rank 0 #4 0RECV_GRAD0: " in message
            assert "waited 4 s in vain for 0RECV_GRAD0 from rank 1" in message
            again = message_of(executor.step, x, target=y)
            assert ("closed" if waits == "close" else "broken") in again
        elif waits == "step":
            assert "the first to fail was rank 0" in message
        everyone(rank)


@long
@on_ranks(2)
def test_a_device_that_waits_for_a_rank_without_a_call_names_it(rank: int) -> None:
    """By where the device stands, which does nothing: the host has come to the update."""
    x, y = random_batch(6)
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        executor = executor_on(rank, timeout=60 if rank else 4)
        executor.step(x, target=y)
        if rank == 0:
            monkeypatch.setattr(NcclOverGloo, "_end_coalescing", lambda self: Stuck(None))
            monkeypatch.setattr(Host, "mark", _never)
            monkeypatch.setattr(Host, "read", Accelerator.read)
            with pytest.raises(schedir.ExecutionError, match="vain for 0SEND_ACT0") as failed:
                executor.step(x, target=y)
            (root,) = failed.value.roots
            assert (root.rank, root.call, root.cause) == (1, 1, "no progress for 4.0 s")
        everyone(rank)


@long
@on_ranks(2)
def test_of_a_batch_a_rank_names_all_parts(rank: int) -> None:
    stage: dict[int, nn.Module] = {rank: nn.Linear(4, 4)}
    x, y = random_batch(6)
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        executor = Executor(megatron(2, 3), stage, MSE, sgd, timeout=4)
        executor.step(x, target=y)  # goes through the hosts
        if rank == 0:
            stick(monkeypatch, lambda ends: len(ends) > 1)
        result = executor.step(x, target=y)
        message = message_of(lambda: result.loss)
        if rank == 0:
            assert "rank 0 #3 0SEND_ACT1: " in message
            parts = "0SEND_ACT1 to rank 1, 0RECV_GRAD0 from rank 1"
            assert f"waited 4 s in vain for all of {parts}" in message
        everyone(rank)
