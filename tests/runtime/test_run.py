"""A stream of batches in segments: what `Executor.run` gives, and what it refuses."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir import Action, Pipeline, Schedule, backward, forward, optim_step
from schedir.runtime import Executor, StepResult
from schedir.runtime.batch.batches import check_batches, ends_of_batches
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    Batch,
    everyone,
    linear_stages,
    message_of,
    momentum,
    noisy_stages,
    numbered,
    random_batch,
    sgd,
    split,
)
from tests.runtime.nccl_over_gloo import nccl_over_gloo
from tests.runtime.on_ranks import on_ranks
from tests.runtime.recurrences import pipedream

SIZE = 8  # microbatches of a batch


def built(name: str, ranks: int, microbatches: int = SIZE, **parameters: Any) -> Schedule:
    return schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)


def batches_of(number: int, rows: int = SIZE) -> tuple[list[Batch], Batch]:
    """Some batches, and all of them as one."""
    x, y = random_batch(number * rows)
    return [*zip(x.split(rows), y.split(rows), strict=True)], (x, y)


def bits(stages: Any) -> list[Tensor]:
    return [p.detach().clone() for module in stages for p in module.parameters()]


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(
    rank: int | None,
    schedule: Schedule,
    modules: Sequence[nn.Module],
    results: Callable[[Executor], Iterable[StepResult]],
) -> tuple[list[float], list[Tensor]]:
    """What an executor of copies of these modules makes: the losses of microbatches, and the
    weights here."""
    modules = copy.deepcopy(modules)
    own = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    stages = {stage: modules[stage] for stage in own}
    with Executor(schedule, stages, MSE, momentum, in_process=rank is None) as executor:
        losses = [loss for result in results(executor) for loss in result.losses]
    return losses, bits(stages.values())


def stepped(
    rank: int | None, schedule: Schedule, calls: Sequence[Batch], modules: Sequence[nn.Module]
) -> tuple[list[float], list[Tensor]]:
    """By steps on these batches."""
    return trained(rank, schedule, modules, lambda e: [e.step(x, target=y) for x, y in calls])


def streamed(
    rank: int | None,
    schedule: Schedule,
    batches: Sequence[Batch],
    modules: Sequence[nn.Module],
    segment: int,
) -> tuple[list[float], list[Tensor]]:
    """By a run over them."""

    def results(executor: Executor) -> Iterator[StepResult]:
        for result in executor.run(batches, segment=segment):
            assert result.loss == pytest.approx(sum(result.losses) / len(result.losses))
            assert result.samples == len(batches[0][1])
            yield result
        assert executor.steps == -(-len(batches) * SIZE // segment)

    return trained(rank, schedule, modules, results)


def assert_is_one_call(rank: int | None, ranks: int, name: str, **parameters: Any) -> None:
    schedule = built(name, ranks, **parameters)
    modules = noisy_stages(schedule.stages)
    batches, whole = batches_of(8)
    found = streamed(rank, schedule, batches, modules, segment=64)
    expected = stepped(rank, built(name, ranks, 64, **parameters), [whole], modules)
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])
    found = streamed(rank, schedule, batches, modules, segment=16)
    pairs = [tuple(map(torch.cat, zip(*batches[i : i + 2], strict=True))) for i in range(0, 8, 2)]
    expected = stepped(rank, built(name, ranks, 16, **parameters), pairs, modules)  # type: ignore[arg-type]
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])


ROUND_ROBIN: tuple[str, dict[str, Any]] = ("1f1b-rr", {"flush": False})
LISTS = [("pipedream", {}), ("pipedream", {"vertical_sync": True}), ("pipedream-2bw", {})]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "parameters"), LISTS, ids=str)
def test_a_segment_is_one_call(name: str, parameters: dict[str, Any], ranks: int) -> None:
    assert_is_one_call(None, ranks, name, **parameters)


@on_ranks(2)
@pytest.mark.parametrize(("name", "parameters"), LISTS, ids=str)
def test_it_is_so_on_two_ranks(name: str, parameters: dict[str, Any], rank: int) -> None:
    assert_is_one_call(rank, 2, name, **parameters)


@on_ranks(4)
@pytest.mark.parametrize(("name", "parameters"), [("pipedream", {}), ROUND_ROBIN], ids=str)
def test_it_is_so_on_four_ranks(name: str, parameters: dict[str, Any], rank: int) -> None:
    assert_is_one_call(rank, 4, name, **parameters)


def test_it_is_so_with_replicas_that_share_a_module() -> None:
    name, parameters = ROUND_ROBIN
    assert_is_one_call(None, 4, name, **parameters)


@on_ranks(2)
def test_it_is_so_over_nccl(rank: int) -> None:
    with nccl_over_gloo():
        assert_is_one_call(rank, 2, "pipedream")


@on_ranks(4)
def test_it_is_so_in_two_pipelines(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    own, line = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    batches, _ = batches_of(8)
    batches = batches[4 * line : 4 * line + 4]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    found = []
    for streams in (True, False):
        stages = {own: noisy_stages(2)[own]}
        schedule = built("pipedream", 2, SIZE if streams else 32)
        with Executor(schedule, stages, MSE, momentum, mesh=mesh) as executor:
            if streams:
                losses = [result.loss for result in executor.run(batches, segment=32)]
            else:
                assert executor.step(x, target=y).loss == pytest.approx(sum(losses) / 4)
        found.append(bits(stages.values()))
    assert_equal(*found)
    assert everyone(losses) == [losses] * 4


def test_a_traced_segment_has_one_timeline() -> None:
    batches, (x, y) = batches_of(5)
    schedule = built("pipedream", 2)
    with Executor(
        schedule, numbered(linear_stages()), MSE, sgd, in_process=True, trace=True
    ) as executor:
        executor.step(x[:8], target=y[:8])
        for _ in executor.run(batches, segment=24):
            pass
        executor.step(x[:8], target=y[:8])
        lines = executor.timelines()
    assert [line.schedule.microbatches for line in lines] == [8, 24, 16, 8]
    assert [line.measured.step for line in lines if line.measured] == [0, 1, 2, 3]


@on_ranks(2)
@pytest.mark.parametrize("segment", [16, 64])
def test_it_is_the_recurrence(segment: int, rank: int) -> None:
    modules = linear_stages()
    batches, whole = batches_of(8)
    found = streamed(rank, built("pipedream", 2), batches, modules, segment)[1]
    optimizers = [momentum(stage.parameters()) for stage in modules]
    pieces = [*zip(split(whole[0], 64), split(whole[1], 64), strict=True)]
    for first in range(0, 64, segment):
        part = pieces[first : first + segment]
        plain_step(modules, MSE, optimizers, part, pipedream(2, segment))
    assert_equal(found, bits([modules[rank]]))


def test_the_last_segment_may_be_shorter() -> None:
    modules = noisy_stages(2)
    batches, _ = batches_of(5)
    found = streamed(None, built("pipedream", 2), batches, modules, segment=24)
    joined = [tuple(map(torch.cat, zip(*batches[i:j], strict=True))) for i, j in ((0, 3), (3, 5))]
    expected_stages = copy.deepcopy(modules)
    stages = numbered(expected_stages)
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def kept(parameters: Any) -> torch.optim.Optimizer:
        stage = len(optimizers) if len(optimizers) < 2 else kept_turn.pop(0)
        if stage not in optimizers:
            optimizers[stage] = momentum(parameters)
        return optimizers[stage]

    kept_turn = [0, 1]
    for step, (x, y) in enumerate(joined):
        schedule = built("pipedream", 2, len(y))
        with Executor(schedule, stages, MSE, kept, in_process=True, step=step) as executor:
            executor.step(x, target=y)
    assert_equal(found[1], bits(expected_stages))


def test_fewer_batches_than_ranks_have_microbatches_in_flight() -> None:
    schedule = built("pipedream", 4, 2)
    modules = noisy_stages(4)
    batches, _ = batches_of(1, rows=2)
    with Executor(schedule, numbered(modules), MSE, sgd, in_process=True) as executor:
        assert len([*executor.run(batches, segment=256)]) == 1
        assert [*executor.run([], segment=256)] == []
        assert executor.steps == 1


def test_a_scheduler_in_the_loop_gives_a_batch_one_rate() -> None:
    """Written out: each OPTIM_STEP of a batch at that batch's rate, on every stage."""
    modules = linear_stages(3)
    batches, _ = batches_of(4)
    rates: dict[int, list[float]] = {stage: [] for stage in range(3)}

    def noting(parameters: Any) -> torch.optim.Optimizer:
        made = sgd(parameters)
        stage = len(noted)
        noted.append(made)
        made.register_step_pre_hook(
            lambda optimizer, *_: rates[stage].append(optimizer.param_groups[0]["lr"])
        )
        return made

    noted: list[torch.optim.Optimizer] = []
    schedule = built("pipedream", 3)
    with Executor(schedule, numbered(modules), MSE, noting, in_process=True) as executor:
        by_step = torch.optim.lr_scheduler.StepLR(executor.optimizer, 1, gamma=0.5)
        for _ in executor.run(batches, segment=32):
            by_step.step()
    for found in rates.values():
        assert found == [0.1 * 0.5**batch for batch in range(4) for _ in range(SIZE)]


def test_the_module_has_its_newest_weights_between_batches_and_random_states_are_the_users() -> (
    None
):
    modules = noisy_stages(2)
    batches, _ = batches_of(3)
    schedule = built("pipedream", 2)
    before = [id(p) for module in modules for p in module.parameters()]
    with Executor(schedule, numbered(modules), MSE, sgd, in_process=True) as executor:
        torch.manual_seed(3)
        drawn = []
        for _ in executor.run(batches, segment=24):
            assert [id(p) for module in modules for p in module.parameters()] == before
            drawn.append(torch.randn(1).item())
    torch.manual_seed(3)
    assert drawn == [torch.randn(1).item() for _ in range(3)]


def test_a_result_names_the_steps_that_its_own_batch_has_skipped() -> None:
    batches, _ = batches_of(4)
    batches[1][0][4].fill_(float("inf"))
    modules = numbered(linear_stages())
    with Executor(
        built("pipedream", 2), modules, MSE, sgd, in_process=True, nonfinite="skip"
    ) as executor:
        skipped = [result.skipped for result in executor.run(batches, segment=32)]
    assert skipped == [(), ((0, 12), (1, 12)), (), ()]


def test_one_update_for_each_batch_keeps_the_pipeline_full() -> None:
    """2BW as in its paper: the list of one batch has its OPTIM_STEPs last, that of two goes on."""
    assert_is_one_call(None, 2, "pipedream-2bw", gradient_accumulation=SIZE)


def test_what_is_not_finite_leaves_one_process_usable() -> None:
    batches, (x, y) = batches_of(2)
    batches[1][0].fill_(float("nan"))
    with Executor(
        built("pipedream", 2), numbered(linear_stages()), MSE, sgd, in_process=True
    ) as executor:
        said = message_of(lambda: [*executor.run(batches, segment=16)])
        assert "loss of microbatch 8 is nan" in said
        executor.step(x[:8], target=y[:8])


@pytest.mark.parametrize("closes", [False, True])
def test_who_leaves_early_has_the_segment_finished(closes: bool) -> None:
    modules = noisy_stages(2)
    batches, whole = batches_of(4)
    expected = stepped(None, built("pipedream", 2, 32), [whole], modules)[1]
    executor = Executor(built("pipedream", 2), numbered(modules), MSE, momentum, in_process=True)
    for number, _ in enumerate(executor.run(batches, segment=32)):
        if number == 1:
            if closes:
                executor.close()
            break
    assert_equal(bits(modules), expected)
    if not closes:
        assert executor.evaluate(whole[0][:8], target=whole[1][:8]).loss > 0
        executor.close()


def test_any_other_call_in_the_loop_is_refused() -> None:
    batches, (x, y) = batches_of(2)
    schedule = built("pipedream", 2)
    with Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        for _ in executor.run(batches, segment=16):
            for call in (
                lambda: executor.step(x[:8], target=y[:8]),
                lambda: executor.evaluate(x[:8], target=y[:8]),
                lambda: executor.gather(1),
                lambda: executor.run(batches),
            ):
                assert "in the midst of run" in message_of(call)
        executor.step(x[:8], target=y[:8])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("1f1b", {}, "so the pipeline always drains there"),
        ("pipedream", {"segment": 12}, "a multiple of the 8 microbatches of a batch, not 12"),
        ("pipedream", {"segment": 0}, "not 0"),
        ("pipedream", {"batches": 3}, "must be an iterable of pairs"),
        ("pipedream", {"batches": [3]}, "each batch must be a pair"),
        ("pipedream", {"batches": [{"input": 3}]}, "a batch has input, but can have only inputs"),
        ("pipedream", {"schedule": lambda m: built("pipedream", 2, 8)}, "gave pipedream of 8"),
    ],
)
def test_what_can_not_be_run_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    given = {"batches": batches_of(2)[0], "segment": 16, **options}
    with Executor(built(name, 2), numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        assert said in message_of(lambda: [*executor.run(**given)])


def test_a_list_that_was_changed_needs_to_be_told_how_it_is_made() -> None:
    schedule = built("pipedream", 2)
    changed = Schedule.of(schedule.name, schedule.placement, schedule.actions)
    batches = batches_of(2)[0]
    with Executor(changed, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        assert "pass schedule=lambda microbatches" in message_of(executor.run, batches)
        assert len([*executor.run(batches, schedule=lambda m: built("pipedream", 2, m))]) == 2


def test_a_loader_that_raises_leaves_a_drained_pipeline() -> None:
    modules = noisy_stages(2)
    batches, whole = batches_of(4)

    def raising() -> Iterator[Batch]:
        yield from batches[:3]
        raise OSError("the disk is gone")

    expected = stepped(None, built("pipedream", 2, 16), [(whole[0][:16], whole[1][:16])], modules)
    with Executor(
        built("pipedream", 2), numbered(modules), MSE, momentum, in_process=True
    ) as executor:
        with pytest.raises(OSError, match="the disk is gone") as raised:
            for _ in executor.run(raising(), segment=16):
                pass
        assert raised.value.__notes__ == [
            "Executor.run: 2 batches were applied; the pipeline is drained"
        ]
        assert_equal(bits(modules), expected[1])
        executor.step(whole[0][:8], target=whole[1][:8])


def test_ctrl_c_drains_the_pipeline_first() -> None:
    modules = noisy_stages(2)
    batches, whole = batches_of(4)
    expected = stepped(None, built("pipedream", 2, 16), [(whole[0][:16], whole[1][:16])], modules)
    handler = signal.getsignal(signal.SIGINT)
    with Executor(
        built("pipedream", 2), numbered(modules), MSE, momentum, in_process=True
    ) as executor:
        results = executor.run(batches, segment=16)
        next(results)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="2 batches were applied"):
            next(results)
        assert signal.getsignal(signal.SIGINT) is handler
        assert_equal(bits(modules), expected[1])
        executor.step(whole[0][:8], target=whole[1][:8])


@on_ranks(2)
@pytest.mark.parametrize("fault", ["raises", "shorter", "other", "uncut", "leaves", "interrupted"])
def test_ranks_that_part_are_told(fault: str, rank: int) -> None:
    """Nothing hangs, and each says what the other has done."""
    batches, _ = batches_of(4)
    if rank == 1 and fault == "shorter":
        batches = batches[:3]
    if rank == 1 and fault == "uncut":
        batches[2] = batches[2][0][:3], batches[2][1][:3]
    if rank == 1 and fault == "other":
        batches[2] = random_batch(8, seed=9)

    def drawn() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if rank == 1 and fault == "raises" and number == 2:
                raise OSError("the disk is gone")
            yield batch

    def run() -> None:
        for number, _ in enumerate(executor.run(drawn(), segment=16)):
            if rank == 1 and number == 0 and fault == "leaves":
                break
            if rank == 1 and number == 0 and fault == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)

    schedule = built("pipedream", 2)
    stage = {rank: linear_stages()[rank]}
    executor = Executor(schedule, stage, MSE, sgd, timeout=60)
    said = ""
    try:
        run()
    except (schedir.ExecutionError, OSError, KeyboardInterrupt) as error:
        said = f"{error} {getattr(error, '__notes__', '')}"
    expected = {
        "raises": ("process 1 could not draw its next batches: OSError", "the disk is gone"),
        "shorter": ("process 0 has 2 batches for its next segment, process 1 1",) * 2,
        "other": ("batch 2 of process 1 is another one than that of process 0",) * 2,
        "uncut": ("process 1 could not draw its next batches: ExecutionError", "3 rows"),
        "leaves": ("process 1 has left the loop after result 1", ""),
        "interrupted": ("process 1 was interrupted; 2 batches", "2 batches were applied"),
    }
    assert expected[fault][rank] in said
    everyone(rank)
    if fault != "leaves":
        assert "2 batches were applied" in said or fault == "other"
        x, y = random_batch(8)
        executor.step(x, target=y)
        executor.close()
    else:
        assert "has left the loop" in message_of(executor.step, *random_batch(8)[:1])


@on_ranks(2)
def test_ranks_may_leave_after_the_same_result(rank: int) -> None:
    batches, (x, y) = batches_of(4)
    stage = {rank: linear_stages()[rank]}
    with Executor(built("pipedream", 2), stage, MSE, sgd, timeout=60) as executor:
        for number, _ in enumerate(executor.run(batches, segment=16)):
            if number == 1:
                break
        executor.evaluate(x[:8], target=y[:8])
        # One that takes the last result and one that leaves at it have had the same.
        for number, _ in enumerate(executor.run(batches[:3], segment=16)):
            if rank and number == 2:
                break
        executor.step(x[:8], target=y[:8])


@on_ranks(2)
def test_a_rank_that_fails_in_a_segment_breaks_the_executor_on_all(rank: int) -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e3:
                raise ValueError("on purpose")
            return super().forward(x)

    batches, (x, y) = batches_of(4)
    batches[3][0].fill_(1e6)
    stage: dict[int, nn.Module] = {rank: nn.Linear(4, 4) if rank else Failing(4, 4)}
    executor = Executor(built("pipedream", 2), stage, MSE, sgd, timeout=60)
    said = message_of(lambda: [*executor.run(batches, segment=16)])
    assert "ValueError: on purpose" in said
    assert "broken" in message_of(executor.step, x[:8], target=y[:8])
    executor.close()
    everyone(rank)


def test_where_a_batch_ends_in_a_list() -> None:
    """Two stages of a rank that step in turn, batches of two microbatches."""
    schedule = listed(
        4,
        "0 0",
        "0F0 1F0 1B0 1OPTIM_STEP 0B0 0OPTIM_STEP 0F1 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP "
        "0F2 1F2 1B2 1OPTIM_STEP 0B2 0OPTIM_STEP 0F3 1F3 1B3 1OPTIM_STEP 0B3 0OPTIM_STEP",
    )
    assert ends_of_batches(schedule, 0, 2) == [12]
    assert ends_of_batches(schedule, 0, 1) == [6, 12, 18]


def test_an_update_of_two_batches_is_refused() -> None:
    schedule = built("pipedream-2bw", 2, 32, gradient_accumulation=16)
    message = message_of(check_batches, schedule, 8)
    assert "OPTIM_STEP of stage 0 applies microbatches of batches 0 and 1 at once" in message


def test_stages_of_a_rank_that_are_in_different_batches_are_refused() -> None:
    """No point of the list is after the one batch and before the next."""

    def crossing(pipe: Pipeline, rank: int) -> Iterator[Action]:
        for m in range(pipe.microbatches):
            yield forward(0, m)
            yield forward(1, m)
            yield backward(1, m)
            yield optim_step(1)
            if m:
                yield backward(0, m - 1)
                yield optim_step(0)
        yield backward(0, pipe.microbatches - 1)
        yield optim_step(0)

    generator = schedir.schedule("crossing", placement=lambda pipe: [0, 0])(crossing)
    schedule = schedir.build(generator, ranks=1, microbatches=8)
    with Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        message = message_of(lambda: [*executor.run(batches_of(2)[0], segment=16)])
    assert "OPTIM_STEP of stage 0 applies batch 0 after another stage's has applied 1" in message
