"""Models that torch's own ways have cut: by hand, on meta, and by `pipeline()`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.arguments import whole_name
from schedir.training import Checkpoint, Stages, gathered_state, stages_of_pipe
from tests.runtime.kit import MSE, adamw, random_batches
from tests.runtime.on_ranks import on_ranks

# torch.export's own
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


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


MICROBATCHES = 2


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


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return MSE(output[0] * output[1], target)


def compare(sched: schedir.Schedule, stages: Stages, model: nn.Module, **options: Any) -> None:
    """Two steps of both. The sum over a tie is taken last, which may round another way."""
    (ids, mask), y = batch()
    optimizer = adamw(model.parameters())
    pieces = [((i, m), t) for i, m, t in zip(*(x.chunk(2) for x in (ids, mask, y)), strict=True)]
    with Executor(sched, stages, loss_fn, adamw, ties=stages.ties, **options) as executor:
        for _ in range(2):
            loss = plain_step([model], loss_fn, [optimizer], pieces)
            found = executor.step((ids, mask), target=y).loss
            assert found == pytest.approx(loss, rel=1e-6)
    state = model.state_dict()
    for stage in stages.values():
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(value, state[whole_name(name)])


SPLITS = ("blocks.1", "blocks.2")


def test_values_that_skip_stages_are_carried_along() -> None:
    model = skipping()
    sched = schedir.build("1f1b", ranks=3, microbatches=MICROBATCHES)
    (ids, mask), _ = batch()
    pipe = pipe_of(model, (ids[:2], mask[:2]), *SPLITS)
    stages = stages_of_pipe(pipe, sched)
    names = {name for stage in stages.values() for name in stage.state_dict()}
    assert names == set(model.state_dict())
    assert stages.ties == ([(0, "embedding.weight"), (2, "head.weight")],)
    assert [summary.layers for summary in stages.summaries] == [
        ("embedding", "blocks.0"),
        ("blocks.1",),
        ("blocks.2", "head"),
    ]
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
    (ids, mask), _ = batch()
    sched = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = stages_of_pipe(pipe_of(model, (ids[:2], mask[:2])), sched)
    assert len(stages.ties) == 2
    compare(sched, stages, model, in_process=True)
    with Executor(sched, stages, loss_fn, adamw, ties=stages.ties, in_process=True) as executor:
        whole = gathered_state(executor)
        Checkpoint(executor).save(tmp_path)
    assert whole is not None
    assert whole.keys() == model.state_dict().keys()
    Checkpoint(model).load_weights(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole[name])


class AgainNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        pipe_split()
        return torch.relu(self.norm(x))


def test_statistics_can_not_be_shared_by_stages() -> None:
    sched = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    with pytest.raises(ExecutionError, match="norm is called in stages 0 and 1"):
        stages_of_pipe(pipe_of(AgainNormed(), (torch.randn(4, 4),)), sched)


@on_ranks(2)
def test_a_pipe_trains_on_ranks(rank: int) -> None:
    (ids, mask), _ = batch()
    model = skipping()
    sched = schedir.build("interleaved-1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = stages_of_pipe(pipe_of(model, (ids[:2], mask[:2]), *SPLITS, "head"), sched)
    assert list(stages) == list(sched.stages_of(rank))
    compare(sched, stages, model)


def test_inputs_go_in_by_name_too() -> None:
    (ids, mask), y = batch()
    sched = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    pipe = pipe_of(skipping(), (ids[:2], mask[:2]), SPLITS[0])
    losses = []
    for given in ((ids, mask), {"mask": mask, "ids": ids}):
        stages = stages_of_pipe(pipe, sched)
        with Executor(sched, stages, loss_fn, ties=stages.ties, in_process=True) as executor:
            losses.append(executor.step(given, target=y).loss)
    assert losses[0] == losses[1]


def test_a_pipe_of_another_number_of_stages_is_refused() -> None:
    (ids, mask), _ = batch()
    sched = schedir.build("1f1b", ranks=4, microbatches=MICROBATCHES)
    pipe = pipe_of(skipping(), (ids[:2], mask[:2]), SPLITS[0])
    with pytest.raises(ExecutionError, match="split into 2 stages, but the schedule has 4"):
        stages_of_pipe(pipe, sched)
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


def train_by_hand(sched: schedir.Schedule, held: list[int], **options: Any) -> None:
    torch.manual_seed(0)
    whole = Transformer()
    stages = {stage: by_hand(stage) for stage in held}
    for module in stages.values():  # its names are those of the whole model
        loaded = {name: whole.state_dict()[name] for name in module.state_dict()}
        module.load_state_dict(loaded)
    optimizer = adamw(whole.parameters())
    with Executor(sched, stages, MSE, adamw, **options) as executor:
        for x, y in random_batches(2):
            pieces = list(zip(x.chunk(2), y.chunk(2), strict=True))
            assert executor.step(x, target=y).loss == plain_step([whole], MSE, [optimizer], pieces)
    for module in stages.values():
        state = {name: whole.state_dict()[name] for name in module.state_dict()}
        assert [name for name, v in module.state_dict().items() if not v.equal(state[name])] == []


def test_modules_split_by_hand_train_as_the_whole_in_one_process() -> None:
    sched = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    train_by_hand(sched, [0, 1], in_process=True)


@on_ranks(2)
def test_modules_split_by_hand_train_as_the_whole_on_ranks(rank: int) -> None:
    train_by_hand(schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES), [rank])


@on_ranks(2)
def test_a_pipe_without_skips_runs_as_it_is(rank: int) -> None:
    torch.manual_seed(0)
    whole = Transformer()
    (x, y), *_ = random_batches(1)
    pipe = pipe_of(whole, (x[:4],), "layers.2")
    sched = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    optimizer = adamw(whole.parameters())
    stage = pipe.get_stage_module(rank)
    with Executor(sched, {rank: stage}, MSE, adamw) as executor:
        pieces = list(zip(x.chunk(2), y.chunk(2), strict=True))
        assert executor.step(x, target=y).loss == plain_step([whole], MSE, [optimizer], pieces)
    assert all(v.equal(whole.state_dict()[name]) for name, v in stage.state_dict().items())
