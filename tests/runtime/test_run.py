"""A stream of batches in segments: what `Executor.run` gives, and what it refuses."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import Action, Pipeline, Schedule, backward, forward, optim_step
from schedir.runtime import Executor, StepResult
from schedir.runtime.feeding import check_batches, ends_of_batches
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    Batch,
    assert_equal_stages,
    differing,
    everyone,
    linear_stages,
    message_of,
    momentum,
    noisy_stages,
    numbered,
    random_batch,
    sgd,
)
from tests.runtime.nccl_over_gloo import nccl_over_gloo
from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.test_replicas_on_ranks import pipelines
from tests.sweeps import sweep

SIZE = 8  # microbatches of a batch


def built(name: str, ranks: int, microbatches: int = SIZE, **parameters: Any) -> Schedule:
    return schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)


def batches_of(number: int, rows: int = SIZE) -> tuple[list[Batch], Batch]:
    """Some batches, and all of them as one."""
    x, y = random_batch(number * rows)
    return [*zip(x.split(rows), y.split(rows), strict=True)], (x, y)


def executor_of(
    stages: Any, optimizer: Any = sgd, name: str = "pipedream", size: int = SIZE, **options: Any
) -> Executor:
    """Of all stages, in this process."""
    schedule = built(name, len(stages), size)
    given = {"in_process": True, **options}
    return Executor(schedule, numbered(stages), MSE, optimizer, **given)


def trained(
    rank: int | None, schedule: Schedule, modules: Any, results: Callable[[Executor], Any]
) -> tuple[list[float], list[Any]]:
    """What an executor of copies of these modules makes: the losses of microbatches, and the
    weights here."""
    modules = copy.deepcopy(modules)
    own = range(schedule.stages) if rank is None else schedule.stages_of(rank)
    stages = {stage: modules[stage] for stage in own}
    with Executor(schedule, stages, MSE, momentum, in_process=rank is None) as executor:
        losses = [loss for result in results(executor) for loss in result.losses]
    return losses, bits(stages.values())


def bits(stages: Iterable[nn.Module]) -> list[Any]:
    """The weights, as numbers."""
    return [p.tolist() for module in stages for p in module.parameters()]


def stepped(
    rank: int | None, schedule: Schedule, calls: Sequence[Batch], modules: Sequence[nn.Module]
) -> tuple[list[float], list[Any]]:
    """By steps on these batches."""
    return trained(rank, schedule, modules, lambda e: [e.step(x, target=y) for x, y in calls])


def streamed(
    rank: int | None, schedule: Schedule, batches: Sequence[Batch], modules: Any, segment: int
) -> tuple[list[float], list[Any]]:
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
    batches, _ = batches_of(8)
    for size in (8, 2):  # batches of a segment
        found = streamed(rank, schedule, batches, modules, segment=size * SIZE)
        calls = [joined(batches[i : i + size]) for i in range(0, 8, size)]
        expected = built(name, ranks, size * SIZE, **parameters)
        assert found == stepped(rank, expected, calls, modules)


def joined(batches: Sequence[Batch]) -> Batch:
    x, y = map(torch.cat, zip(*batches, strict=True))
    return x, y


ROUND_ROBIN: tuple[str, dict[str, Any]] = ("1f1b-rr", {"flush": False})
LISTS = [("pipedream", {}), ("pipedream", {"vertical_sync": True}), ("pipedream-2bw", {})]


# As in its paper the list of one batch has its OPTIM_STEPs last, that of two goes on.
PAPER_2BW = ("pipedream-2bw", {"gradient_accumulation": SIZE}, 2)
RANKS = [(*one, ranks) for ranks in (2, 4) for one in LISTS]


@pytest.mark.parametrize(
    ("name", "parameters", "ranks"), [*RANKS, PAPER_2BW, (*ROUND_ROBIN, 4)], ids=str
)
def test_a_segment_is_one_call(name: str, parameters: dict[str, Any], ranks: int) -> None:
    assert_is_one_call(None, ranks, name, **parameters)


ON_RANKS = [*((2, *one) for one in LISTS), (4, "pipedream", {}), (4, *ROUND_ROBIN)]


@on_ranks()
@sweep("ranks, name, parameters", ON_RANKS, quick=[ON_RANKS[0], ON_RANKS[-1]], ids=name_of)
def test_it_is_so_on_ranks(ranks: int, name: str, parameters: dict[str, Any], rank: int) -> None:
    assert_is_one_call(rank, ranks, name, **parameters)


@on_ranks(2)
def test_it_is_so_over_nccl(rank: int) -> None:
    with nccl_over_gloo():
        assert_is_one_call(rank, 2, "pipedream")


@on_ranks(4)
def test_it_is_so_in_two_pipelines(rank: int) -> None:
    mesh = pipelines()
    own, line = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    batches = batches_of(8)[0][4 * line : 4 * line + 4]
    x, y = joined(batches)
    streamed, stepped = noisy_stages(2)[own], noisy_stages(2)[own]
    with Executor(built("pipedream", 2), {own: streamed}, MSE, momentum, mesh=mesh) as executor:
        losses = [result.loss for result in executor.run(batches, segment=32)]
    with Executor(built("pipedream", 2, 32), {own: stepped}, MSE, momentum, mesh=mesh) as executor:
        assert executor.step(x, target=y).loss == pytest.approx(sum(losses) / 4)
    assert differing(streamed, stepped) == []
    assert everyone(losses) == [losses] * 4


def test_a_traced_segment_has_one_timeline() -> None:
    batches, (x, y) = batches_of(5)
    with executor_of(linear_stages(), trace=True) as executor:
        executor.step(x[:8], target=y[:8])
        list(executor.run(batches, segment=24))
        executor.step(x[:8], target=y[:8])
        lines = executor.timelines()
    assert [line.schedule.microbatches for line in lines] == [8, 24, 16, 8]
    assert [line.measured.step for line in lines if line.measured] == [0, 1, 2, 3]


def test_the_last_segment_may_be_shorter() -> None:
    stages, expected = noisy_stages(2), noisy_stages(2)
    batches, _ = batches_of(5)
    with executor_of(stages) as executor:
        list(executor.run(batches, segment=24))
    for step, (x, y) in enumerate((joined(batches[:3]), joined(batches[3:]))):
        with executor_of(expected, size=len(y), step=step) as executor:
            executor.step(x, target=y)
    assert_equal_stages(numbered(stages), expected)


def test_fewer_batches_than_ranks_have_microbatches_in_flight() -> None:
    batches, _ = batches_of(1, rows=2)
    with executor_of(noisy_stages(4), size=2) as executor:
        assert len([*executor.run(batches, segment=256)]) == 1
        assert [*executor.run([], segment=256)] == []
        assert executor.steps == 1


def test_a_scheduler_in_the_loop_gives_a_batch_one_rate() -> None:
    """Written out: each OPTIM_STEP of a batch at that batch's rate, on every stage."""
    batches, _ = batches_of(4)
    noted: list[list[float]] = []

    def noting(parameters: Any) -> torch.optim.Optimizer:
        made, rates = sgd(parameters), list[float]()
        noted.append(rates)
        made.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        return made

    with executor_of(linear_stages(3), noting) as executor:
        by_step = torch.optim.lr_scheduler.StepLR(executor.optimizer, 1, gamma=0.5)
        for _ in executor.run(batches, segment=32):
            by_step.step()
    assert noted == [[0.1 * 0.5**batch for batch in range(4) for _ in range(SIZE)]] * 3


def test_between_batches_the_module_has_its_newest_weights_and_random_states_are_the_users() -> (
    None
):
    modules = noisy_stages(2)
    batches, _ = batches_of(3)
    before = [id(p) for module in modules for p in module.parameters()]
    with executor_of(modules) as executor:
        torch.manual_seed(3)
        drawn = []
        for _ in executor.run(batches, segment=24):
            assert [id(p) for module in modules for p in module.parameters()] == before
            drawn.append(torch.randn(1).item())
    torch.manual_seed(3)
    assert drawn == [torch.randn(1).item() for _ in range(3)]


def test_what_is_not_finite_leaves_one_process_usable() -> None:
    batches, (x, y) = batches_of(2)
    batches[1][0].fill_(float("nan"))
    with executor_of(linear_stages()) as executor:
        said = message_of(lambda: [*executor.run(batches, segment=16)])
        assert "loss of microbatch 8 is nan" in said
        executor.step(x[:8], target=y[:8])


@pytest.mark.parametrize("closes", [False, True])
def test_who_leaves_early_has_the_segment_finished(closes: bool) -> None:
    modules = noisy_stages(2)
    batches, (x, y) = batches_of(4)
    expected = stepped(None, built("pipedream", 2, 32), [(x, y)], modules)[1]
    executor = executor_of(modules, momentum)
    results = executor.run(batches, segment=32)
    for number, _ in enumerate(results):
        if number == 1:
            if closes:
                executor.close()
            break
    del results
    assert bits(modules) == expected
    if not closes:
        assert executor.evaluate(x[:8], target=y[:8]).loss > 0
        executor.close()


def test_any_other_call_in_the_loop_is_refused() -> None:
    batches, (x, y) = batches_of(2)
    with executor_of(linear_stages()) as executor:
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
    with executor_of(linear_stages(), name=name) as executor:
        assert said in message_of(lambda: [*executor.run(**given)])


def test_batches_of_a_segment_have_the_same_arguments() -> None:
    (x, y), (later, _) = batches_of(2)[0]
    batches: list[Any] = [
        {"inputs": x, "target": y, "stage_inputs": {1: {"bias": y}}},
        {"inputs": later, "target": y, "loss_kwargs": {}},
    ]

    class Biased(nn.Linear):
        def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
            return super().forward(x) + bias

    stages, spec = [linear_stages()[0], Biased(4, 4)], {"bias": 0}
    with executor_of(stages, kwargs_chunk_spec=spec) as executor:
        assert message_of(lambda: [*executor.run(batches, segment=16)]) == (
            "run: batch 1 of a segment has inputs, target, and batch 0 inputs, target, "
            "stage_inputs[1]: give all batches of a stream the same arguments"
        )
        assert len([*executor.run(batches, segment=8)]) == 2


def test_the_samples_of_a_microbatch_are_counted_once() -> None:
    counted: list[int] = []

    def count(target: Tensor) -> int:
        counted.append(len(target))
        return len(target)

    with executor_of(linear_stages(), count=count) as executor:
        list(executor.run(batches_of(3)[0], segment=16))
    assert counted == [1] * 3 * SIZE


def test_a_list_that_was_changed_needs_to_be_told_how_it_is_made() -> None:
    schedule = built("pipedream", 2)
    changed = Schedule.of(schedule.name, schedule.placement, schedule.actions)
    batches = batches_of(2)[0]
    with Executor(changed, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        assert "pass schedule=lambda microbatches" in message_of(executor.run, batches)
        assert len([*executor.run(batches, schedule=lambda m: built("pipedream", 2, m))]) == 2


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_loader_that_raises_or_ctrl_c_leaves_a_drained_pipeline(interrupts: bool) -> None:
    modules = noisy_stages(2)
    batches, (x, y) = batches_of(4)

    def drawn() -> Iterator[Batch]:
        yield from batches[:3]
        if not interrupts:
            raise OSError("the disk is gone")
        yield batches[3]

    calls = [(x[:16], y[:16])]
    expected = stepped(None, built("pipedream", 2, 16), calls, modules)[1]
    handler = signal.getsignal(signal.SIGINT)
    with executor_of(modules, momentum) as executor:
        results = executor.run(drawn(), segment=16)
        next(results)
        if interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt, match="2 batches were applied"):
                next(results)
        else:
            with pytest.raises(OSError, match="the disk is gone") as raised:
                list(results)
            note = "Executor.run: 2 batches were applied; the pipeline is drained"
            assert raised.value.__notes__ == [note]
        assert signal.getsignal(signal.SIGINT) is handler
        assert bits(modules) == expected
        executor.step(x[:8], target=y[:8])


def executor_on(rank: int, stage: nn.Module | None = None) -> Executor:
    stages = {rank: stage or linear_stages()[rank]}
    return Executor(built("pipedream", 2), stages, MSE, sgd, timeout=60)


@on_ranks(2)
@pytest.mark.parametrize("fault", ["raises", "shorter", "other", "uncut", "leaves", "interrupted"])
def test_ranks_that_part_are_told(fault: str, rank: int) -> None:
    """Nothing hangs, and each says what the other has done."""
    batches, _ = batches_of(4)
    here = fault if rank == 1 else ""
    others = {"shorter": [], "uncut": [random_batch(3)], "other": [random_batch(8, seed=9)]}
    batches[2:] = others.get(here, batches[2:3]) + batches[3:]

    def drawn() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if here == "raises" and number == 2:
                raise OSError("the disk is gone")
            yield batch

    executor = executor_on(rank)
    said = ""
    try:
        for number, _ in enumerate(executor.run(drawn(), segment=16)):
            if number == 0 and here == "leaves":
                break
            if number == 0 and here == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
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
    with executor_on(rank) as executor:
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
def test_sigterm_on_one_rank_asks_all_to_stop_at_the_end_of_a_segment(rank: int) -> None:
    batches, _ = batches_of(2)
    with executor_on(rank) as executor:
        assert everyone(executor.stop_requested) == [False, False]
        for number, _ in enumerate(executor.run(batches * 200, segment=16)):
            if number == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if executor.stop_requested:
                break
        assert number % 2 == 1
        assert number < 399
        assert everyone(number) == [number] * 2


@on_ranks(2)
def test_a_rank_that_fails_in_a_segment_breaks_the_executor_on_all(rank: int) -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e3:
                raise ValueError("on purpose")
            return super().forward(x)

    batches, (x, y) = batches_of(4)
    batches[3][0].fill_(1e6)
    executor = executor_on(rank, nn.Linear(4, 4) if rank else Failing(4, 4))
    said = message_of(lambda: [*executor.run(batches, segment=16)])
    assert "ValueError: on purpose" in said
    assert "broken" in message_of(executor.step, x[:8], target=y[:8])
    executor.close()
    everyone(rank)


def test_where_a_batch_ends_in_a_list() -> None:
    """Two stages of a rank that step in turn, batches of two microbatches."""
    turn = "0F{0} 1F{0} 1B{0} 1OPTIM_STEP 0B{0} 0OPTIM_STEP "
    schedule = listed(4, "0 0", "".join(turn.format(m) for m in range(4)))
    assert ends_of_batches(schedule, 0, 2) == [12]
    assert ends_of_batches(schedule, 0, 1) == [6, 12, 18]


def test_an_update_of_two_batches_is_refused() -> None:
    schedule = built("pipedream-2bw", 2, 32, gradient_accumulation=16)
    message = message_of(check_batches, schedule, 8)
    assert "OPTIM_STEP of stage 0 applies microbatches of batches 0 and 1 at once" in message


def test_stages_of_a_rank_that_are_in_different_batches_are_refused() -> None:

    def crossing(pipe: Pipeline, rank: int) -> Iterator[Action]:
        for m in range(pipe.microbatches):
            yield from (forward(0, m), forward(1, m), backward(1, m), optim_step(1))
            if m:
                yield from (backward(0, m - 1), optim_step(0))
        yield from (backward(0, pipe.microbatches - 1), optim_step(0))

    generator = schedir.schedule("crossing", placement=lambda pipe: [0, 0])(crossing)
    schedule = schedir.build(generator, ranks=1, microbatches=8)
    with Executor(schedule, numbered(linear_stages()), MSE, sgd, in_process=True) as executor:
        message = message_of(lambda: [*executor.run(batches_of(2)[0], segment=16)])
    assert "OPTIM_STEP of stage 0 applies batch 0 after another stage's has applied 1" in message
