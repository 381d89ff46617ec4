"""What holds on the CPU holds on a device that queues its work, though the host reads nothing
within a step: the same tests, and what is read late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.processes.groups import Group
from tests.runtime import test_boundaries_on_ranks as boundaries
from tests.runtime import test_first_calls as first_calls
from tests.runtime import test_in_process as in_process
from tests.runtime import test_replicas_on_ranks as replicas
from tests.runtime import test_stepping as stepping
from tests.runtime import test_ties_on_ranks as ties
from tests.runtime.far import FarDevice
from tests.runtime.kit import (
    MSE,
    Twins,
    adamw,
    everyone,
    linear_stages,
    message_of,
    numbered,
    random_batch,
    random_batches,
    refused,
    sgd,
    train_on_rank,
)
from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.parity import Case, assert_trains_as_one_process, cases
from tests.runtime.test_no_host_read import Idle
from tests.sweeps import sweep

TWO = schedir.build("1f1b", ranks=2, microbatches=2)


@sweep("case", cases(3), quick=lambda case: case.microbatches == 7, ids=str)
def test_all_ranks_train_as_one_process(case: Case, far: FarDevice) -> None:
    assert_trains_as_one_process(case, None)


clipping = stepping.test_clipping_is_that_of_the_whole_model
ALONE: dict[str, Callable[[], None]] = {
    "clipping": partial(clipping, "interleaved-1f1b", 0.05),
    "clipping by much": partial(clipping, "interleaved-1f1b", 1e6),
    "tied embeddings": partial(stepping.test_tied_embeddings_train_as_one, "1f1b", 0.05),
    "clipping after a failure": stepping.test_clipping_goes_on_after_a_failure,
    "a failure": in_process.test_after_a_failure_the_next_step_finds_nothing_of_it,
    "losses": in_process.test_a_loss_that_is_read_late_is_that_of_its_step,
    "a profile": in_process.test_a_profile_names_the_actions,
}


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name: str, far: FarDevice) -> None:
    ALONE[name]()


without = boundaries.test_ranks_without_stages_take_part
two_pipelines = partial(
    replicas.test_two_pipelines_train_as_one_model, name="1f1b", dims=("dp", "pp")
)
counted = {"count": lambda target: torch.tensor(len(target))}
ON_RANKS: dict[tuple[int, str], Callable[[int], None]] = {
    (2, "tied copies"): ties.test_tied_copies_are_clipped_and_trained_as_one_parameter,
    (2, "clipping"): ties.test_clipping_is_that_of_the_whole_model,
    (2, "copies that drift"): ties.test_tied_copies_that_drift_apart_are_found,
    (2, "several tensors"): boundaries.test_several_tensors_cross_a_boundary,
    (2, "no gradient"): boundaries.test_a_gradient_that_is_none_arrives_as_absent,
    (3, "no parameters"): ties.test_the_norm_passes_a_stage_without_parameters,
    (3, "ties that overlap"): ties.test_ties_may_overlap_in_ranks,
    (3, "replicas"): replicas.test_replicas_of_a_stage_train_as_one_model,
    (3, "a chain of replicas"): replicas.test_replicas_may_form_a_chain,
    (3, "no stage on rank 1"): partial(without, placement=(0, 2)),
    (3, "stages on rank 1"): partial(without, placement=(1,)),
    (4, "pipelines"): partial(two_pipelines, options={}),
    (4, "clipped pipelines"): partial(two_pipelines, options={"clip_grad_norm": 0.05}),
    (4, "counted pipelines"): partial(two_pipelines, options=counted),
}


@on_ranks()
@pytest.mark.parametrize(("ranks", "name"), ON_RANKS, ids=name_of)
def test_on_ranks(rank: int, ranks: int, name: str, far: FarDevice) -> None:
    ON_RANKS[ranks, name](rank)


@on_ranks(2)
def test_a_mask_says_which_gradients_there_are(rank: int, far: FarDevice) -> None:
    """Which of two tensors gets a gradient depends on data."""
    example = (torch.empty(2, 4), torch.empty(2, 4))
    stages = [first_calls.two(), first_calls.chooses()]
    train_on_rank(rank, stages, random_batches(4), boundaries={0: example})


@on_ranks(4)
def test_what_no_replica_has_a_gradient_of_is_left_alone(rank: int, far: FarDevice) -> None:
    mesh = replicas.pipelines()
    module = Idle(4, 4)
    stages = {mesh.get_local_rank("pp"): module}
    options: dict[str, Any] = {"mesh": mesh, "clip_grad_norm": 1.0}
    with Executor(TWO, stages, MSE, adamw, **options) as executor:
        x, y = random_batch(rows=4)
        norms = [executor.step(x, target=y).grad_norm for _ in range(3)]
    assert torch.equal(module.idle, torch.ones(4))  # AdamW would have decayed it
    assert everyone(norms) == [norms] * 4


@on_ranks(3)
@sweep("reader", [0, 1, 2], quick=[0])
def test_one_rank_alone_may_read_the_loss(rank: int, reader: int, far: FarDevice) -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=3)
    twins = Twins(linear_stages(3), schedule, rank)
    results = []
    with twins.executor(timeout=60.0) as executor:
        for x, y in random_batches(5, rows=6):
            results.append(executor.step(x, target=y))
            expected = twins.step((x, y))
            assert rank != reader or results[-1].loss == expected
    losses = [result.loss for result in results]  # after the end, too
    assert everyone(losses) == [losses] * 3


@on_ranks(2)
def test_a_rank_that_fails_ends_the_others_though_losses_are_under_way(
    rank: int, far: FarDevice
) -> None:
    class Fails(nn.Linear):
        left = 2

        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor and self.training:
                self.left -= 1
                if self.left < 0:
                    raise ValueError("not now")
            return super().forward(x)

    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    stage = [nn.Linear(4, 4), Fails(4, 4)][rank]
    x, y = random_batch()
    executor = Executor(schedule, {rank: stage}, MSE, sgd, timeout=60.0)
    with far.step():  # the device comes to nothing
        for _ in range(2):
            executor.step(x, target=y)
        said = message_of(executor.step, x, target=y)
    assert "1F0: ValueError: not now" in said
    assert "is broken" in message_of(executor.step, x, target=y)


def infinite(output: Tensor, target: Tensor) -> Tensor:
    return (output * math.inf).mean()


def executor_of(loss_fn: Any = MSE, optimizer: Any = sgd, **options: Any) -> Executor:
    return Executor(TWO, numbered(linear_stages()), loss_fn, optimizer, in_process=True, **options)


def weights(executor: Executor) -> list[Tensor]:
    return [p.clone() for stage in executor.stages.values() for p in stage.parameters()]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_that_is_not_finite_is_read_once_before_the_first_step(
    clip: float | None, far: FarDevice
) -> None:
    x, y = random_batch()
    with executor_of(infinite, clip_grad_norm=clip) as executor:
        with refused("the loss of microbatch 0 is"):
            executor.step(x, target=y)
        assert far.reads == 1


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_without_an_update_a_loss_that_is_not_finite_is_said_at_the_next_call(
    optimizer: Any, far: FarDevice
) -> None:
    x, y = random_batch()
    executor = executor_of(infinite, optimizer)
    executor.step(x, target=y, update=False)
    assert far.reads == 0
    with refused("the loss of microbatch 0 is"):
        executor.evaluate(x, target=y)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_is_skipped_for_its_loss(clip: float | None, far: FarDevice) -> None:
    x, y = random_batch()
    options: dict[str, Any] = {"clip_grad_norm": clip, "nonfinite": "skip"}
    with executor_of(lambda output, target: MSE(output, target) + math.inf, **options) as executor:
        before = weights(executor)
        assert executor.step(x, target=y).skipped == ((0, 0), (1, 0))
        assert all(map(torch.equal, before, weights(executor)))


@pytest.mark.parametrize(
    ("number", "text"), [(-1.0, "count returns -1"), (0.0, "no samples at all")]
)
def test_a_wrong_count_is_said_at_the_next_call(number: float, text: str, far: FarDevice) -> None:
    x, y = random_batch()
    # Else the gradients of samples below none would be found first.
    options: dict[str, Any] = {"count": lambda _: torch.tensor(number), "nonfinite": "ignore"}
    executor = executor_of(**options)
    before = weights(executor)
    result = executor.step(x, target=y)
    if not number:
        assert math.isnan(result.loss)
        assert all(map(torch.equal, before, weights(executor)))  # of nothing there is no gradient
    with refused(text):
        executor.step(x, target=y)


def test_times_are_those_of_the_device(far: FarDevice) -> None:
    x, y = random_batch()
    with executor_of() as executor:
        for _ in range(2):
            result = executor.step(x, target=y)
    # A made-up millisecond each: a forward and a backward for each microbatch, and the update.
    assert result.busy == pytest.approx(2 * (2 * 2 + 1) * 1e-3)
    assert result.elapsed == 1e-3


@on_ranks(4)
def test_what_hosts_tell_each_other_stays_on_the_host(rank: int) -> None:
    mesh = replicas.pipelines()
    place = mesh.get_local_rank("pp")
    x, y = random_batch(rows=4)
    options: dict[str, Any] = {"mesh": mesh, "clip_grad_norm": 1.0}
    losses = []
    for device in ("cpu", "meta"):
        stages = {place: linear_stages()[place]}
        with torch.device(device), Executor(TWO, stages, MSE, sgd, **options) as executor:
            losses.append([executor.step(x, target=y).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_who_has_all_gradients_waits_for_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Tensor] = []
    waited: list[int] = []
    work = SimpleNamespace(wait=lambda: waited.append(len(told)))

    def allreduce(tensors: list[Tensor]) -> SimpleNamespace:
        """With others who have the second gradient alone."""
        told.append(tensors[0].add_(torch.tensor([0, 1, 0], dtype=torch.int32)))
        return work

    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    sums, hosts = Group(None), Group("some")
    monkeypatch.setattr(sums, "allreduce", lambda tensors: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(hosts, "allreduce", allreduce)
    reduction = Reduction(parameters, sums, hosts, "stage 0's")

    def summed(*there: bool) -> list[bool]:
        for parameter, is_there in zip(parameters, there, strict=True):
            parameter.grad = torch.ones(1) if is_there else None
        reduction.post()
        reduction.finish()
        return [parameter.grad is not None for parameter in parameters]

    assert summed(True, True, True) == [True, True, True]
    assert not waited
    assert summed(True, False, False) == [True, True, False]
    assert waited == [1, 2]  # the first when the second was told
