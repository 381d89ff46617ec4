"""Measured timelines: what is recorded of a step, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpt
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import schedir
from schedir import Kind, Timeline
from schedir.runtime import Executor, trace
from schedir.runtime.accelerator import Host
from schedir.runtime.program import program
from schedir.runtime.program.compute import wait_of
from schedir.runtime.program.instruction import Instruction, nothing
from schedir.runtime.program.transfers import waiting
from schedir.runtime.trace import Recorder, Taken, timeline
from schedir.simulator import Measured, load_timelines, save_timelines
from tests.literals import listed
from tests.runtime.features import check_timeline
from tests.runtime.kit import MSE, adamw, linear_stages, message_of, numbered, random_batch, sgd
from tests.runtime.test_memory import Live

WIDTH, ROWS, MICROBATCHES = 16, 24, 3
BOUNDARY = 4 * WIDTH * ROWS // MICROBATCHES  # bytes


def executor(
    stages: Any = 2, optimizer: Any = adamw, name: str = "1f1b", **options: Any
) -> Executor:
    """Of so many linear stages, or of these."""
    modules = linear_stages(stages, WIDTH) if isinstance(stages, int) else stages
    schedule = schedir.build(name, ranks=len(modules), microbatches=MICROBATCHES)
    given = {"trace": True, "in_process": True, **options}
    return Executor(schedule, numbered(modules), MSE, optimizer, **given)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return random_batch(rows, width=WIDTH)


def step(traced: Executor, rows: int = ROWS, **options: Any) -> None:
    x, y = batch(rows)
    traced.step(x, target=y, **options)


def steps_of(found: Sequence[Timeline]) -> list[int]:
    return [one.measured.step for one in found if one.measured]


def of_kind(found: Timeline, kind: Kind) -> np.ndarray[Any, Any]:
    """Whether the times of a kind are known, as (starts, ends)."""
    places = found.schedule.columns.is_kind(kind)
    return np.stack([~np.isnan(found.starts[places]), ~np.isnan(found.ends[places])])


def test_every_step_has_a_timeline_and_nothing_else_has() -> None:
    with executor() as traced:
        x, y = batch()
        assert traced.timelines() == []
        step(traced)
        traced.evaluate(x, target=y)
        traced.infer(x)
        step(traced)
        found = traced.timelines()
        assert steps_of(found) == [0, 1]
        assert all(t.unit == "s" for t in found)
        assert found[1].schedule == traced.schedule
        step(traced)
        assert steps_of(traced.timelines()) == [2]
    for one in found:
        check_timeline(one)


def test_a_step_that_fails_leaves_nothing() -> None:
    class Fails(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if Fails.fails:
                raise ValueError("as it was told")
            return super().forward(x)

    with executor([nn.Linear(WIDTH, WIDTH), Fails(WIDTH, WIDTH)]) as traced:
        for number in range(4):
            Fails.fails = number in (0, 2)
            assert bool(message_of(step, traced)) is Fails.fails
        found = traced.timelines()
    assert steps_of(found) == [0, 1]
    for one in found:
        check_timeline(one)


def test_the_first_step_may_fail_before_anything_has_run() -> None:
    with executor() as traced:
        assert "microbatches" in message_of(step, traced, 1)
        assert traced.timelines() == []
        step(traced)
        (found,) = traced.timelines()
    check_timeline(found)


def test_what_is_not_recorded_can_not_be_had() -> None:
    with executor(trace=False) as plain:
        assert "make the executor with trace=True" in message_of(plain.timelines)
    with executor() as traced:
        step(traced)
    assert "is closed" in message_of(traced.timelines)


def test_nothing_watches_where_nothing_is_recorded() -> None:
    with executor(trace=False) as plain:
        step(plain)
        step(plain)
        latest = plain._engine.training._latest
    assert latest is not None
    calls = [call for x in latest.instructions for call in (x.run, x.wait) if call]
    assert all(call.__module__.startswith("schedir.runtime.program") for call in calls)


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_updates_that_are_left_out_have_no_time(optimizer: Any) -> None:
    with executor(optimizer=optimizer) as traced:
        step(traced, update=False)
        step(traced)
        first, second = traced.timelines()
    assert not of_kind(first, Kind.OPTIM_STEP).any()
    assert of_kind(second, Kind.OPTIM_STEP).all() == (optimizer is not None)
    assert of_kind(first, Kind.BACKWARD).all()


def test_the_latest_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_FEWEST_STEPS", 2)
    for most, kept in ((0, 2), (3, 3)):
        with executor() as traced:
            actions = len(traced.schedule.columns)
            kept_here: Any = traced._engine.trace
            kept_here.most = most * actions
            for _ in range(4):
                step(traced)
            assert steps_of(traced.timelines()) == [0, 1, 2, 3][-kept:]


def test_timelines_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    with executor() as traced:
        for _ in range(3):
            step(traced)
        found = traced.timelines()
    save_timelines(found, tmp_path / "run.json")
    assert load_timelines(tmp_path / "run.json") == found
    found[1].save(tmp_path / "step.json")
    assert Timeline.load(tmp_path / "step.json") == found[1]


def sizes_of(**options: Any) -> Any:
    with executor(**options) as traced:
        step(traced)
        assert traced.timelines()[0].sizes is None  # a first call is no measure
        step(traced)
        return traced.timelines()[0].sizes


def test_bytes_are_those_of_what_a_step_keeps() -> None:
    weights = 4 * (WIDTH + 1) * WIDTH
    found = sizes_of()
    assert found.boundary == (BOUNDARY,)
    assert found.weight == found.gradient == (weights, weights)
    # AdamW keeps two moments, and its steps, of a weight and of a bias.
    assert found.optimizer == (2 * weights + 8, 2 * weights + 8)
    # The first stage's input is the user's; tanh keeps its output; the loss, its input: the same.
    assert (found.activation, found.input) == ((BOUNDARY, 2 * BOUNDARY), (0, BOUNDARY))
    without = sizes_of(optimizer=None)
    assert (without.optimizer, without.gradient) == ((0, 0), (weights, weights))
    assert sizes_of(recompute=True) == found
    # Weights of older versions are no activations.
    assert sizes_of(optimizer=sgd, name="pipedream") == sizes_of(optimizer=sgd)


def test_bytes_are_measured_for_every_shape() -> None:
    with executor() as traced:
        for rows in (ROWS, 2 * ROWS, 2 * ROWS, ROWS):
            step(traced, rows)
        sizes: list[Any] = [line.sizes for line in traced.timelines()]
    found = [(s.boundary[0] // BOUNDARY, s.activation[1] // BOUNDARY) for s in sizes if s]
    assert found == [(1, 2), (2, 4), (2, 4), (1, 2)]


def test_lists_with_receives_further_ahead_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SPARE_BYTES", 4 * BOUNDARY)
    with executor(3) as traced:
        schedules, busy, found = [], [], list[Timeline]()
        for rows in (ROWS, 8 * ROWS):
            x, y = batch(rows)
            traced.step(x, target=y)
            traced.timelines()
            busy.append(traced.step(x, target=y).busy)
            schedules.append(traced.schedule)
            found += traced.timelines()
    assert schedules[0] != schedules[1]
    assert [one.schedule for one in found] == schedules
    for one, seconds in zip(found, busy, strict=True):
        check_timeline(one)
        assert sum(rank.busy for rank in one.ranks) == pytest.approx(seconds, rel=1e-3)


class Checkpointed(nn.Module):
    """Layers that are run again by themselves, or not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()) for _ in range(4)
        )
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options) if self.options else layer(x)
        return x


def test_what_a_backward_makes_for_itself_is_no_activation() -> None:
    def activation(**options: Any) -> Any:
        stages = [nn.Linear(WIDTH, WIDTH), Checkpointed(**options)]
        return sizes_of(stages=stages).activation[1]

    # The stage's input and the loss's, and between them what each layer keeps.
    assert activation() == 9 * BOUNDARY
    for reentrant in (False, True):
        # Beside the inputs of the layers a checkpoint keeps the state of random numbers.
        assert 5 * BOUNDARY <= activation(use_reentrant=reentrant) < 9 * BOUNDARY


class Weighted(nn.Linear):
    """Has a matrix that is laid out otherwise, which its rows are multiplied by."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.matrix, Tensor)
        return torch.mm(self.matrix, super().forward(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_are_weighed_by_what_they_consist_of() -> None:
    rows = ROWS // MICROBATCHES
    first = nn.Linear(WIDTH, WIDTH)
    dense = sizes_of(stages=[first, nn.Linear(WIDTH, WIDTH)])
    diagonal = torch.arange(rows + 1), torch.arange(rows), torch.ones(rows)
    coo = torch.eye(rows).to_sparse_coo()
    csr = torch.sparse_csr_tensor(*diagonal, check_invariants=True)
    for matrix, size in ((coo, rows * (8 + 8 + 4)), (csr, (rows + 1) * 8 + rows * (8 + 4))):
        found = sizes_of(stages=[first, Weighted(matrix)])
        assert found.weight[1] == dense.weight[1] + size


def test_what_is_changed_before_its_backward_is_refused() -> None:
    class Changes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept = torch.tanh(super().forward(x))
            made = kept * kept
            kept.mul_(2)
            return made

    with executor([Changes(WIDTH, WIDTH)]) as traced:
        assert "modified by an inplace operation" in message_of(step, traced)


def test_activations_of_a_gpt_are_what_lives_between_forward_and_backward() -> None:
    config = gpt.Config(layers=2, width=32, heads=2, context=16)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = {s: gpt.build_stage(config, s, 2) for s in range(2)}
    x, y = torch.randint(gpt.BYTES, (2, 4, config.context))
    with Executor(schedule, stages, gpt.loss_fn, sgd, in_process=True, trace=True) as traced:
        for _ in range(2):
            traced.step(x, target=y)
        sizes: Any = traced.timelines()[-1].sizes
    given = x[:2]
    for stage, module in stages.items():
        with Live([*module.parameters(), given, y], least=0) as live:
            output = module(given)
            if stage:
                output = gpt.loss_fn(output, y[:2])
        # The first stage's output has been sent by then; what the second one gets is its own.
        kept = live.now() - output.untyped_storage().nbytes()
        assert sizes.activation[stage] == kept + (4 * given.numel() if stage else 0)
        given = output.detach().requires_grad_()


# What is made of stamps: BEGAN, ENDED, WAITED, FOUND of each action, in microseconds.
CHAIN = schedir.build("1f1b", ranks=2, microbatches=1)
STAMPS = """
    1000 1400    0    0
    1410    0    0    0
    2850    0    0    0
    3000 3500 2860 2990
    3600 3650 3590 3591
     900    0    0    0
    1700 2000 1000 1690
    2010 2700    0    0
    2800    0    0    0
    2900 2950 2890 2891
"""


def stamps_of(text: str) -> Any:
    return 1000 * np.array([[int(n) for n in row.split()] for row in text.strip().splitlines()])


def made_of(schedule: schedir.Schedule, text: str) -> tuple[list[float], list[float]]:
    """The starts and the ends, in microseconds."""
    found = timeline(schedule, stamps_of(text), None, Measured(0))
    return [np.round(1e6 * times, 3).tolist() for times in (found.starts, found.ends)]  # type: ignore[return-value]


def test_a_transfer_runs_from_its_later_post_until_who_waits_finds_it() -> None:
    starts, ends = made_of(CHAIN, STAMPS)
    assert starts == [0, 410, 1850, 2000, 2600, 410, 700, 1010, 1850, 1900]
    assert ends == [400, 690, 1990, 2500, 2650, 690, 1000, 1700, 1990, 1950]


def test_nobody_knows_when_something_came_that_was_there() -> None:
    text = STAMPS.replace("1700 2000 1000 1690", "1700 2000 1685 1690")
    starts, ends = made_of(CHAIN, text)
    assert starts[1] == starts[5] == 410
    assert np.isnan([ends[n] for n in (1, 5, 2, 8)]).tolist() == [True, True, False, False]


def test_a_transfer_takes_no_less_than_no_time() -> None:
    starts, ends = made_of(CHAIN, STAMPS.replace("1410    0", "1695    0"))
    assert starts[1] == ends[1] == 690


SUMMED = listed(2, "0,1", "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", "0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP")
SUMMED_STAMPS = """
    1000 1400    0    0
    1400 2000    0    0
    2010    0 2020 2480
    2500 2600    0    0
    1100 1500    0    0
    1500 2200    0    0
    2210    0 2220 2460
    2470 2600    0    0
"""


def test_a_sum_runs_from_its_last_post_until_who_waits_finds_it() -> None:
    starts, ends = made_of(SUMMED, SUMMED_STAMPS)
    assert starts == [0, 400, 1210, 1500, 100, 500, 1210, 1470]
    assert ends == [400, 1000, 1460, 1600, 500, 1200, 1460, 1600]
    # A rank that finds it there has not seen it end.
    starts, ends = made_of(SUMMED, SUMMED_STAMPS.replace("2220 2460", "2455 2460"))
    assert ends[2] == ends[6] == 1480


def test_what_was_not_posted_has_no_time() -> None:
    starts, ends = made_of(CHAIN, STAMPS.replace("900    0    0    0", "0    0    0    0"))
    assert np.isnan([starts[1], starts[5], ends[1], ends[5]]).all()
    assert ends[6] == 1000


class FarClock(Host):
    """A device with a clock of its own, which is fast; `true` is the host's, in nanoseconds."""

    queues = True
    true = 10**16

    def now(self) -> int:
        """To look at a clock takes a while."""
        self.true += 200
        return self.true

    def mark(self, timed: bool = False) -> Any:
        return FarMark(self.now())


class FarMark:
    """A moment on it; between two of them it tells no more digits than a float has."""

    def __init__(self, true: int) -> None:
        self.true = true

    def synchronize(self) -> None:
        """It is over."""

    def wait(self) -> None:
        """So it is for others."""

    def elapsed_time(self, end: FarMark) -> float:
        return float(np.float32(1.0001 * (end.true - self.true) / 1e6))


def test_what_has_waited_begins_where_its_wait_ends() -> None:
    device = FarClock(torch.device("cpu"))
    found = Recorder(device, traces=True)
    pair = []
    for action in (schedir.forward(0, 0), schedir.backward(1, 0)):
        works: list[Any] = [device.mark()]
        wait = waiting(works, [])
        pair.append(Instruction(0, 0, 0, action, nothing, wait, works, computes=True))
    begun = device.true
    for one in map(found, (wait_of(pair[1]), *pair)):
        if one.receives and one.wait is not None:
            one.wait()
        one.run()
    marks: Any = found.take().marks
    times = [(mark.true - begun) // 200 if mark else None for mark in marks]
    # BEGAN, ENDED, WAITED, FOUND of each: what a wait ends with is the event for what follows.
    assert times == [6, 7, 1, 2, 4, 5, 3, 4]


@pytest.mark.parametrize("pause", [10**9, 600 * 10**9])
def test_times_of_a_device_are_placed_on_the_clock_of_its_host(
    monkeypatch: pytest.MonkeyPatch, pause: int
) -> None:
    device = FarClock(torch.device("cpu"))
    monkeypatch.setattr(trace, "now", device.now)
    found = Recorder(device, traces=True)
    first = found.anchor()
    steps: list[Any] = []
    for _ in range(100):
        device.true += pause
        began = device.mark()
        marks: list[Any] = [FarMark(began.true + 10**7 * n) for n in range(4)]
        steps.append((began, Taken([*marks, None], ())))
    last = found.anchor()
    assert first.error == 200
    read, error = found.read(steps, first, last)
    assert error <= 200 + 101 * (31 if pause == 10**9 else 31_250)
    for (_, taken), times in zip(steps, read, strict=True):
        *marks, _ = taken.marks
        assert np.abs(times[:-1] - [mark.true for mark in marks]).max() <= error
        assert times[-1] == 0
