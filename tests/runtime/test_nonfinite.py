"""NaN and infinity in a random stage, microbatch and direction: found, named, never applied."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator, Sequence
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
    ScaledLoss,
    adamw,
    assert_equal_stages,
    everyone,
    gradients,
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
TIES = [[(0, "0.weight"), (1, "0.weight")]]
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
        factors = (value, 1.0) if direction == "forward" else (1.0, value)
        return Spoil.apply(y, *factors) if m == microbatch else y  # type: ignore[no-untyped-call]


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
        assert is_finite(self.stages)

    def executor(self, rank: int | None = None, **options: Any) -> Executor:
        """Of all stages, or of those of a rank."""
        here = range(len(self.stages)) if rank is None else self.schedule.stages_of(rank)
        stages: dict[int, nn.Module] = {s: self.stages[s] for s in here}
        given = {"in_process": rank is None, "timeout": 60.0, **options}
        return Executor(self.schedule, stages, self.loss, self.optimizer, **given)

    def step_of(self, stage: int, microbatch: int) -> tuple[int, int]:
        """The OPTIM_STEP that applies a microbatch."""
        flow = graph_of(self.schedule)
        return stage, int(flow.turn[flow.weight_gradients[stage, microbatch]])

    def alone(self, stage: int, microbatch: int) -> bool:
        """Whether that applies no other."""
        own = self.step_of(stage, microbatch)
        return [self.step_of(stage, m) for m in range(MICROBATCHES)].count(own) == 1


def built(name: str, ranks: int = 2) -> schedir.Schedule:
    return schedir.build(name, ranks=ranks, microbatches=MICROBATCHES)


# With one copy of each stage, whose microbatches then come in the order of its list.
NAMES = [name for name in EVERY if all(len(held) == 1 for held in built(name).placement)]
assert 3 * len(NAMES) >= 25  # places to spoil


def executor_of(
    stages: Any, loss_fn: Any = MSE, optimizer: Any = sgd, name: str = "1f1b", **options: Any
) -> Executor:
    """Of these stages of a schedule, or of one module for one microbatch; in this process."""
    several = isinstance(stages, list)
    given = numbered(stages if several else [stages])
    schedule = built(name) if several else schedir.build(name, ranks=1, microbatches=1)
    return Executor(schedule, given, loss_fn, optimizer, **{"in_process": True, **options})


def is_finite(stages: Iterable[nn.Module]) -> bool:
    return all(bool(p.isfinite().all()) for stage in stages for p in stage.parameters())


def drawn(name: str, direction: str, stages: int) -> tuple[int, int, float]:
    chance = random.Random(f"{name} {direction}")
    return chance.randrange(stages), chance.randrange(MICROBATCHES), chance.choice(BAD)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_and_not_applied(name: str) -> None:
    trial = Trial(built(name))
    x, y = random_batch()
    with trial.executor() as executor:
        executor.step(x, target=y)
        for direction in ("forward", "loss", "backward"):
            stage, m, value = drawn(name, direction, len(trial.stages))
            before = copy.deepcopy(trial.stages)
            with trial.spoiling(direction, stage, m, value), pytest.raises(ExecutionError) as found:
                executor.step(x, target=y)
            said = str(found.value)
            if direction == "backward":
                assert f"the gradient of layer.bias of stage {stage} has" in said
                assert (f"by microbatch {m}," in said) is trial.alone(stage, m)
            else:
                assert f"the loss of microbatch {m} is" in said
            if steps_last(trial.schedule):
                assert found.value.rank is not None
                held = trial.schedule.stages_of(found.value.rank)
                assert_equal_stages({s: trial.stages[s] for s in held}, before)
            executor.optimizer.zero_grad()


@pytest.mark.parametrize("name", [name for name in NAMES if steps_last(built(name))])
def test_a_step_that_is_skipped_changes_nothing(name: str) -> None:
    trial, twin = Trial(built(name)), Trial(built(name))
    stages = len(trial.stages)
    with trial.executor(nonfinite="skip") as executor, twin.executor(nonfinite="skip") as other:
        for number, direction in enumerate(("forward", "loss", "backward")):
            x, y = random_batch(seed=number)
            assert executor.step(x, target=y).skipped == other.step(x, target=y).skipped == ()
            stage, m, value = drawn(name, direction, stages)
            with trial.spoiling(direction, stage, m, value):
                result = executor.step(x, target=y)
            assert math.isfinite(result.loss) is (direction == "backward")
            assert result.skipped == tuple((s, 0) for s in range(stages))
            assert not trial.applied
            assert_equal_stages(numbered(trial.stages), twin.stages)
            assert gradients(trial.stages) == [None] * 2 * stages


def test_ignored_it_is_applied() -> None:
    stages = linear_stages()
    x, y = random_batch()
    with executor_of(stages, nonfinite="ignore") as executor:
        assert math.isnan(executor.step(x * math.nan, target=y).loss)
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


class Holds(nn.Linear):
    """Has a parameter whose gradient is what `grad` says."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(4, 4)
        self.odd = nn.Parameter(parameter)
        self.grad = torch.zeros_like(parameter)

    def forward(self, x: Tensor) -> Tensor:
        nothing: Tensor = Given.apply(self.odd, self.grad)  # type: ignore[no-untyped-call]
        return super().forward(x) + nothing


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [3, 5000])
def test_gradients_of_any_type_and_size(dtype: torch.dtype, size: int) -> None:
    stage = Holds(torch.zeros(size, dtype=dtype))
    x, y = random_batch()
    with executor_of(stage, optimizer=plain_sgd) as executor:
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


@pytest.mark.parametrize("kind", ["sparse", "expanded"])
def test_sparse_gradients_and_those_that_share_memory(kind: str) -> None:
    value = [1.0]
    stage: nn.Module = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    x, y = torch.arange(8), torch.ones(8, 4)
    first = next(stage.parameters())
    if kind == "sparse":
        first.register_hook(lambda grad: grad * value[0])
    else:
        x, stage = torch.ones(8, 4), nn.Linear(4, 4)

        def expand(parameter: nn.Parameter) -> None:
            parameter.grad = torch.full((), value[0]).expand(4)

        stage.bias.register_post_accumulate_grad_hook(expand)
    with executor_of(stage, optimizer=plain_sgd) as executor:
        executor.step(x, target=y)
        value[0] = math.nan
        name = "0.weight" if kind == "sparse" else "bias"
        assert f"{name} of stage 0 has NaN" in message_of(executor.step, x, target=y)


def test_half_precision_that_overflows_is_skipped() -> None:
    stages = [stage.half() for stage in linear_stages()]
    x, y = (t.half() for t in random_batch())
    before = copy.deepcopy(stages)
    with executor_of(stages, nonfinite="skip") as executor:
        result = executor.step(x, target=y * 1000)  # whose square is above 65504
        assert (result.loss, result.skipped) == (math.inf, ((0, 0), (1, 0)))
        assert_equal_stages(numbered(stages), before)
        assert executor.step(x, target=y).skipped == ()


def enormous(output: Tensor, target: Tensor) -> Tensor:
    """Gradients of 1e30 each, which are finite; their squares are not."""
    return (output * 1e30).sum()


def test_a_norm_that_overflows_is_not_clipped_by() -> None:
    stages = linear_stages()
    before = copy.deepcopy(stages)
    x, y = random_batch()
    with executor_of(stages, enormous, clip_grad_norm=1.0) as executor:
        with pytest.raises(ExecutionError, match=r"the norm of the gradients of .* is not finite"):
            executor.step(x, target=y)
        executor.optimizer.zero_grad()
    with executor_of(stages, enormous, clip_grad_norm=1.0, nonfinite="skip") as executor:
        assert executor.step(x, target=y).skipped == ((0, 0), (1, 0))
    assert gradients(stages) == [None] * 4
    assert_equal_stages(numbered(stages), before)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_clipping_never_scales_by_it(nonfinite: str) -> None:
    trial = Trial(built("interleaved-1f1b"))
    x, y = random_batch()
    with trial.executor(nonfinite=nonfinite, clip_grad_norm=0.5) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(trial.stages)
        with trial.spoiling("backward", 2, 1, math.nan):
            if nonfinite == "skip":
                assert len(executor.step(x, target=y).skipped) == 4
            else:
                assert "of stage 2 has NaN" in message_of(executor.step, x, target=y)
        assert_equal_stages(numbered(trial.stages), before)
        executor.optimizer.zero_grad()
        assert executor.step(x, target=y).skipped == ()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_microbatch_without_samples_has_no_loss_to_look_at(nonfinite: str) -> None:
    stages, loss = linear_stages(), nn.functional.cross_entropy
    x, y = random_batch()[0], torch.tensor([0, 1, 2, 3, 3, 1] + [-100] * 2)
    expected = loss(nn.Sequential(*stages)(x[:6]), y[:6]).item()
    options: Any = {"count": lambda target: (target >= 0).sum(), "nonfinite": nonfinite}
    with executor_of(stages, loss, **options) as executor:
        result = executor.step(x, target=y)
    assert math.isnan(result.losses[3])
    assert result.loss == pytest.approx(expected)
    assert not result.skipped


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_without_an_update_the_loss_alone_is_looked_at(optimizer: Any) -> None:
    stages = linear_stages()
    x, y = random_batch()
    with executor_of(stages, optimizer=optimizer) as executor:
        with pytest.raises(ExecutionError, match="the loss of microbatch 3 is inf"):
            executor.step(x, target=torch.cat([y[:-1], y[-1:] * math.inf]), update=False)
        for stage in stages:
            stage.zero_grad()
        handle = stages[0].get_parameter("0.weight").register_hook(lambda grad: grad * math.nan)
        executor.step(x, target=y, update=False)
        handle.remove()
        assert math.isfinite(executor.evaluate(x, target=y).loss)
        assert math.isnan(executor.evaluate(x * math.nan, target=y).loss)
        if optimizer is not None:
            assert "0.weight of stage 0 has NaN, so" in message_of(executor.step, x, target=y)


def test_gradients_that_came_before_are_of_no_microbatch() -> None:
    stage = nn.Linear(4, 4)
    x, y = random_batch()
    with executor_of(stage) as executor:
        handle = stage.bias.register_hook(lambda grad: grad * math.nan)
        executor.step(x, target=y, update=False)
        handle.remove()
        assert "bias of stage 0 has NaN, so" in message_of(executor.step, x, target=y)
        stage.zero_grad()
        executor.step(x, target=y)
        stage.bias.register_hook(lambda grad: grad * math.nan)
        said = message_of(executor.step, x, target=y)
        assert "bias of stage 0 has NaN by microbatch 0, so" in said


def test_tied_copies_skip_together() -> None:
    stages = linear_stages()
    stages[1].get_parameter("0.weight").data.copy_(stages[0].get_parameter("0.weight"))
    x, y = random_batch()
    with executor_of(stages, nonfinite="skip", ties=TIES) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(stages)
        for bias in (stage.get_parameter("0.bias") for stage in stages):  # which are not tied
            handle = bias.register_hook(lambda grad: grad * math.inf)
            assert executor.step(x, target=y).skipped == ((0, 0), (1, 0))
            handle.remove()
            assert_equal_stages(numbered(stages), before)


def test_parameters_of_the_loss_are_named() -> None:
    loss = ScaledLoss()
    loss.scale.register_hook(lambda grad: grad * math.nan)
    x, y = random_batch()
    with executor_of(linear_stages(), loss) as executor:
        said = message_of(executor.step, x, target=y)
    assert "the gradient of scale of the loss has NaN" in said


def test_what_the_optimizer_does_not_step_is_not_looked_at() -> None:
    stage = nn.Linear(4, 4)
    stage.bias.register_hook(lambda grad: grad * math.nan)
    x, y = random_batch()
    with executor_of(stage, optimizer=lambda p: sgd([next(iter(p))])) as executor:
        executor.step(x, target=y)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nonfinite": True}, "nonfinite must be one of 'raise', 'skip', 'ignore', not True"),
        ({"nonfinite": "skip", "optimizer": None}, "so it needs an optimizer"),
        (
            {"name": "pipedream-2bw", "nonfinite": "skip"},
            'nonfinite="skip" needs all gradients before any rank steps',
        ),
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, Any], text: str) -> None:
    assert text in message_of(executor_of, linear_stages(), **given)


def test_skipping_needs_the_updates() -> None:
    x, y = random_batch()
    with executor_of(linear_stages(), nonfinite="skip") as executor:
        assert "update=False" in message_of(executor.step, x, target=y, update=False)
        executor.step(x, target=y)


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("direction", ["forward", "loss", "backward"])
def test_all_ranks_skip_or_none(rank: int, direction: str, clip: float | None) -> None:
    trial = Trial(built("interleaved-1f1b"))
    stages = {s: trial.stages[s] for s in trial.schedule.stages_of(rank)}
    with trial.executor(rank, nonfinite="skip", clip_grad_norm=clip) as executor:
        for number, (x, y) in enumerate(random_batches(3)):
            executor.step(x, target=y)
            before = copy.deepcopy(trial.stages)
            with trial.spoiling(direction, 1, 2, BAD[number]):
                result = executor.step(x, target=y)
            assert result.skipped == tuple((s, 0) for s in stages)
            assert_equal_stages(stages, before)


@on_ranks(2)
@pytest.mark.parametrize("direction", ["forward", "loss", "backward"])
@pytest.mark.parametrize(("name", "clip"), [("1f1b", None), ("1f1b", 0.5), ("pipedream", None)])
def test_the_rank_that_finds_it_has_applied_nothing(
    rank: int, name: str, direction: str, clip: float | None
) -> None:
    trial = Trial(built(name))
    x, y = random_batch()
    with trial.executor(rank, clip_grad_norm=clip) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(trial.stages)
        with trial.spoiling(direction, 1, 0, math.inf):
            said = message_of(executor.step, x, target=y)
        if rank == 1:
            assert_equal_stages({rank: trial.stages[rank]}, before)
        found = "the loss of microbatch 0 is" if direction != "backward" else "of stage 1 has"
        assert found in said or "of stage 0 has" in said
        assert "is broken" in message_of(executor.step, x, target=y)


@on_ranks(2)
def test_the_rank_that_finds_it_says_so_before_all_take_the_norm(rank: int) -> None:
    trial = Trial(built("1f1b"))
    x, y = random_batch()
    with trial.executor(rank, clip_grad_norm=0.5) as executor:
        executor.step(x, target=y)
        before = copy.deepcopy(trial.stages)
        with trial.spoiling("backward", 0, 3, math.inf):
            said = message_of(executor.step, x, target=y)
        assert "the gradient of layer.bias of stage 0 has infinity" in said
        assert_equal_stages({rank: trial.stages[rank]}, before)


REPLICATED = {"dualpipe": 2, "chimera": 2, "1f1b-rr": 3}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_in_one_process_find_the_same(name: str) -> None:
    schedule = built(name, REPLICATED[name])
    assert any(len(held) > 1 for held in schedule.placement)
    x, y = random_batch()
    for m in range(MICROBATCHES):
        bad = y.clone()
        bad[2 * m] = math.nan
        whole = linear_stages(schedule.stages)
        with Executor(schedule, numbered(whole), MSE, adamw, in_process=True) as executor:
            said = message_of(executor.step, x, target=bad)
        assert f"the loss of microbatch {m} is nan" in said
        stages, before = linear_stages(schedule.stages), linear_stages(schedule.stages)
        given: dict[str, Any] = {"nonfinite": "skip", "in_process": True}
        with Executor(schedule, numbered(stages), MSE, adamw, **given) as executor:
            assert len(executor.step(x, target=bad).skipped) == schedule.stages
            assert_equal_stages(numbered(stages), before)
            assert executor.step(x, target=y).skipped == ()


@on_ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_replicas_skip_alike(rank: int, clip: float | None) -> None:
    schedule = built("dualpipe")
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
@pytest.mark.parametrize("clip", [None, 0.5])
def test_pipelines_skip_alike(rank: int, clip: float | None) -> None:
    """Though the loss of one alone is not finite, and its gradient would be."""
    mesh = pipelines()
    place, line = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    schedule, stages = schedir.build("1f1b", ranks=2, microbatches=2), linear_stages()
    given: dict[str, Any] = {"nonfinite": "skip", "clip_grad_norm": clip, "mesh": mesh}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, target) + (math.inf if float(target[0, 0]) == 7.0 else 0.0)

    with Executor(schedule, {place: stages[place]}, loss_fn, adamw, **given) as executor:
        x, y = random_batch(rows=4, seed=line)
        assert executor.step(x, target=y).skipped == ()
        y[2:, 0] = 7.0 if line else y[2:, 0]  # of the last microbatch
        assert executor.step(x, target=y).skipped == ((place, 0),)
        executor.step(x, target=random_batch(rows=4)[1])
    held = everyone((place, [p.tolist() for p in stages[place].parameters()]))
    assert all(there == held[rank][1] for at, there in held if at == place)
