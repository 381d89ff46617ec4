"""What is refused on every rank: schedules, arguments and batches that are wrong or that differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, message_of, random_batch
from tests.runtime.on_ranks import on_ranks

LONG = 60.0  # seconds, of which none should be waited


def schedule_of(microbatches: int = 4, ranks: int = 2) -> schedir.Schedule:
    return schedir.build("1f1b", ranks=ranks, microbatches=microbatches)


def executor_of(rank: int, schedule: schedir.Schedule | None = None, **options: Any) -> Executor:
    """Of the linear stage of this rank."""
    schedule = schedule or schedule_of()
    stages = {rank: linear_stages(schedule.ranks)[rank]}
    given = {"optimizer": adamw, "timeout": LONG, **options}
    return Executor(schedule, stages, MSE, **given)


OTHER_SCHEDULES: dict[str, tuple[str, str, str, str]] = {
    "an action has moved": (
        "1f1b",
        "0SEND_ACT1 0RECV_GRAD0",
        "0RECV_GRAD0 0SEND_ACT1",
        "rank 0 #3 is 0SEND_ACT1 on process 0, but 0RECV_GRAD0 on process 1",
    ),
    "another name": ("1f1b", "name 1f1b", "name mine", "name 1f1b on process 0, mine on process 1"),
    "another order": (
        "fill-drain",
        "name fill-drain",
        "name 1f1b",
        "rank 0 #4 is 0RECV_GRAD0 on process 0, but 0F2 on process 1",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", OTHER_SCHEDULES)
def test_schedules_that_differ_are_told_apart(rank: int, what: str) -> None:
    name, old, new, named = OTHER_SCHEDULES[what]
    text = schedir.dumps(schedir.build(name, ranks=2, microbatches=4))
    other = schedir.loads(text.replace(old, new))
    assert other != schedule_of()
    said = message_of(executor_of, rank, other if rank else schedule_of())
    assert "different schedules: " in said
    assert named in said


@on_ranks(2)
def test_fewer_microbatches_are_told(rank: int) -> None:
    said = message_of(executor_of, rank, schedule_of(4 - rank))
    assert "different schedules: microbatches 4 on process 0, 3 on process 1" in said


@on_ranks(2)
def test_a_wrong_schedule_is_explained_by_rank_0(rank: int) -> None:
    with pytest.raises(schedir.ScheduleError, match="rank 0 says why" if rank else "S201"):
        executor_of(rank, listed(1, "0 1", "0B0 0F0", "1F0 1B0"))


WRONG: dict[str, Callable[[int], Any]] = {
    "3 ranks, but 2 processes": lambda rank: executor_of(rank, schedule_of(ranks=3)),
    "needs an optimizer": lambda rank: executor_of(
        rank, schedir.build("pipedream", ranks=2, microbatches=4), optimizer=None
    ),
    "no OPTIM_STEP": lambda rank: executor_of(rank, listed(1, "0 1", "0F0 0B0", "1F0 1B0")),
}


@on_ranks(2)
@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_are_named(rank: int, text: str) -> None:
    assert text in message_of(WRONG[text], rank)


@on_ranks(2, 4)
@pytest.mark.parametrize("given", [[], [0], [0, 1]], ids=str)
def test_wrong_stages_are_named_on_every_rank(rank: int, ranks: int, given: list[int]) -> None:
    """At once, though only one rank has been given none, another's or more; then all try again."""
    schedule, whole = schedule_of(ranks=ranks), linear_stages(ranks)
    started = time.monotonic()
    stages = {stage: whole[stage] for stage in (given if rank == 1 else [rank])}
    said = message_of(Executor, schedule, stages, MSE, adamw, timeout=LONG)
    assert time.monotonic() - started < LONG / 4
    assert f"rank 1 holds stages [1], but modules were given for {given}" in said
    assert rank == 1 or said.startswith("making the executor: not all processes have come together")
    executor_of(rank, schedule).close()


@on_ranks(2)
def test_of_a_wrong_scaler_on_one_rank_the_other_hears_at_once(rank: int) -> None:
    started = time.monotonic()
    said = message_of(executor_of, rank, scaler=3 if rank else None, timeout=LONG)
    assert time.monotonic() - started < LONG / 4
    assert ("scaler must be" if rank else "making the executor: not all processes have") in said
    executor_of(rank).close()


@on_ranks(2)
def test_a_rank_without_an_optimizer_is_named_on_every_rank(rank: int) -> None:

    def refuse(parameters: Any) -> torch.optim.Optimizer:
        raise ValueError("no such option")

    said = "", ""
    try:
        executor_of(rank, optimizer=refuse if rank else adamw)
    except (ValueError, schedir.ExecutionError) as error:
        said = type(error).__name__, str(error)
    (kind, first), (_, second) = everyone(said)
    assert second == "optimizer, called for stage 1: ValueError: no such option"
    assert kind == "ExecutionError"
    assert first.startswith("rank 0: making the executor: waited for ")
    assert first.endswith(f"the first to fail was {second}")


@on_ranks(2)
def test_wrong_batches_are_named(rank: int) -> None:
    x, y = random_batch(rows=3)
    with executor_of(rank) as executor:
        assert "more than 4" in message_of(executor.step, [x] * 5, target=[y] * 5)
        wrong = {"inputs": x} if rank else {"target": y}
        said = message_of(executor.step, **wrong)
        assert f"stage {rank}, which runs here, needs {('inputs', 'target')[rank]}: inputs" in said
        assert "to rank 0 for the first stage, target to rank 1 for the last one" in said


OTHER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "seed": {"seed": 1},
    "step": {"step": 3},
    "optimizer": {"optimizer": None},
    "ties": {"ties": [[(0, "0.bias"), (1, "0.bias")]]},
}


@on_ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_an_argument_that_differs_is_named(rank: int, name: str, odd: int) -> None:
    said = message_of(executor_of, rank, **(OTHER_ARGUMENTS[name] if rank == odd else {}))
    assert f"different arguments: {name} is" in said
    assert "but" in said


@on_ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
def test_another_version_of_torch_is_named(
    rank: int, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local part, such as +cpu, says how it was built."""
    monkeypatch.setattr(torch, "__version__", f"2.13.1+built{rank}")
    executor_of(rank).close()
    if rank == odd:
        monkeypatch.setattr(torch, "__version__", "2.12.0")
    said = message_of(executor_of, rank)
    versions = ("2.12.0", "2.13.1") if odd == 0 else ("2.13.1", "2.12.0")
    assert said.startswith("torch.__version__ is {} on process 0, but {} on".format(*versions))


@on_ranks(2)
def test_another_default_dtype_is_named(rank: int) -> None:
    torch.set_default_dtype((torch.float32, torch.float64)[rank])
    try:
        said = message_of(executor_of, rank)
    finally:
        torch.set_default_dtype(torch.float32)
    assert said.startswith("torch.get_default_dtype() is torch.float32 on process 0, but ")
    assert "torch.float64 on process 1" in said


@on_ranks(2)
def test_copies_of_other_dtypes_are_named(rank: int) -> None:
    """Stages of their own may have other dtypes, as in mixed precision; copies may not."""
    cast = [torch.nn.Module.float, torch.nn.Module.bfloat16][rank]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    stage = cast(linear_stages(1)[0])
    said = message_of(Executor, schedule_of(ranks=1), {0: stage}, MSE, adamw, mesh=mesh)
    assert "stage 0 is torch.float32 on process 0, but torch.bfloat16 on process 1" in said
    stages = {rank: cast(linear_stages()[rank])}
    ties = [[(0, "0.bias"), (1, "0.bias")]]
    said = message_of(Executor, schedule_of(), stages, MSE, adamw, ties=ties)
    assert "tied as 0:0.bias and 1:0.bias is torch.float32 on process 0, but torch.bfl" in said
    Executor(schedule_of(), stages, MSE, adamw).close()


def batch_of(case: str, rank: int) -> tuple[Any, Any]:
    """A batch of which each rank has a part of its own."""
    x, y = random_batch()
    own_x, own_y = random_batch(seed=rank)
    large = torch.randn(8, 4000, generator=torch.Generator().manual_seed(rank))
    return {
        "inputs": (own_x, y),
        "target": (x, own_y),
        "ready made": (list(own_x.chunk(4)), list(own_y.chunk(4))),
        "a column": (torch.cat([x[:, :3], own_x[:, 3:]], 1), y),
        "large": (torch.cat([x, large], 1)[:, -4:], y),
        "in half": (own_x.bfloat16(), own_y.bfloat16()),
    }[case]


@on_ranks(2)
@pytest.mark.parametrize("case", ["inputs", "target", "ready made", "a column", "large", "in half"])
def test_ranks_that_hold_different_batches_are_told(rank: int, case: str) -> None:
    inputs, target = batch_of(case, rank)
    executor = executor_of(rank)
    if case == "in half":
        executor.stages[rank].bfloat16()
    said = everyone(message_of(executor.step, inputs, target=target))
    what = "target" if case == "target" else "inputs"
    assert "rank 1: call 0, step (" in said[1]
    assert f"`{what}` is another batch on rank 1 at step 0 than on rank 0 at its step 0" in said[1]
    assert "the first to fail was rank 1" in said[0]


@on_ranks(2)
def test_what_nobody_else_reads_may_differ(rank: int) -> None:
    x, y = random_batch()
    batches: dict[str, tuple[Any, Any]] = {
        "each its own": (x if rank == 0 else None, y if rank == 1 else None),
        "an iterator": (iter(x.chunk(4)), iter(y.chunk(4))),
        "whole and ready": (x if rank else list(x.chunk(4)), y if rank else list(y.chunk(4))),
        "both alike": (x.clone(), y.clone()),
    }
    with executor_of(rank) as executor:
        for case, (inputs, target) in batches.items():
            assert not message_of(executor.step, inputs, target=target), case


@on_ranks(2)
def test_rows_that_differ_are_found_before_the_step(rank: int) -> None:
    x, y = random_batch()
    given = {"target": y[:6]} if rank else {"inputs": x}
    said = everyone(message_of(executor_of(rank).step, **given))
    expected = "`target` has 6 rows on rank 1 at step 0, but `inputs` 8 on rank 0 at its step 0"
    assert expected in said[1]


@on_ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("call", ["step", "evaluate", "infer"])
def test_batches_of_other_sizes_are_found_before_the_call(rank: int, call: str, odd: int) -> None:
    x, y = random_batch()
    executor = executor_of(rank)

    def made(rows: int) -> object:
        if call == "infer":
            return executor.infer(x[:rows])
        return getattr(executor, call)(x[:rows], target=y[:rows]).loss

    made(8)
    made(6)
    said = message_of(made, 6 if rank == odd else 8)
    everyone("rank 1 has failed")
    said = said or message_of(made, 8)  # who only sends is told in the next call
    first, last = everyone(said)
    if call == "infer":
        assert "`inputs` is another batch on rank 1 at step 0 than on rank 0" in last
    else:
        sizes = (8, 6) if odd == 1 else (6, 8)
        assert "`inputs` {} on rank 0".format(*sizes) in last
        assert "`target` has {1} rows on rank 1".format(*sizes) in last
    assert "the first to fail was rank 1" in first


@on_ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_with_another_number_of_microbatches_ends_all(rank: int, odd: int) -> None:
    """The call is refused there alone, which leaves the executor."""
    x, y = random_batch()
    number = 3 if rank == odd else 4

    def train() -> None:
        with executor_of(rank) as executor:
            executor.step([*x.chunk(4)][:number], target=[*y.chunk(4)][:number])

    started = time.monotonic()
    said = everyone(message_of(train))
    assert time.monotonic() - started < LONG / 4
    assert all("3 microbatches given" in text for text in said)


class Scaling(torch.nn.Module):
    """Its output has a dtype, or by default that of its input."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 0.3))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.dtype or x.dtype
        return x.to(dtype) * self.weight.to(dtype)


class Casting(torch.nn.Linear):
    """Returns its output in another dtype, or shape, from its fifth microbatch on."""

    calls = 0

    def __init__(self, change: str) -> None:
        super().__init__(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls += 1
        if self.calls <= 4:
            return y
        return y.bfloat16() if self.change == "dtype" else torch.cat([y, y])


@on_ranks(2)
@pytest.mark.parametrize("declares", [False, True])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_an_output_that_changes_is_refused_before_it_is_sent(
    rank: int, change: str, declares: bool
) -> None:
    """The receiver has buffers for the former, and would take the bytes for something else."""
    x, y = random_batch()
    stage = Casting(change) if rank == 0 else linear_stages()[1]
    given: Any = {"boundaries": {0: torch.empty(2, 4)} if declares else None, "timeout": LONG}
    executor = Executor(schedule_of(), {rank: stage}, MSE, adamw, **given)
    executor.step(x, target=y)
    first, last = everyone(message_of(executor.step, x, target=y))
    returned = "bfloat16[2, 4]" if change == "dtype" else "float32[4, 4]"
    assert f"rank 0 #0 0F0: the stage returned {returned} requires grad, but float32[2, 4]" in first
    assert f"the first to fail was rank 0 #0 0F0: the stage returned {returned}" in last


@on_ranks(2)
def test_inputs_of_another_dtype_are_learned_anew(rank: int) -> None:
    x, y = random_batch()
    stage = Scaling(torch.float64 if rank else None)
    with Executor(schedule_of(), {rank: stage}, MSE, timeout=LONG) as executor:
        losses = [executor.step(z, target=y.double()).loss for z in (x, x.double()) * 2]
    assert losses[:2] == losses[2:]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != losses[1]


@on_ranks(2)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_ranks_at_different_steps_are_told(rank: int, call: str) -> None:
    """They would draw the dropout of different steps, and nothing else would tell."""
    x, y = random_batch()
    executor = executor_of(rank)
    executor.step(x, target=y)
    executor.steps += 4 * rank
    said = everyone(message_of(getattr(executor, call), x, target=y))
    assert f"call 1, {call} (" in said[1]
    assert "is at step 5 on rank 1, but rank 0 is at step 1" in said[1]
    assert "the first to fail was rank 1" in said[0]


@on_ranks(2)
def test_the_steps_of_ranks_that_drift_apart_are_named(rank: int) -> None:
    """One that has left a batch out, after some that were alike."""
    batches = [random_batch(seed=seed) for seed in range(4)]
    if rank:
        del batches[2]
    executor = executor_of(rank)
    executor.steps = 10
    for x, y in batches[:3]:
        mine = message_of(executor.step, x, target=y)
    said = everyone(mine)
    assert "call 2, step (" in said[1]
    assert "`inputs` is another batch on rank 1 at step 12 than on rank 0 at its step 12" in said[1]


@on_ranks(3)
def test_ranks_between_may_hold_anything(rank: int) -> None:
    """What only the first and the last rank read is theirs alone to have alike."""
    x, y = random_batch(seed=7 if rank == 1 else 0)
    with executor_of(rank, schedule_of(ranks=3)) as executor:
        executor.step(x, target=y)
