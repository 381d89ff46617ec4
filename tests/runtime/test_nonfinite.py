"""NaN and infinity in a random stage, microbatch and direction: found, named, never applied."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import ExecutionError, Kind
from schedir.graph.compile import graph_of
from schedir.runtime import Executor
from schedir.runtime.plan import steps_last
from tests.built_in import EVERY
from tests.runtime.kit import (
    MSE,
    adamw,
    assert_equal_stages,
    everyone,
    linear_stages,
    message_of,
    numbered,
    random_batch,
    random_batches,
    sgd,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import pipelines

BAD = (math.nan, math.inf, -math.inf)
MICROBATCHES = 4


class Spoil(torch.autograd.Function):
    """Multiplies an element of what goes forward, and of the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return spoiled(x, forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return spoiled(grads[0], ctx.backward_factor), None, None


def spoiled(x: Tensor, value: float) -> Tensor:
    y = x.clone()
    if value != 1:
        y.view(-1)[0] = value
    return y


class Stage(nn.Module):
    """A layer whose output, or its gradient, is spoiled for a microbatch; it runs them in order."""

    def __init__(self, order: Sequence[int], number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer = nn.Linear(4, 4)
        self.order, self.ran = order, 0
        self.bad: tuple[str, int, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if type(x) is not Tensor or self.bad is None:
            return y
        m, self.ran = self.order[self.ran], self.ran + 1
        direction, microbatch, value = self.bad
        if m != microbatch:
            return y
        changed: Tensor = Spoil.apply(  # type: ignore[no-untyped-call]
            y, value if direction == "forward" else 1.0, value if direction == "backward" else 1.0
        )
        return changed


class Loss:
    """The mean squared error, with something added to that of a microbatch."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.ran = order, 0
        self.bad: tuple[int, float] | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = MSE(output, target)
        if type(output) is not Tensor or self.bad is None:
            return loss
        m, self.ran = self.order[self.ran], self.ran + 1
        return loss + self.bad[1] if m == self.bad[0] else loss


class Trial:
    """A schedule's stages, where a random place can be spoiled for one call."""

    def __init__(self, schedule: schedir.Schedule) -> None:
        self.schedule = schedule
        orders = [
            [a.microbatch for a in schedule.flat[held[0]] if (a.kind, a.stage) == (Kind.FORWARD, s)]
            for s, held in enumerate(schedule.placement)
        ]
        self.stages = [Stage(order, s) for s, order in enumerate(orders)]  # type: ignore[arg-type]
        self.loss = Loss(orders[-1])  # type: ignore[arg-type]
        self.applied: list[Tensor] = []

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """One that says what it applies."""
        made = adamw(parameters)

        def keep(optimizer: Any, *_: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.applied.extend(p.grad.clone() for p in params if p.grad is not None)

        made.register_step_pre_hook(keep)
        return made

    @contextmanager
    def spoiling(self, direction: str, stage: int, microbatch: int, value: float) -> Iterator[None]:
        self.applied.clear()
        if direction == "loss":
            self.loss.bad, self.loss.ran = (microbatch, value), 0
        else:
            self.stages[stage].bad, self.stages[stage].ran = (direction, microbatch, value), 0
        try:
            yield
        finally:
            self.loss.bad = self.stages[stage].bad = None
        assert all(bool(grad.isfinite().all()) for grad in self.applied)
        assert all(bool(p.isfinite().all()) for p in self.parameters())

    def parameters(self) -> Iterator[Tensor]:
        return (p for stage in self.stages for p in stage.parameters())

    def step_of(self, stage: int, microbatch: int) -> tuple[int, int]:
        """The OPTIM_STEP that applies a microbatch."""
        flow = graph_of(self.schedule)
        return stage, int(flow.turn[flow.weight_gradients[stage, microbatch]])

    def alone(self, stage: int, microbatch: int) -> bool:
        """Whether that applies no other."""
        own = self.step_of(stage, microbatch)
        return [self.step_of(stage, m) for m in range(MICROBATCHES)].count(own) == 1


def built(name: str) -> schedir.Schedule:
    return schedir.build(name, ranks=2, microbatches=MICROBATCHES)


# With one copy of each stage, whose microbatches then come in the order of its list.
NAMES = [name for name in EVERY if all(len(held) == 1 for held in built(name).placement)]


def drawn(name: str, direction: str, stages: int) -> tuple[int, int, float]:
    chance = random.Random(f"{name} {direction}")
    return chance.randrange(stages), chance.randrange(MICROBATCHES), chance.choice(BAD)


def test_there_are_enough_places() -> None:
    assert 3 * len(NAMES) >= 25


def options(**more: Any) -> dict[str, Any]:
    return {"in_process": True, **more}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_and_not_applied(name: str) -> None:
    trial = Trial(built(name))
    schedule = trial.schedule
    once = steps_last(schedule)
    x, y = random_batch()
    stages = numbered(trial.stages)
    with Executor(schedule, stages, trial.loss, trial.optimizer, **options()) as executor:
        executor.step(x, target=y)
        for direction in ("forward", "loss", "backward"):
            stage, m, value = drawn(name, direction, schedule.stages)
            before = copy.deepcopy(trial.stages)
            with (
                trial.spoiling(direction, stage, m, value),
                pytest.raises(ExecutionError) as caught,
            ):
                executor.step(x, target=y)
            said = str(caught.value)
            if direction == "backward":
                assert f"the gradient of layer.bias of stage {stage} has" in said
                assert (f"by microbatch {m}," in said) is trial.alone(stage, m)
            else:
                assert f"the loss of microbatch {m} is" in said
            if once:
                assert caught.value.rank is not None
                held = schedule.stages_of(caught.value.rank)
                assert_equal_stages({s: trial.stages[s] for s in held}, before)
            executor.optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_skipped_changes_nothing(name: str) -> None:
    trial, twin = Trial(built(name)), Trial(built(name))
    schedule = trial.schedule
    once = steps_last(schedule)
    given = options(nonfinite="skip")
    with (
        Executor(
            schedule, numbered(trial.stages), trial.loss, trial.optimizer, **given
        ) as executor,
        Executor(schedule, numbered(twin.stages), twin.loss, adamw, **given) as other,
    ):
        for number, direction in enumerate(("forward", "loss", "backward")):
            x, y = random_batch(seed=number)
            assert executor.step(x, target=y).skipped == other.step(x, target=y).skipped == ()
            stage, m, value = drawn(name, direction, schedule.stages)
            with trial.spoiling(direction, stage, m, value):
                result = executor.step(x, target=y)
            assert math.isfinite(result.loss) is (direction == "backward")
            concerned = range(stage + 1 if direction == "backward" else schedule.stages)
            if once:
                assert result.skipped == tuple((s, 0) for s in range(schedule.stages))
                assert not trial.applied
                assert_equal_stages(numbered(trial.stages), twin.stages)
            else:
                assert result.skipped == tuple(sorted(trial.step_of(s, m) for s in concerned))
            assert all(p.grad is None for p in trial.parameters())


def test_ignored_it_is_applied() -> None:
    schedule, stages = built("1f1b"), linear_stages()
    x, y = random_batch()
    with Executor(
        schedule, numbered(stages), MSE, sgd, nonfinite="ignore", in_process=True
    ) as executor:
        result = executor.step(x * math.nan, target=y)
    assert math.isnan(result.loss)
    assert all(bool(p.isnan().any()) for stage in stages for p in stage.parameters())


class Given(torch.autograd.Function):
    """Nothing of a parameter, with the gradient that is given."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


class Holds(nn.Module):
    """Has a parameter whose gradient is what `grad` says."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.layer, self.odd = nn.Linear(4, 4), nn.Parameter(parameter)
        self.grad = torch.zeros_like(parameter)

    def forward(self, x: Tensor) -> Tensor:
        nothing: Tensor = Given.apply(self.odd, self.grad)  # type: ignore[no-untyped-call]
        y: Tensor = self.layer(x) + nothing
        return y


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [3, 5000])
def test_gradients_of_any_type_and_size(dtype: torch.dtype, size: int) -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=1)
    stage = Holds(torch.zeros(size, dtype=dtype))
    x, y = random_batch()
    with Executor(schedule, {0: stage}, MSE, plain_sgd) as executor:
        largest = torch.finfo(dtype).max if not dtype.is_complex else 3e38
        for value in (1.0, largest):  # whose sum is infinite
            stage.grad = torch.full((size,), value, dtype=dtype)
            executor.step(x, target=y)
        for value in BAD:
            stage.grad = torch.ones(size, dtype=dtype)
            stage.grad[-1] = value
            before = copy.deepcopy(stage)
            kind = "NaN" if math.isnan(value) else "infinity"
            with pytest.raises(ExecutionError, match=f"odd of stage 0 has {kind}"):
                executor.step(x, target=y)
            assert_equal_stages({0: stage}, [before])
            executor.optimizer.zero_grad()


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_sparse_gradients_and_those_that_share_memory(value: float) -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=1)

    def embeds(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 4))

    x, y = torch.arange(8), torch.ones(8, 4)
    for stage in (embeds(True), embeds(False)):
        first = next(stage.parameters())
        with Executor(schedule, {0: stage}, MSE, plain_sgd) as executor:
            executor.step(x, target=y)
            if first.grad is None and value != 1.0:
                first.register_hook(lambda grad: grad * value)
                with pytest.raises(ExecutionError, match=r"0\.weight of stage 0 has NaN"):
                    executor.step(x, target=y)

    def expand(parameter: nn.Parameter) -> None:
        parameter.grad = torch.full((), value).expand(4)

    stage = nn.Linear(4, 4)
    stage.bias.register_post_accumulate_grad_hook(expand)
    with Executor(schedule, {0: stage}, MSE, plain_sgd) as executor:
        if value == 1.0:
            executor.step(torch.ones(4, 4), target=y[:4])
        else:
            with pytest.raises(ExecutionError, match="bias of stage 0 has NaN"):
                executor.step(torch.ones(4, 4), target=y[:4])


def test_half_precision_that_overflows_is_skipped() -> None:
    schedule = built("1f1b")
    stages = [stage.half() for stage in linear_stages()]
    x, y = (t.half() for t in random_batch())
    before = copy.deepcopy(stages)
    with Executor(
        schedule, numbered(stages), MSE, sgd, nonfinite="skip", in_process=True
    ) as executor:
        result = executor.step(x, target=y * 1000)  # whose square is above 65504
        assert result.loss == math.inf
        assert result.skipped == ((0, 0), (1, 0))
        assert_equal_stages(numbered(stages), before)
        assert executor.step(x, target=y).skipped == ()


def enormous(output: Tensor, target: Tensor) -> Tensor:
    """Gradients of 1e30 each, which are finite; their squares are not."""
    return (output * 1e30).sum()


def test_a_norm_that_overflows_is_not_clipped_by() -> None:
    schedule, stages = built("1f1b"), linear_stages()
    before = copy.deepcopy(stages)
    x, y = random_batch()
    given: dict[str, Any] = {"in_process": True, "clip_grad_norm": 1.0}
    with Executor(schedule, numbered(stages), enormous, sgd, **given) as executor:
        with pytest.raises(ExecutionError, match=r"the norm of the gradients of .* is not finite"):
            executor.step(x, target=y)
        executor.optimizer.zero_grad()
    with Executor(schedule, numbered(stages), enormous, sgd, nonfinite="skip", **given) as executor:
        assert executor.step(x, target=y).skipped == ((0, 0), (1, 0))
        assert all(p.grad is None for stage in stages for p in stage.parameters())
    assert_equal_stages(numbered(stages), before)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_clipping_never_scales_by_it(nonfinite: str) -> None:
    trial = Trial(built("interleaved-1f1b"))
    x, y = random_batch()
    given = options(nonfinite=nonfinite, clip_grad_norm=0.5)
    stages = numbered(trial.stages)
    with Executor(trial.schedule, stages, trial.loss, trial.optimizer, **given) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(trial.stages)
        with trial.spoiling("backward", 2, 1, math.nan):
            if nonfinite == "skip":
                assert len(executor.step(x, target=y).skipped) == 4
            else:
                with pytest.raises(ExecutionError, match="of stage 2 has NaN"):
                    executor.step(x, target=y)
        assert_equal_stages(stages, before)
        executor.optimizer.zero_grad()
        assert executor.step(x, target=y).skipped == ()


def test_a_microbatch_without_samples_has_no_loss_to_look_at() -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = numbered(linear_stages())
    x, y = random_batch()[0], torch.tensor([0, 1, 2, 3] + [-100] * 4)
    loss = nn.functional.cross_entropy

    def count(target: Tensor) -> Tensor:
        return (target >= 0).sum()

    for nonfinite in ("raise", "skip"):
        with Executor(
            schedule, stages, loss, sgd, count=count, nonfinite=nonfinite, in_process=True
        ) as executor:
            result = executor.step(x, target=y)
            assert math.isnan(result.losses[1])
            assert not result.skipped


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_without_an_update_the_loss_alone_is_looked_at(optimizer: Any) -> None:
    schedule, stages = built("1f1b"), linear_stages()
    x, y = random_batch()
    with Executor(schedule, numbered(stages), MSE, optimizer, in_process=True) as executor:
        with pytest.raises(ExecutionError, match="the loss of microbatch 3 is inf"):
            executor.step(x, target=torch.cat([y[:-1], y[-1:] * math.inf]), update=False)
        for stage in stages:
            stage.zero_grad()
        (parameter,) = list(stages[0].parameters())[:1]
        handle = parameter.register_hook(lambda grad: grad * math.nan)
        executor.step(x, target=y, update=False)
        handle.remove()
        assert math.isfinite(executor.evaluate(x, target=y).loss)
        assert math.isnan(executor.evaluate(x * math.nan, target=y).loss)
        if optimizer is not None:
            with pytest.raises(ExecutionError, match=r"0\.weight of stage 0 has NaN, so"):
                executor.step(x, target=y)


def test_gradients_that_came_before_are_of_no_microbatch() -> None:
    schedule = schedir.build("1f1b", ranks=1, microbatches=1)
    stage = nn.Linear(4, 4)
    x, y = random_batch()
    with Executor(schedule, {0: stage}, MSE, sgd) as executor:
        handle = stage.bias.register_hook(lambda grad: grad * math.nan)
        executor.step(x, target=y, update=False)
        handle.remove()
        with pytest.raises(ExecutionError, match="bias of stage 0 has NaN, so"):
            executor.step(x, target=y)
        stage.zero_grad()
        executor.step(x, target=y)
        stage.bias.register_hook(lambda grad: grad * math.nan)
        with pytest.raises(ExecutionError, match="bias of stage 0 has NaN by microbatch 0, so"):
            executor.step(x, target=y)


def test_tied_copies_skip_together() -> None:
    schedule, stages = built("1f1b"), linear_stages()
    stages[1].get_parameter("0.weight").data.copy_(stages[0].get_parameter("0.weight"))
    x, y = random_batch()
    given: dict[str, Any] = {"ties": [[(0, "0.weight"), (1, "0.weight")]], "in_process": True}
    with Executor(schedule, numbered(stages), MSE, sgd, nonfinite="skip", **given) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(stages)
        biases = [stage.get_parameter("0.bias") for stage in stages]
        for bias in biases:  # which are not tied
            handle = bias.register_hook(lambda grad: grad * math.inf)
            assert executor.step(x, target=y).skipped == ((0, 0), (1, 0))
            handle.remove()
            assert_equal_stages(numbered(stages), before)


def test_parameters_of_the_loss_are_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return MSE(output * self.scale, target)

    loss = Scaled()
    loss.scale.register_hook(lambda grad: grad * math.nan)
    x, y = random_batch()
    with (
        Executor(built("1f1b"), numbered(linear_stages()), loss, sgd, in_process=True) as executor,
        pytest.raises(ExecutionError, match="the gradient of scale of the loss has NaN"),
    ):
        executor.step(x, target=y)


def test_what_the_optimizer_does_not_step_is_not_looked_at() -> None:
    stage = nn.Linear(4, 4)
    stage.bias.register_hook(lambda grad: grad * math.nan)
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    x, y = random_batch()
    with Executor(schedule, {0: stage}, MSE, lambda p: sgd([next(iter(p))])) as executor:
        executor.step(x, target=y)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nonfinite": True}, "nonfinite must be one of 'raise', 'skip', 'ignore', not True"),
        ({"nonfinite": "skip", "optimizer": None}, "so it needs an optimizer"),
        (
            {"nonfinite": "skip", "ties": [[(0, "0.weight"), (1, "0.weight")]]},
            'nonfinite="skip" with ties= needs all gradients before any rank steps',
        ),
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, Any], text: str) -> None:
    if "ties" in given:
        schedule = schedir.build(
            "pipedream", ranks=2, microbatches=MICROBATCHES, vertical_sync=True
        )
    else:
        schedule = built("1f1b")
    with pytest.raises(ExecutionError, match=text):
        Executor(
            schedule,
            numbered(linear_stages()),
            MSE,
            **{"optimizer": sgd, "in_process": True, **given},
        )


def test_skipping_needs_the_updates() -> None:
    x, y = random_batch()
    stages = numbered(linear_stages())
    with Executor(built("1f1b"), stages, MSE, sgd, nonfinite="skip", in_process=True) as executor:
        with pytest.raises(ExecutionError, match="update=False"):
            executor.step(x, target=y, update=False)
        executor.step(x, target=y)


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("direction", ["forward", "loss", "backward"])
def test_all_ranks_skip_or_none(rank: int, direction: str, clip: float | None) -> None:
    trial = Trial(built("interleaved-1f1b"))
    schedule = trial.schedule
    stages = {s: trial.stages[s] for s in schedule.stages_of(rank)}
    given: dict[str, Any] = {"nonfinite": "skip", "clip_grad_norm": clip, "timeout": 60.0}
    with Executor(schedule, stages, trial.loss, trial.optimizer, **given) as executor:
        for number, (x, y) in enumerate(random_batches(3)):
            executor.step(x, target=y)
            before = copy.deepcopy(trial.stages)
            with trial.spoiling(direction, 1, 2, BAD[number]):
                result = executor.step(x, target=y)
            assert result.skipped == tuple((s, 0) for s in stages)
            assert_equal_stages(stages, before)


@on_ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
@pytest.mark.parametrize("direction", ["forward", "loss", "backward"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_rank_that_finds_it_has_applied_nothing(
    rank: int, name: str, direction: str, clip: float | None
) -> None:
    if clip is not None and name == "pipedream":
        return
    trial = Trial(built(name))
    stages = {rank: trial.stages[rank]}
    x, y = random_batch()
    given: dict[str, Any] = {"clip_grad_norm": clip, "timeout": 60.0}
    with Executor(trial.schedule, stages, trial.loss, trial.optimizer, **given) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(trial.stages)
        with trial.spoiling(direction, 1, 0, math.inf):
            said = message_of(executor.step, x, target=y)
        if rank == 1:
            assert_equal_stages(stages, before)
        found = "the loss of microbatch 0 is" if direction != "backward" else "of stage 1 has"
        assert found in said or "of stage 0 has" in said
        assert "is broken" in message_of(executor.step, x, target=y)


@on_ranks(2)
def test_the_rank_that_finds_it_says_so_before_all_take_the_norm(rank: int) -> None:
    trial = Trial(built("1f1b"))
    stages = {rank: trial.stages[rank]}
    x, y = random_batch()
    given: dict[str, Any] = {"clip_grad_norm": 0.5, "timeout": 60.0}
    with Executor(trial.schedule, stages, trial.loss, trial.optimizer, **given) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(trial.stages)
        with trial.spoiling("backward", 0, 3, math.inf):
            said = message_of(executor.step, x, target=y)
        assert "the gradient of layer.bias of stage 0 has infinity" in said
        assert_equal_stages(stages, before)


REPLICATED = {"dualpipe": 2, "chimera": 2, "1f1b-rr": 3}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_in_one_process_find_the_same(name: str) -> None:
    schedule = schedir.build(name, ranks=REPLICATED[name], microbatches=MICROBATCHES)
    assert any(len(held) > 1 for held in schedule.placement)
    x, y = random_batch()
    for m in range(MICROBATCHES):
        bad = y.clone()
        bad[2 * m] = math.nan
        for rule in ("skip", "raise"):
            stages = numbered(linear_stages(schedule.stages))
            before = copy.deepcopy(stages)
            with Executor(
                schedule, stages, MSE, adamw, nonfinite=rule, in_process=True
            ) as executor:
                if rule == "raise":
                    with pytest.raises(ExecutionError, match=f"the loss of microbatch {m} is nan"):
                        executor.step(x, target=bad)
                    continue
                flow = graph_of(schedule)
                turns = flow.turn[flow.weight_gradients[:, m]].tolist()
                due = tuple(enumerate(turns))
                result = executor.step(x, target=bad)
                assert result.skipped == due
                if steps_last(schedule):
                    assert_equal_stages(stages, [before[s] for s in stages])
                assert all(
                    bool(p.isfinite().all()) for s in stages.values() for p in s.parameters()
                )
                assert executor.step(x, target=y).skipped == ()


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_replicas_skip_alike(rank: int, clip: float | None) -> None:
    """Though the loss of a microbatch is that of one rank."""
    schedule = schedir.build("dualpipe", ranks=2, microbatches=MICROBATCHES)
    whole = linear_stages(schedule.stages)
    stages = {s: whole[s] for s in schedule.stages_of(rank)}
    x, y = random_batch()
    given: dict[str, Any] = {"nonfinite": "skip", "clip_grad_norm": clip, "timeout": 60.0}
    with Executor(schedule, stages, MSE, adamw, **given) as executor:
        for m in range(MICROBATCHES):
            executor.step(x, target=y)
            before = copy.deepcopy(whole)
            bad = y.clone()
            bad[2 * m] = math.inf
            assert executor.step(x, target=bad).skipped == tuple((s, 0) for s in stages)
            assert_equal_stages(stages, before)
    own = {s: [p.tolist() for p in module.parameters()] for s, module in stages.items()}
    assert everyone(own) == [own] * 2


@on_ranks(2)
def test_ranks_with_different_rules_are_refused(rank: int) -> None:
    stages = {rank: linear_stages()[rank]}
    rule = ("raise", "skip")[rank]
    said = message_of(Executor, built("1f1b"), stages, MSE, sgd, nonfinite=rule)
    assert "nonfinite is raise on process 0, but skip on process 1" in said


@on_ranks(4)
@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_pipelines_skip_alike(rank: int, name: str, clip: float | None) -> None:
    """Though the loss of one alone is not finite, and its gradient would be."""
    if clip is not None and name == "pipedream":
        return
    mesh = pipelines()
    place = mesh.get_local_rank("pp")
    schedule, stages = schedir.build(name, ranks=2, microbatches=2), linear_stages()
    given: dict[str, Any] = {"nonfinite": "skip", "clip_grad_norm": clip, "mesh": mesh}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, target) + (math.inf if float(target[0, 0]) == 7.0 else 0.0)

    with Executor(schedule, {place: stages[place]}, loss_fn, adamw, **given) as executor:
        x, y = random_batch(rows=4, seed=mesh.get_local_rank("dp"))
        assert executor.step(x, target=y).skipped == ()
        if mesh.get_local_rank("dp"):
            y[-1, 0] = 7.0  # of the last of its rows
            y[-2:, 0] = 7.0
        result = executor.step(x, target=y)
        assert result.skipped == ((place, 1 if name == "pipedream" else 0),)
        executor.step(x, target=random_batch(rows=4)[1])
    own = [p.tolist() for p in stages[place].parameters()]
    held = everyone((place, own))
    assert all(there == own for at, there in held if at == place)
