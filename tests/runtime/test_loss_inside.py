"""A last stage that is given its labels and returns the loss itself, as transformers' models do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.runtime.kit import sgd
from tests.runtime.on_ranks import on_ranks

IGNORED = -100


class Scored(nn.Module):
    """A head that takes the labels, of which some count for nothing, and returns its mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden)
        loss: Tensor = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
        return loss


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
    return [nn.Linear(4, 4), Scored()], torch.randn(10, 4), labels


@on_ranks(2)
def test_it_trains_as_one_process_does(rank: int) -> None:
    stages, x, labels = problem()
    sched = schedir.build("1f1b", ranks=2, microbatches=4)
    whole = nn.ModuleList(copy.deepcopy(stages))
    optimizer = sgd(whole.parameters())
    mine = {rank: stages[rank]}
    total = int((labels != IGNORED).sum())
    # Only the last rank has labels, and nothing else.
    given: dict[str, Any] = {"stage_inputs": {1: {"labels": labels}}} if rank else {"inputs": x}
    specs = {"labels": 0}
    with Executor(sched, mine, loss_of, sgd, count=labelled, kwargs_chunk_spec=specs) as executor:
        for _ in range(3):
            optimizer.zero_grad()
            mean = 0.0
            for part, told in zip(x.tensor_split(4), labels.tensor_split(4), strict=True):
                weight = int((told != IGNORED).sum()) / total
                loss = whole[1](whole[0](part), labels=told) * weight
                loss.backward()
                mean += loss.item()
            assert executor.evaluate(**given).loss == pytest.approx(mean, rel=1e-6)
            optimizer.step()
            assert executor.step(**given).loss == pytest.approx(mean, rel=1e-6)
            for ours, theirs in zip(
                stages[rank].parameters(), whole[rank].parameters(), strict=True
            ):
                assert torch.equal(ours, theirs)


def test_a_loss_of_nothing_is_refused_at_once() -> None:
    stages, x, labels = problem()
    sched = schedir.build("1f1b", ranks=2, microbatches=4)
    held = dict(enumerate(stages))
    for wrong in (None, "mean"):
        with pytest.raises(schedir.ExecutionError, match="loss_fn must be a function"):
            Executor(sched, held, wrong, sgd, in_process=True)  # type: ignore[arg-type]
    with (
        Executor(sched, held, loss_of, sgd, in_process=True) as executor,
        pytest.raises(schedir.ExecutionError, match="stage 1, which runs here, needs target"),
    ):
        executor.step(x, stage_inputs={0: {"labels": labels}})
