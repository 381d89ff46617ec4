"""Models that torch's own ways have cut: by hand, on meta, and by `pipeline()`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import Checkpoint, Stages, gathered_state, stages_of_pipe
from tests.runtime.kit import MSE, adamw, message_of
from tests.runtime.on_ranks import on_ranks
from tests.training.test_checkpoint import assert_same
from tests.training.test_partition import assert_trains_as, state_of

# torch.export's own
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


SPLITS = ("blocks.1", "blocks.2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * mask + x


class Skipping(nn.Module):
    """Its mask goes into every block, and what it embeds to its end, which shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        embedded = x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask) * self.scale
        return self.head(x + embedded), mask


def batch() -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (4, 3), generator=generator)
    return (ids, (ids > 1)[..., None].float()), torch.randn(4, 3, 6, generator=generator)


def skipping() -> Skipping:
    torch.manual_seed(7)
    return Skipping()


def pipe_of(model: nn.Module, given: Any, *splits: str) -> Pipe:
    split_spec = dict.fromkeys(splits, SplitPoint.BEGINNING)
    return pipeline(copy.deepcopy(model), given, split_spec=split_spec or None)


GIVEN = tuple(x[:2] for x in batch()[0])  # a microbatch
ON_TWO = schedir.build("1f1b", ranks=2, microbatches=2)


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return MSE(output[0] * output[1], target)


def compare(sched: schedir.Schedule, stages: Stages, model: nn.Module, **options: Any) -> None:
    """Two steps of both. The sum over a tie is taken last, which may round another way."""
    options |= {"ties": stages.ties, "near": (1e-6, 1e-6)}
    assert_trains_as(model, sched, stages, loss_fn, batches=[batch()] * 2, **options)


def test_values_that_skip_stages_are_carried_along() -> None:
    model = skipping()
    sched = schedir.build("1f1b", ranks=3, microbatches=2)
    stages = stages_of_pipe(pipe_of(model, GIVEN, *SPLITS), sched)
    assert state_of(stages).keys() == model.state_dict().keys()
    assert stages.ties == ([(0, "embedding.weight"), (2, "head.weight")],)
    found = [[*summary.layers] for summary in stages.summaries]
    assert found == [["embedding", "blocks.0"], ["blocks.1"], ["blocks.2", "head"]]
    compare(sched, stages, model, in_process=True)


class Again(nn.Module):
    """One layer is called in both stages, and twice in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.again(self.embedding(ids)))
        pipe_split()
        return self.head(self.again(torch.tanh(self.again(x)))), mask


def test_a_module_that_is_called_again_is_one(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = Again()
    stages = stages_of_pipe(pipe_of(model, GIVEN), ON_TWO)
    assert len(stages.ties) == 2
    compare(ON_TWO, stages, model, in_process=True)
    with Executor(ON_TWO, stages, loss_fn, adamw, ties=stages.ties, in_process=True) as executor:
        whole = gathered_state(executor)
        Checkpoint(executor).save(tmp_path)
    Checkpoint(model).load_weights(tmp_path)
    assert_same(model.state_dict(), whole)


class AgainNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        pipe_split()
        return torch.relu(self.norm(x))


def test_statistics_can_not_be_shared_by_stages() -> None:
    with pytest.raises(ExecutionError, match=r"stages 0 and 1 share .*, norm\.runn"):
        stages_of_pipe(pipe_of(AgainNormed(), (torch.randn(4, 4),)), ON_TWO)


@on_ranks(2)
def test_a_pipe_trains_on_ranks(rank: int) -> None:
    model = skipping()
    sched = schedir.build("interleaved-1f1b", ranks=2, microbatches=2)
    stages = stages_of_pipe(pipe_of(model, GIVEN, *SPLITS, "head"), sched)
    assert list(stages) == list(sched.stages_of(rank))
    compare(sched, stages, model)


def test_inputs_go_in_by_name_too() -> None:
    (ids, mask), y = batch()
    stages = stages_of_pipe(pipe_of(skipping(), GIVEN, SPLITS[0]), ON_TWO)
    with Executor(ON_TWO, stages, loss_fn, ties=stages.ties, in_process=True) as executor:
        expected = executor.step((ids, mask), target=y).loss
        assert executor.step({"mask": mask, "ids": ids}, target=y).loss == expected


def test_a_pipe_of_another_number_of_stages_is_refused() -> None:
    sched = schedir.build("1f1b", ranks=4, microbatches=2)
    pipe = pipe_of(skipping(), GIVEN, SPLITS[0])
    assert "split into 2 stages, but the schedule has 4" in message_of(stages_of_pipe, pipe, sched)
    with pytest.raises(ExecutionError, match=r"what torch's pipeline.* returns, not Skipping"):
        stages_of_pipe(skipping(), sched)  # type: ignore[arg-type]


class Transformer(nn.Module):
    """Runs what is there, as torch's pipeline tutorial has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module | None = nn.Linear(4, 8)
        self.layers = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in range(4)})
        self.norm: nn.Module | None = nn.LayerNorm(8)
        self.output: nn.Module | None = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.first is not None else x
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def by_hand(stage: int) -> Transformer:
    """A stage: the whole model on meta, without what other stages own."""
    with torch.device("meta"):
        model = Transformer()
    for number in (2, 3) if stage == 0 else (0, 1):
        del model.layers[str(number)]
    if stage == 0:
        model.norm = model.output = None
    else:
        model.first = None
    return model.to_empty(device="cpu")


def test_modules_split_by_hand_train_as_the_whole() -> None:
    torch.manual_seed(0)
    whole = Transformer()
    stages = {stage: by_hand(stage) for stage in range(2)}
    for module in stages.values():  # its names are those of the whole model
        module.load_state_dict({name: whole.state_dict()[name] for name in module.state_dict()})
    assert_trains_as(whole, ON_TWO, stages, in_process=True)


@on_ranks(2)
def test_a_pipe_without_skips_runs_as_it_is(rank: int) -> None:
    torch.manual_seed(0)
    whole = Transformer()
    pipe = pipe_of(whole, (torch.ones(4, 4),), "layers.2")
    assert_trains_as(whole, ON_TWO, {rank: pipe.get_stage_module(rank)})
