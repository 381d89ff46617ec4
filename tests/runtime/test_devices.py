"""Where stages and what they are given have to be, so far as that shows without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import schedir
from schedir.runtime import Executor, plan, session
from schedir.runtime.accelerator import Accelerator, Host, current_accelerator
from schedir.runtime.arguments import check_modules
from schedir.runtime.microbatches import placed
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.session import Claim, compare
from schedir.runtime.trace import Recorder
from tests.runtime.kit import MSE, linear_stages, message_of, numbered, random_batch, sgd
from tests.runtime.queueing import Queueing

CPU, META = torch.device("cpu"), torch.device("meta")
ONE = schedir.build("1f1b", ranks=1, microbatches=1)


def test_what_is_on_the_cpu_is_moved() -> None:
    """To a device that has no values, for want of another one here."""
    pieces = [(torch.ones(2), {"ids": torch.ones(3, dtype=torch.int64), "causal": True})]
    ((x, given),) = placed(pieces, META, "inputs")
    assert (x.device, given["ids"].device, given["ids"].dtype) == (META, META, torch.int64)
    assert given["causal"] is True
    assert placed(pieces, CPU, "inputs") is pieces
    there = [torch.ones(2, device=META)]
    assert placed(there, META, "inputs")[0] is there[0]


def test_it_is_moved_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, Any]] = []

    def note(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        given.append((where, how))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", note)
    placed([torch.ones(2)], torch.device("cuda", 1), "inputs")
    assert given == [((torch.device("cuda", 1),), {"non_blocking": True})]


def test_what_is_on_another_device_is_refused_with_the_line_that_moves_it() -> None:
    message = message_of(placed, [torch.ones(2, device=META)], torch.device("cuda", 1), "target")
    assert message == (
        "target: a tensor is on meta, but the stages of this rank are on cuda:1; move it there, "
        'tensor.to("cuda:1"), or leave it on the CPU'
    )


def test_samples_are_counted_before_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def note(pieces: list[Any], device: torch.device, what: str) -> list[Any]:
        order.append((what, device))
        return pieces

    def count(target: torch.Tensor) -> int:
        order.append(("count", target.device))
        return len(target)

    monkeypatch.setattr("schedir.runtime.feeding.placed", note)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = numbered(linear_stages())
    with Executor(schedule, stages, MSE, sgd, count=count, in_process=True) as executor:
        x, y = random_batch()
        executor.step(x, target=y, stage_inputs={1: None}, loss_kwargs={"reduction": "mean"})
    names = ["count", "count", "inputs", "target", "loss_kwargs"]
    assert order == [(name, CPU) for name in names]


def test_the_device_of_the_stages_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the executor is made, in every call, and while it is closed."""
    chosen: list[str] = []

    @contextmanager
    def note(host: Host) -> Iterator[None]:
        chosen.append("on")
        yield
        chosen.append("off")

    def told() -> list[str]:
        """What has been chosen since the last time."""
        found = chosen.copy()
        chosen.clear()
        return found

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        chosen.append("optimizer")
        return sgd(parameters)

    monkeypatch.setattr(plan, "accelerator_of", Queueing)
    monkeypatch.setattr(Queueing, "chosen", note)
    stage = nn.Linear(4, 4)
    stage.register_forward_pre_hook(lambda module, given: chosen.append("forward"))
    executor = Executor(ONE, {0: stage}, MSE, optimizer)
    assert told() == ["on", "optimizer", "off"]
    x, y = random_batch()
    calls = partial(executor.step, target=y), partial(executor.evaluate, target=y), executor.infer
    for call in calls:
        call(x)
        assert told() == ["on", "forward", "off"]
    executor.close()
    assert told() == ["on", "off"]


def claim(gpu: str) -> Claim:
    return Claim({}, gpu)


def test_two_processes_on_one_gpu_are_named() -> None:
    compare([claim("GPU-1 of here"), claim("GPU-2 of here"), claim("GPU-1 of there")])
    compare([claim(""), claim("")])
    gpus = "GPU-1 of here", "GPU-2 of here", "GPU-1 of here"
    message = message_of(compare, [*map(claim, gpus)])
    assert "processes 0 and 2 have their stages on one GPU, GPU-1 of here" in message
    assert 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))' in message
    assert "NCCL_HOSTID" in message


@pytest.mark.parametrize("meant", [False, True])
def test_a_gpu_may_be_shared_where_it_is_meant(
    meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if meant:
        monkeypatch.setenv("NCCL_HOSTID", "rank0")
    else:
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(Host, "name", "GPU-1 of here")
    claimed: list[Claim] = []
    monkeypatch.setattr(session, "compare", lambda claims, _: claimed.extend(claims))
    Executor(ONE, {0: nn.Linear(4, 4)}, MSE, sgd).close()
    (own,) = claimed
    assert own.gpu == ("" if meant else "GPU-1 of here")


def test_a_gpu_tells_its_name_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = object.__new__(Accelerator)
    found.device = torch.device("cuda", 0)
    properties = SimpleNamespace(uuid="GPU-1", multi_processor_count=132)
    found._module = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr("schedir.runtime.accelerator.gethostname", lambda: "here")
    assert (found.name, found.processors) == ("GPU-1 of here", 132)


class CountedEvent:
    """One of CUDA's, whose device is done at once."""

    made: ClassVar[int] = 0

    def __init__(self, enable_timing: bool, blocking: bool) -> None:
        assert blocking
        self.timed, self.at = enable_timing, 0
        CountedEvent.made += enable_timing

    def synchronize(self) -> None:
        """It is there."""

    def elapsed_time(self, end: CountedEvent) -> float:
        assert (self.timed, end.timed) == (True, True)
        return end.at - self.at


def counted_device() -> Accelerator:
    """CUDA as far as events go."""
    found, recorded = Accelerator(torch.device("cuda", 0)), count(1)
    stream = SimpleNamespace(record_event=lambda event: setattr(event, "at", next(recorded)))
    found._module = SimpleNamespace(Event=CountedEvent, current_stream=lambda _: stream)
    return found


@pytest.mark.parametrize("traces", [False, True])
def test_events_that_keep_time_are_used_again(
    traces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are made as are in use at once; two steps' times never share one."""
    monkeypatch.setattr(CountedEvent, "made", 0)
    watch, actions = Recorder(counted_device(), traces), 5
    runs = [
        watch(Instruction(0, n, n, schedir.forward(0, n), lambda: None, computes=True)).run
        for n in range(actions)
    ]

    def step() -> Callable[[], float]:
        for run in runs:
            run()
        return watch.take().busy

    first, second = step(), step()
    assert CountedEvent.made == 4 * actions
    assert (first(), second()) == (1e-3 * actions, 1e-3 * actions)
    del first, second
    for _ in range(3):
        assert step()() == pytest.approx(1e-3 * actions)
    assert CountedEvent.made == 4 * actions


def test_modules_without_values_are_told_where_to_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = nn.Linear(2, 2, device="meta")
    assert 'to_empty(device="cpu")' in message_of(check_modules, {0: nn.Linear(2, 2), 1: meta})
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: gpu)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert 'to_empty(device="cuda:3")' in message_of(check_modules, {0: meta})
    assert 'to_empty(device="cpu")' in message_of(check_modules, {0: nn.Linear(2, 2), 1: meta})


def test_random_numbers_are_the_cpus_where_an_accelerator_is_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in (None, torch.device("mps")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda device=device: device)
        assert isinstance(current_accelerator(), Host)
