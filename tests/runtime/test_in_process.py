"""All ranks in one process, and what the executor offers beside its step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.built_in import NAMES
from tests.runtime.kit import (
    MSE,
    Calls,
    Twins,
    assert_equal_stages,
    linear_stages,
    numbered,
    random_batch,
    random_batches,
    refused,
    sgd,
)

ONE, TWO = (schedir.build("1f1b", ranks=ranks, microbatches=2) for ranks in (1, 2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"schedule": "1f1b"}, r"must be a Schedule, not str; make one with schedir\.build"),
        ({"schedule": TWO, "in_process": True}, r"all stages are needed, 0\.\.1"),
        ({"stages": [nn.Linear(2, 2)]}, "stages must map each stage's number to its module"),
        ({"optimizer": 0.1}, "optimizer must be a function .* not float"),
        ({"optimizer": lambda parameters: None}, "must return an optimizer, not NoneType"),
        ({"clip_grad_norm": -1.0}, r"at least 0, not -1\.0"),
        ({"clip_grad_norm": float("nan")}, "at least 0, not nan"),
        ({"clip_grad_norm": "1"}, "at least 0, not '1'"),
        ({"ties": [(0, 1)]}, r"list of copies \(stage, name in its module\), not \(0, 1\)"),
        ({"ties": [[[0, "weight"]]]}, r"not \[\[0, 'weight'\]\]"),
        ({"seed": 1.5}, r"seed must be an integer, not 1\.5"),
        ({"recompute": 1}, "True, False or a list of stages, not 1"),
        ({"boundaries": {9: torch.ones(1)}}, r"there is no stage 9, only 0\.\.0"),
        ({"loss_fn": None}, "loss_fn must be a function .* not NoneType"),
        ({"loss_fn": "mean"}, "loss_fn must be a function .* not str"),
        ({"loss_fn": nn.MSELoss}, "loss_fn must be a function .* not <class .*MSELoss"),
        ({"loss_fn": nn.MSELoss(reduction="sum")}, 'use reduction="mean", and pass count='),
        ({"loss_fn": partial(MSE, reduction="sum")}, 'use reduction="mean", and pass count='),
        (
            {"loss_fn": nn.CrossEntropyLoss(weight=torch.ones(2))},
            r"class weights .* pass count=lambda target: weight\[target\]\.sum\(\), or count=len",
        ),
        (
            {"loss_fn": partial(nn.functional.nll_loss, weight=torch.ones(2), ignore_index=1)},
            r"count=lambda target: weight\[target\[target != 1\]\]\.sum\(\)",
        ),
        (
            {"loss_fn": nn.NLLLoss(ignore_index=1)},
            r"targets that are not 1, .* count=lambda target: \(target != 1\)\.sum\(\)",
        ),
        (
            {"optimizer": lambda parameters: sgd(nn.Linear(3, 3).parameters())},
            r"SGD, of stage 0, steps 2 parameters .* not the stage's, .* float32\[3, 3\]",
        ),
        ({"stages": {0: nn.Linear(2, 2, device="meta")}}, "on the device meta, .*to_empty"),
        ({"stages": {0: nn.LazyLinear(2)}}, "lazy; .* run the module once on an example"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    right: dict[str, Any] = {
        "schedule": ONE,
        "stages": {0: nn.Linear(2, 2)},
        "loss_fn": MSE,
        "optimizer": sgd,
    }
    with refused(text):
        Executor(**right | arguments)


def test_wrong_batches_are_named_and_leave_nothing_behind() -> None:
    x = torch.zeros(4, 2)
    with Executor(ONE, {0: nn.Linear(2, 2)}, MSE) as executor:
        before = executor.evaluate(x, target=x).loss
        with refused("stage 0, which runs here, needs target"):
            executor.step(x)
        with refused(r"expected a tensor.*not ndarray"):
            executor.step(x.numpy(), target=x)
        with refused('use reduction="mean"'):
            executor.step(x, target=x, loss_kwargs={"reduction": "sum"})
        with refused("rows differ: inputs 4, target 1"):
            executor.evaluate(x, target=x[:1], stage_inputs={0: torch.ones(4, 1)})
        with refused("dict of keyword arguments"):
            executor.evaluate(x, target=x, loss_kwargs=[{"reduction": "mean"}, 3])
        assert executor.evaluate(x, target=x).loss == executor.step(x, target=x).loss == before
    for late in (executor.step, executor.evaluate):
        with refused("this executor is closed"):
            late(x, target=x)


SCALAR = "0F0: loss_fn must return a real scalar tensor, the microbatch's mean, not"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"count": lambda _: torch.ones(2)}, r"a number, or .* of one, not torch\.float32\[2\]"),
        ({"count": lambda _: None}, "a number, or a tensor of one, not NoneType"),
        ({"count": lambda _: float("nan")}, "count returns nan for a microbatch; .* be finite"),
        ({"count": lambda _: float("inf")}, "count returns inf for a microbatch; .* be finite"),
        ({"count": lambda _: 0}, r"microbatches \[0, 1\] hold no samples at all"),
        ({"loss_fn": lambda y, _: y.mean() * 1j}, rf"{SCALAR} torch.complex64 of shape \[\]"),
        ({"loss_fn": lambda y, _: y}, rf"{SCALAR} torch.float32 of shape \[2, 2\]"),
        ({"loss_fn": lambda y, _: y.mean().item()}, f"{SCALAR} float"),
        ({"loss_fn": lambda y, _: None}, f"{SCALAR} NoneType"),
    ],
)
def test_a_wrong_count_or_loss_is_named(options: dict[str, Any], text: str) -> None:
    x = torch.zeros(4, 2)
    given: dict[str, Any] = {"loss_fn": MSE, **options}
    with Executor(ONE, {0: nn.Linear(2, 2)}, **given) as executor, refused(text):
        executor.step(x, target=x)


def test_a_loss_that_is_no_sum_is_taken() -> None:
    """What divides by rows, weights or not, and what was told that it is meant so."""
    weight = torch.ones(2)
    for loss_fn in (nn.BCEWithLogitsLoss(weight), nn.KLDivLoss(reduction="batchmean"), MSE):
        Executor(ONE, {0: nn.Linear(2, 2)}, loss_fn).close()
    Executor(ONE, {0: nn.Linear(2, 2)}, nn.CrossEntropyLoss(weight), count=len).close()
    Executor(ONE, {0: nn.Linear(2, 2)}, nn.CrossEntropyLoss()).close()


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_without_an_update_gradients_accumulate(name: str) -> None:
    schedule = schedir.build(name, ranks=3, microbatches=4)
    twins = Twins(linear_stages(3), schedule, optimizer=sgd)
    with twins.executor() as executor:
        for x, y in random_batches(2):
            executor.step(x, target=y, update=False)
            twins.accumulate((x, y))
            twins.assert_equal_gradients()
        twins.assert_equal()
        if name == "1f1b":
            executor.step(x, target=y)
            twins.step((x, y))
            twins.assert_equal()


def test_a_shape_that_was_not_agreed_is_said_with_both_sides() -> None:
    schedule = schedir.build("fill-drain", ranks=2, microbatches=1)
    repeats = [1]
    stages = {0: Calls(lambda x: x.repeat(repeats[-1], 1)), 1: nn.Linear(2, 2)}
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        executor.step(torch.randn(2, 2), target=torch.randn(2, 2))
        repeats.append(2)
        text = r"rank 0 #0 0F0: the stage returned float32\[4, 2\], but float32\[2, 2\] was agreed"
        with refused(text):
            executor.step(torch.randn(2, 2), target=torch.randn(2, 2))


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_is_plain_and_leaves_no_trace(name: str) -> None:
    """Beside dropout, and statistics that training updates and evaluation reads."""
    schedule = schedir.build(name, ranks=2, microbatches=3)
    torch.manual_seed(3)
    stages = numbered(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        for _ in range(schedule.stages)
    )
    x, y = random_batch(7)  # an uneven batch: 3, 2 and 2 rows
    twins = copy.deepcopy(stages)
    with (
        Executor(schedule, stages, MSE, sgd, in_process=True) as executor,
        Executor(schedule, twins, MSE, sgd, in_process=True) as undisturbed,
    ):
        for inputs, target in random_batches(3, 9):
            executor.step(inputs, target=target)
            before, state = copy.deepcopy([*stages.values()]), torch.get_rng_state()
            found = executor.evaluate(x, target=y).loss
            assert torch.equal(state, torch.get_rng_state())
            assert_equal_stages(stages, before)
            assert all(stage.training for stage in stages.values())
            assert all(p.grad is None for stage in stages.values() for p in stage.parameters())
            model = nn.Sequential(*before).eval()
            with torch.no_grad():
                pieces = zip(x.tensor_split(3), y.tensor_split(3), strict=True)
                plain = sum(len(a) * float(MSE(model(a), b)) for a, b in pieces) / len(x)
            assert found == plain
            undisturbed.step(inputs, target=target)
    assert_equal_stages(stages, [*twins.values()])


def test_a_loss_that_is_read_late_is_that_of_its_step() -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.bias

    by_quarters = partial(torch.optim.SGD, lr=0.25)
    x = torch.zeros(4, 1)
    with Executor(ONE, {0: Bias()}, lambda output, target: output, by_quarters) as executor:
        results = [executor.step(x, target=x) for _ in range(3)]
    assert [result.loss for result in results] == [1.0, 0.75, 0.5]  # the parameter itself

    buffer = torch.zeros(())
    with Executor(ONE, {0: nn.Identity()}, lambda _, y: buffer.copy_(y.mean())) as executor:
        results = [executor.evaluate(x, target=x + value) for value in (1.0, 2.0)]
    assert [result.loss for result in results] == [1.0, 2.0]


def test_evaluation_tells_modules_of_their_mode() -> None:
    class Told(nn.Linear):
        told: list[bool]

        def train(self, mode: bool = True) -> Told:
            self.told.append(mode)
            return super().train(mode)

    told = Told(2, 2)
    told.told = []
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    frozen[1].eval()  # a mode of its own, that of no parent
    x, y = torch.randn(2, 4, 2)
    with Executor(TWO, {0: told, 1: frozen}, MSE, in_process=True) as executor:
        executor.evaluate(x, target=y)
        assert told.told == [False, True]
        assert [m.training for m in frozen.modules()] == [True, True, False]


def test_a_failure_names_its_action_and_eval_mode_ends() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and type(x) is Tensor:
                raise ValueError("not like this")
            return x * 1.0

    stages: dict[int, nn.Module] = {0: nn.Linear(3, 3), 1: Fails()}
    x, y = torch.randn(2, 4, 3)
    with Executor(TWO, stages, MSE, in_process=True) as executor:
        executor.step(x, target=y)
        with refused("rank 1 #1 1F0: ValueError: not like this") as error:
            executor.evaluate(x, target=y)
        assert error.value.rank == 1
        assert all(m.training for m in stages.values())


def test_after_a_failure_the_next_step_finds_nothing_of_it() -> None:
    class Fails(nn.Linear):
        failing = True

        def forward(self, x: Tensor) -> Tensor:
            if self.failing and type(x) is Tensor:
                raise ValueError("not now")
            return super().forward(x)

    last = Fails(4, 4)
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    twins = Twins([nn.Linear(4, 4), last], schedule)
    x, y = random_batch(6)
    with twins.executor(optimizer=None) as executor:
        with refused("rank 1 #1 1F0: ValueError: not now"):
            executor.step(x, target=y)
        Fails.failing = False
        executor.step(x, target=y)
    twins.accumulate((x, y))
    twins.assert_equal_gradients()


def test_a_shape_that_fails_spoils_no_other() -> None:
    with Executor(TWO, numbered(linear_stages()), MSE, in_process=True) as executor:
        for rows, width in ((4, 4), (4, 5), (6, 4), (4, 4)):
            fails = refused("0F0: RuntimeError: mat1 and mat2") if width == 5 else nullcontext()
            with fails:
                executor.step(torch.randn(rows, width), target=torch.randn(rows, 4))


def test_a_profile_names_the_actions() -> None:
    x, y = random_batch(4)
    with Executor(TWO, numbered(linear_stages()), MSE, in_process=True) as executor:
        executor.step(x, target=y)
        with torch.profiler.profile() as profile:
            executor.step(x, target=y)
    named = {event.key for event in profile.key_averages()}
    assert {str(a) for own in TWO.flat for a in own if a.microbatch is not None} <= named
