"""`Executor(channel=...)`: the model that a list is proved and posted under, and what is posted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.graph.compile import graph_of
from schedir.ir import COMMUNICATION, RECEIVES, TRANSPORTS, flat
from schedir.runtime import Executor, plan
from schedir.runtime.plan import channel_for
from schedir.runtime.program import program
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.transports.gloo import GlooTransport
from schedir.runtime.transports.in_process import Endpoint
from schedir.runtime.transports.nccl import NcclTransport
from schedir.runtime.transports.transport import Work
from tests.built_in import NAMES
from tests.runtime.kit import (
    CROSSING,
    MSE,
    linear_stages,
    message_of,
    numbered,
    random_batch,
    refused,
    sgd,
)
from tests.runtime.nccl_over_gloo import nccl_over_gloo
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

RUN = [channel for channel in schedir.CHANNELS if channel != "direction"]


def test_gloo_and_one_process_take_every_model_that_runs() -> None:
    for transport in (GlooTransport, Endpoint):
        assert [channel_for(transport, channel) for channel in RUN] == RUN
        with refused("channel='direction' is for checking only"):
            channel_for(transport, "direction")


def test_a_transport_stands_for_its_model() -> None:
    for transport, name in ((NcclTransport, "nccl"), (GlooTransport, "gloo")):
        assert channel_for(transport, name) == transport.channel == TRANSPORTS[name]
    assert channel_for(GlooTransport, "mpi") == channel_for(NcclTransport, "host") == "host"
    for channel in ("pair", "edge", "gloo"):
        with refused("the least strict model there is 'rank'"):
            channel_for(NcclTransport, channel)


def executor_of(schedule: schedir.Schedule, **options: Any) -> Executor:
    stages = numbered(linear_stages(schedule.stages))
    return Executor(schedule, stages, MSE, sgd, in_process=True, **options)


def test_the_list_is_proved_under_the_model_that_is_wanted() -> None:
    with executor_of(CROSSING):
        pass
    with pytest.raises(schedir.ScheduleError, match="deadlock"):
        executor_of(CROSSING, channel="rank")
    for unknown in ("ring", 3):
        assert "unknown channel model" in message_of(executor_of, CROSSING, channel=unknown)


@pytest.fixture
def as_over_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on rank 0 of two; no process group is made in this process."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(plan, "transport_for", lambda *_: NcclTransport)
    yield
    assert not torch.distributed.is_initialized()


def test_nccl_refuses_a_list_before_any_group_is_made(as_over_nccl: None) -> None:
    with pytest.raises(schedir.ScheduleError, match="S301") as found:
        Executor(CROSSING, {0: nn.Linear(3, 3)}, MSE, sgd)
    (diagnostic,) = found.value.diagnostics
    assert len(diagnostic.locations) == 4


@on_ranks(2)
def test_the_channel_is_compared(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    channel = "rank" if rank else None
    message = message_of(Executor, schedule, {rank: nn.Linear(3, 3)}, MSE, sgd, channel=channel)
    assert "channel is None on process 0, but rank on process 1" in message


@attrs.define(eq=False)
class Recorder:
    """What transports are told to post, by rank, with the entry that is carried out by then."""

    entry: schedir.Action | None = None
    rank: int = 0
    posted: dict[int, list[tuple[schedir.Action | None, bool, int]]] = attrs.field(factory=dict)

    def watch(self, monkeypatch: pytest.MonkeyPatch, transport: type[Any]) -> None:
        """All posts of this kind of transport from here on."""
        monkeypatch.setattr(program, "listening", lambda: [self.observe])
        monkeypatch.setattr(transport, "early", False)  # of the call that is recorded
        for name, sends in (("send", True), ("receive", False)):
            monkeypatch.setattr(transport, name, self.recording(getattr(transport, name), sends))

    def observe(self, instruction: Instruction) -> Instruction:
        def run() -> None:
            self.entry, self.rank = instruction.action, instruction.rank
            instruction.run()

        return attrs.evolve(instruction, run=run)

    def recording(self, post: Any, sends: bool) -> Callable[..., Work]:
        def recorded(transport: Any, tensor: Tensor, peer: int) -> Work:
            self.posted.setdefault(self.rank, []).append((self.entry, sends, peer))
            work: Work = post(transport, tensor, peer)
            return work

        return recorded

    def step(self, executor: Executor) -> None:
        """Record what a step posts."""
        self.posted.clear()
        x, y = random_batch()
        executor.step(x, target=y)


def communication(
    schedule: schedir.Schedule, rank: int
) -> Sequence[tuple[schedir.Action, bool, int | None]]:
    """What a rank posts, by its list: each entry, whether it sends, and to or from whom."""
    return [
        (action, action.kind not in RECEIVES, graph_of(schedule).peer(action))
        for action in flat(schedule.actions[rank])
        if action.kind in COMMUNICATION
    ]


@pytest.mark.parametrize("channel", RUN)
@sweep("microbatches", [1, 5, 8], quick=[5])
@sweep("name", NAMES, quick=["interleaved-1f1b"])
def test_the_schedule_is_what_the_transport_posted(
    name: str, microbatches: int, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=microbatches)
    recorder = Recorder()
    recorder.watch(monkeypatch, Endpoint)
    with executor_of(schedule, channel=channel) as executor:
        recorder.step(executor)  # it learns what is posted from then on
        for _ in range(2):
            recorder.step(executor)
            carried_out = executor.schedule
            for rank in range(3):
                assert recorder.posted[rank] == communication(carried_out, rank)
            assert channel in schedir.check(carried_out).clean_channels
            assert carried_out == schedir.advance_receives(schedule, channel, 10**6)


@on_ranks(2)
@pytest.mark.parametrize("channel", ["async", "rank"])
@sweep("name", NAMES, quick=["interleaved-1f1b"])
def test_so_it_is_on_ranks(name: str, channel: str, rank: int) -> None:
    """NCCL's own way too: with receives ahead over compute only."""
    schedule = schedir.build(name, ranks=2, microbatches=4)
    stages: dict[int, nn.Module] = {s: nn.Linear(4, 4) for s in schedule.stages_of(rank)}
    for transport in (GlooTransport, NcclTransport)[: 1 + (channel == "rank")]:
        recorder = Recorder()
        over = nccl_over_gloo() if transport is NcclTransport else nullcontext()
        with pytest.MonkeyPatch.context() as monkeypatch, over:
            recorder.watch(monkeypatch, transport)
            with Executor(schedule, stages, MSE, sgd, channel=channel) as executor:
                recorder.step(executor)
                assert not recorder.posted  # the first call learns what is posted from then on
                # The third call has its first receives posted early, where that is done.
                for _ in range(2):
                    recorder.step(executor)
                    expected = communication(executor.schedule, rank)
                    assert recorder.posted[rank][-len(expected) :] == expected
                assert executor.schedule == schedir.advance_receives(schedule, channel, 10**6)
