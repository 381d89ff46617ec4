"""Where ranks of one process meet, each on a stream of its own: what is ordered before what.

Streams are made up: each counts what it was given to do, and knows of the others' as much as it has
waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Action, Pipeline, backward_input, backward_weight, forward, optim_step
from schedir.runtime import Executor, plan, rng
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.call import Call
from schedir.runtime.gradients.clipping import Clipping
from schedir.runtime.gradients.ties import Tie
from schedir.runtime.program.compute import Compute
from schedir.runtime.program.instruction import Operation
from schedir.runtime.program.update import OptimStep
from schedir.runtime.stage import rng as seeds
from tests.runtime.kit import MSE, adamw, linear_stages, numbered, random_batch

_USERS = 0  # the stream that the caller is on


class Mark:
    """A point on a stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._known = Counter(streams.known[streams.current])

    def wait(self) -> None:
        own = self._streams.known[self._streams.current]
        for stream, done in self._known.items():
            own[stream] = max(own[stream], done)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        return 1.0


class Streams(Accelerator):
    """By stream, how much of each it has waited for."""

    name = ""
    processors = 1

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.known: list[Counter[int]] = [Counter()]
        self.current = _USERS
        self.records: list[tuple[int, int]] = []  # address of a tensor, and the stream that uses it

    def works(self) -> None:
        """The current stream is given something to do."""
        self.known[self.current][self.current] += 1

    def strangers(self) -> list[int]:
        """The streams with work that the current one does not wait for."""
        own = self.known[self.current]
        return [s for s, known in enumerate(self.known) if known[s] > own[s]]

    def chosen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> Any:
        self.known.append(Counter())
        return len(self.known) - 1

    @contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return self._on(stream)

    def mark(self, timed: bool = False) -> Mark:
        return Mark(self)

    def used(self, tensor: Tensor) -> None:
        self.records.append((tensor.data_ptr(), self.current))

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        assert not self.strangers()
        return lambda: tensor

    def synchronize(self) -> None:
        pass

    def generators(self) -> tuple[torch.Generator, ...]:
        return ()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Every rank has its own; compute and updates count as work."""
    found = Streams()
    monkeypatch.setattr(plan, "accelerator_of", lambda device: found)

    def worked(kind: type[Operation]) -> None:
        run = kind.run

        def counted(self: Any, call: Call) -> None:
            run(self, call)
            found.works()

        monkeypatch.setattr(kind, "run", counted)

    def kinds(kind: type[Operation]) -> Iterator[type[Operation]]:
        if "run" in vars(kind):
            yield kind
        for derived in kind.__subclasses__():
            yield from kinds(derived)

    for kind in (*kinds(Compute), OptimStep):
        worked(kind)
    return found


def weights_last(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """So that no transfer tells another rank that a gradient is complete."""
    for kind in (forward, backward_input, backward_weight):
        for m in range(pipe.microbatches):
            yield kind(rank, m)
    yield optim_step(rank)


OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_grad_norm": 1.0},
    "tied": {"ties": [[(0, "0.weight"), (2, "0.weight")]]},
    "tied and clipped": {"clip_grad_norm": 1.0, "ties": [[(0, "0.weight"), (2, "0.weight")]]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_meeting_waits_for_its_parties_and_they_for_it(
    name: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[tuple[type, int, int]] = []  # what, on which stream, as its how manieth work
    unknown: list[object] = []

    def meeting(kind: type, method: str, parties: Callable[[], set[int]]) -> None:
        act = getattr(kind, method)

        def acted(self: Any) -> None:
            unknown.extend(parties().intersection(streams.strangers()))
            act(self)
            streams.works()
            met.append((kind, streams.current, streams.known[streams.current][streams.current]))

        monkeypatch.setattr(kind, method, acted)

    meeting(Clipping, "clip", lambda: {1, 2, 3})
    meeting(Tie, "sum", lambda: {1, 3})
    step = OptimStep.run

    def stepped(self: OptimStep, call: Call) -> None:
        own = streams.known[streams.current]
        for kind, stream, number in met:
            if kind is Clipping or self.stage.index != 1:
                unknown.extend([(kind, streams.current)] if own[stream] < number else [])
        step(self, call)

    monkeypatch.setattr(OptimStep, "run", stepped)
    schedule = schedir.build(weights_last, ranks=3, microbatches=4)
    stages = numbered(linear_stages(3))
    stages[2].load_state_dict(stages[0].state_dict())
    x, y = random_batch()
    with Executor(schedule, stages, MSE, adamw, in_process=True, **OPTIONS[name]) as executor:
        for _ in range(2):
            executor.step(x, target=y)
            assert not streams.strangers()
    assert not unknown
    assert len(met) == 2 * len(OPTIONS[name])


def test_what_a_tie_makes_is_kept_while_others_use_it(streams: Streams) -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    stages = numbered(linear_stages(3))
    stages[2].load_state_dict(stages[0].state_dict())
    x, y = random_batch()
    made: dict[int, int] = {}

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        held = list(parameters)

        class Looks(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                made[streams.current] = held[0].grad.data_ptr()

        return Looks(held, lr=0.1)

    options: dict[str, Any] = {"in_process": True, **OPTIONS["tied"]}
    with Executor(schedule, stages, MSE, sgd, **options) as executor:
        executor.step(x, target=y)
    assert {(made[1], 1), (made[3], 3)} <= set(streams.records)


def test_after_an_error_too_the_caller_waits_for_every_stream(streams: Streams) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                raise ValueError("not now")
            return super().forward(x)

    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    stages = numbered([*linear_stages(2), Fails(4, 4)])
    x, y = random_batch()
    with Executor(schedule, stages, MSE, adamw, in_process=True) as executor:
        with pytest.raises(schedir.ExecutionError, match="not now"):
            executor.step(x, target=y)
        assert not streams.strangers()
    assert streams.known[1][1] > 0


def test_seeding_touches_the_stages_own_device_alone(
    monkeypatch: pytest.MonkeyPatch, streams: Streams
) -> None:
    own, other = torch.Generator(), torch.Generator()
    monkeypatch.setattr(Streams, "generators", lambda self: (own,))
    monkeypatch.setattr(torch.cuda, "default_generators", (own, other))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("all devices"))
    drawn: list[float] = []

    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                drawn.append(float(torch.rand((), generator=own)))
            return super().forward(x)

    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    x, y = random_batch()
    stages = Draws(4, 4), Draws(4, 4)
    before, seed = (torch.get_rng_state(), own.get_state()), other.initial_seed()
    for stage in stages:
        with Executor(schedule, {0: stage}, MSE, adamw) as executor:
            executor.step(x, target=y)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    assert other.initial_seed() == seed
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])


def test_a_loop_is_seeded_as_a_stage_is(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> None:
    """On the current device, whose generator it finds itself."""
    own = torch.Generator()
    monkeypatch.setattr(Streams, "generators", lambda self: (own,))
    monkeypatch.setattr(seeds, "current_accelerator", lambda: streams)
    before = own.get_state()
    with rng(1, 2, 3, 4):
        drawn = torch.rand(2, generator=own)
        assert torch.equal(drawn, torch.rand(2))
    assert torch.equal(own.get_state(), before)
