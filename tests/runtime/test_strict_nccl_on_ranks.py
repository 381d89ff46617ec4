"""What NCCL refuses, or hangs for, is found without it; see `nccl_over_gloo`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import schedir
from schedir.runtime import Executor, transports
from schedir.runtime.processes.groups import Groups, NcclGroup, Post
from schedir.runtime.transports import NcclTransport
from tests.built_in import NAMES, variants
from tests.runtime.kit import MSE, everyone, message_of, momentum, random_batch, sgd
from tests.runtime.nccl_over_gloo import RefusedError, connect_all, nccl_over_gloo
from tests.runtime.on_ranks import on_ranks
from tests.runtime.parity import Case, assert_trains_as_one_process
from tests.runtime.test_nccl_on_ranks import Narrowed, Widened

CPU = torch.device("cpu")


@on_ranks(2)
@pytest.mark.parametrize(
    ("sent", "expected", "what"),
    [
        (torch.zeros(3), torch.zeros(4), r"to send 3 of torch.float32, but .* 4 of torch.float32"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), r"to send 2 of .* 2 of torch.int32"),
        (torch.zeros(4, 4), torch.zeros(2, 4), r"to send 16 of .* 8 of torch.float32"),
    ],
    ids=["more", "type", "shape"],
)
def test_ends_that_differ_are_refused_on_both_sides(
    sent: torch.Tensor, expected: torch.Tensor, what: str, rank: int
) -> None:
    with nccl_over_gloo():
        transport = NcclTransport((0, 1), rank, [[(0, 1)]], CPU, groups := Groups((0, 1), None))
        connect_all(groups, (0, 1))
        work = transport.send(sent, 1) if rank == 0 else transport.receive(expected, 0)
        with pytest.raises(RefusedError, match=what if rank == 0 else "to receive") as refused:
            work.wait()
        assert "but another end is of" in str(refused.value)
        everyone(rank)
        groups.close()


@on_ranks(3)
def test_sums_of_different_sizes_are_refused_everywhere(rank: int) -> None:
    with nccl_over_gloo():
        groups = Groups((0, 1, 2), None)
        group = groups.make("sum", (0, 1, 2), CPU)
        connect_all(groups, (0, 1, 2))
        same = torch.full((3,), float(rank))
        group.allreduce([same]).wait()
        assert same.tolist() == [3.0] * 3
        with pytest.raises(RefusedError, match=r"to sum . of torch.float32, but another end"):
            group.allreduce([torch.zeros(3 + rank // 2)]).wait()
        everyone(rank)
        groups.close()


@on_ranks(2)
def test_both_directions_are_compared_apart(rank: int) -> None:
    """A batch sends one size and receives another."""
    with nccl_over_gloo():
        groups = Groups((0, 1), None)
        transport = NcclTransport((0, 1), rank, [[(0, 1), (1, 0)]], CPU, groups)
        connect_all(groups, (0, 1))
        here, there = torch.full((3 + rank,), float(rank)), torch.zeros(4 - rank)
        posts = [Post(here, 1 - rank, True), Post(there, 1 - rank, False)]
        for work in transport.together(posts if rank else posts[::-1]):
            work.wait()
        assert there.tolist() == [float(1 - rank)] * (4 - rank)
        everyone(rank)
        groups.close()


@on_ranks(2)
def test_what_is_used_before_it_is_warm_is_refused(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclGroup, "warm_up", lambda _: [])
    with nccl_over_gloo():
        groups = Groups((0, 1), None)
        group = groups.make("sum", (0, 1), CPU)
        connect_all(groups, (0, 1))
        with pytest.raises(RefusedError, match=r"to sum 3 .* makes a communicator, in the midst"):
            group.allreduce([torch.zeros(3)])
        warm_up = group.allreduce([torch.zeros(1)])
        with pytest.raises(RefusedError, match=r"before the communicator is known to be made"):
            group.allreduce([torch.zeros(3)])
        warm_up.wait()
        group.allreduce([torch.zeros(3)]).wait()
        everyone(rank)
        groups.close()


@on_ranks(2)
@pytest.mark.parametrize("fault", ["", "unsettled", "bytes"])
def test_a_fault_of_the_transport_is_found(fault: str, rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stage: dict[int, nn.Module] = {rank: Narrowed(4, 4) if rank else Widened(4, 4)}
    x, y = random_batch()
    said = ""
    with nccl_over_gloo(), pytest.MonkeyPatch.context() as monkeypatch:
        if fault == "unsettled":
            monkeypatch.setattr(Groups, "settle", lambda *_: None)
            said = "before the communicator is known to be made"
        elif fault == "bytes":
            monkeypatch.setattr(transports, "_carried", lambda tensor: tensor)
            said = "Input tensor data type is not supported for NCCL"
        executor = Executor(schedule, stage, MSE, sgd)
        executor.step(x, target=y)  # goes through the hosts
        message = message_of(executor.step, x, target=y)
        assert any(said in one for one in everyone(message)), message
        assert bool(message) == bool(fault)
        executor.close()


@on_ranks(3)
@pytest.mark.parametrize("name", NAMES)
def test_training_over_nccl_is_training_in_one_process(name: str, rank: int) -> None:
    with nccl_over_gloo():
        case = Case(name, 3, 5, variants(name)[-1], momentum)
        assert_trains_as_one_process(case, rank)
