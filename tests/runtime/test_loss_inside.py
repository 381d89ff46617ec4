"""A last stage that is given its labels and returns the loss itself, as transformers' models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import Calls, Twins, microbatches_of, numbered, refused, sgd
from tests.runtime.on_ranks import on_ranks

IGNORED = -100


def scored(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of labels, of which some count for nothing."""
    return nn.functional.cross_entropy(head(hidden), labels, ignore_index=IGNORED)


def loss_of(output: Any, target: None) -> Tensor:
    assert target is None
    assert isinstance(output, Tensor)
    return output


def labelled(extra: dict[str, Tensor]) -> Tensor:
    return (extra["labels"] != IGNORED).sum()


def problem() -> tuple[list[nn.Module], Tensor, Tensor]:
    torch.manual_seed(3)
    labels = torch.randint(3, (10,))
    labels[:4] = IGNORED
    labels[0] = 1
    return [nn.Linear(4, 4), Calls(scored, nn.Linear(4, 3))], torch.randn(10, 4), labels


SCHEDULE = schedir.build("1f1b", ranks=2, microbatches=4)


@on_ranks(2)
def test_it_trains_as_one_process_does(rank: int) -> None:
    stages, x, labels = problem()
    twins = Twins(stages, SCHEDULE, rank, sgd)
    first, last = twins.whole
    # Only the last rank has labels, and nothing else.
    given: dict[str, Any] = {"stage_inputs": {1: {"labels": labels}}} if rank else {"inputs": x}
    options: dict[str, Any] = {"count": labelled, "kwargs_chunk_spec": {"labels": 0}}
    with twins.executor(loss_of, **options) as executor:
        for _ in range(3):
            mean = 0.0
            for part, told in microbatches_of((x, labels), 4):
                weight = (told != IGNORED).sum() / (labels != IGNORED).sum()
                loss = last(first(part), labels=told) * weight
                loss.backward()
                mean += loss.item()
            assert executor.evaluate(**given).loss == pytest.approx(mean, rel=1e-6)
            assert executor.step(**given).loss == pytest.approx(mean, rel=1e-6)
            twins.update()
            twins.assert_equal()


def test_labels_of_another_stage_are_no_target() -> None:
    stages, x, labels = problem()
    executor = Executor(SCHEDULE, numbered(stages), loss_of, sgd, in_process=True)
    with refused("stage 1, which runs here, needs target"):
        executor.step(x, stage_inputs={0: {"labels": labels}})
