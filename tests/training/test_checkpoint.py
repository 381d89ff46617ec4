"""A checkpoint of one training is loaded by any other of the same model, and by a plain one."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Optimizer, lr_scheduler, swa_utils

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor
from schedir.training import Batches, Checkpoint, gathered_state, partition
from schedir.training.checkpoint.storage import sealed, unsealed
from tests.runtime.kit import MSE, ScaledLoss, adamw, momentum, random_batches
from tests.runtime.test_optimizer_view import advance

MICROBATCHES = 4
SEED = 3


def layers(width: int = 4) -> list[nn.Module]:
    """With statistics, and one without parameters."""
    torch.manual_seed(5)
    return [
        nn.Linear(4, width),
        nn.BatchNorm1d(width),
        nn.Tanh(),
        nn.Linear(width, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 4),
    ]


def decaying(parameters: Any) -> Optimizer:
    """In two groups, of which a stage may have one empty."""
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))


class Training:
    """One way to train the model: `step` makes a step, `checkpoint` is of it."""

    def __init__(self, make: Callable[[Any], Optimizer], model: Any, loss_fn: Any) -> None:
        self.make, self.loss_fn = make, loss_fn
        self.model: Any = model
        self.optimizer: Any = None
        self.scheduler: Any = None

    def schedule_lr(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def step(self, x: Tensor, y: Tensor) -> None:
        if isinstance(self.model, Executor):
            self.model.step(x, target=y)
        else:
            parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
            for a, b in parts:
                (self.loss_fn(self.model(a), b) / MICROBATCHES).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()

    def checkpoint(self) -> Checkpoint:
        if isinstance(self.model, Executor):
            return Checkpoint(self.model, scheduler=self.scheduler)
        return Checkpoint(
            self.model, self.optimizer, scheduler=self.scheduler, loss_fn=self.loss_fn
        )

    def state(self) -> dict[str, Tensor]:
        if isinstance(self.model, Executor):
            found = gathered_state(self.model)
            assert found is not None
            return found
        return dict(self.model.state_dict())


def plain(make: Callable[[Any], Optimizer], of: list[nn.Module], loss_fn: Any) -> Training:
    training = Training(make, partition(of, 1)[0], loss_fn)
    held = [*training.model.parameters()]
    if isinstance(loss_fn, nn.Module):
        held += loss_fn.parameters()
    training.schedule_lr(make(held))
    return training


def in_process(name: str, ranks: int, **options: Any) -> Callable[..., Training]:
    def make_training(
        make: Callable[[Any], Optimizer], of: list[nn.Module], loss_fn: Any
    ) -> Training:
        schedule = schedir.build(name, ranks=ranks, microbatches=MICROBATCHES, **options)
        stages = partition(of, schedule, by="uniform")
        executor = Executor(
            schedule, stages, loss_fn, make, in_process=True, seed=SEED, ties=stages.ties
        )
        training = Training(make, executor, loss_fn)
        training.schedule_lr(executor.optimizer)
        return training

    return make_training


WAYS: dict[str, Callable[..., Training]] = {
    "plain": plain,
    "1f1b on 2": in_process("1f1b", 2),
    "fill-drain on 4": in_process("fill-drain", 4),
    "interleaved on 2": in_process("interleaved-1f1b", 2, chunks=3),
    "pipedream on 3": in_process("pipedream", 3),
}


@contextmanager
def training_by(
    way: str, make: Callable[[Any], Optimizer], of: list[nn.Module] | None = None, loss: Any = None
) -> Iterator[Training]:
    training = WAYS[way](make, of or layers(), loss or MSE)
    yield training
    if isinstance(training.model, Executor):
        training.model.close()


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("saver", WAYS)
def test_a_checkpoint_of_any_cut_goes_on_under_every_other(saver: str, tmp_path: Path) -> None:
    """And then trains on as the plain model does; pipedream does so otherwise."""
    batches = random_batches(5)
    with training_by(saver, decaying, loss=ScaledLoss()) as first:
        for batch in batches[:3]:
            first.step(*batch)
        first.checkpoint().step = 3
        first.checkpoint().save(tmp_path)
        saved = first.state()
    reference: dict[str, Tensor] = {}
    for loader in WAYS:
        with training_by(loader, decaying, loss=ScaledLoss()) as second:
            checkpoint = second.checkpoint()
            checkpoint.load(tmp_path)
            assert_same(second.state(), saved)
            assert second.scheduler.last_epoch == 3
            assert isinstance(second.model, nn.Module) or second.model.steps == checkpoint.step
            for batch in batches[3:]:
                second.step(*batch)
            if loader == "plain":
                reference = {**second.state(), "loss": second.loss_fn.scale}
            elif loader != "pipedream on 3":
                assert_same({**second.state(), "loss": second.loss_fn.scale}, reference)


def test_what_a_checkpoint_is_without(tmp_path: Path) -> None:
    """What is asked for must be there; what is there need not be asked for."""
    model = partition(layers(), 1)[0]
    Checkpoint(model).save(tmp_path / "weights")
    optimizer = adamw(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    Checkpoint(model, optimizer, scheduler=scheduler).save(tmp_path / "all")
    for lacking, checkpoint in {
        "an optimizer": Checkpoint(model, optimizer),
        "a scheduler": Checkpoint(model, scheduler=scheduler),
        "batches": Checkpoint(model, batches=Batches([])),
        "history": Checkpoint(model, others={"history": Batches([])}),
    }.items():
        with pytest.raises(ExecutionError, match=f"was saved without {lacking}; leave that out"):
            checkpoint.load(tmp_path / "weights")
        checkpoint.load_weights(tmp_path / "weights")
    with pytest.raises(ExecutionError, match="the scheduler StepLR, but here that is LambdaLR"):
        Checkpoint(model, scheduler=SCHEDULERS["LambdaLR"](optimizer)).load(tmp_path / "all")
    other = partition(layers(), 1)[0]
    nn.init.zeros_(other.get_parameter("0.weight"))
    Checkpoint(other).load(tmp_path / "all")
    assert_same(other.state_dict(), model.state_dict())


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(2)})
    Checkpoint(model, loss_fn=ScaledLoss()).save(tmp_path)
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(3, 2), "d": nn.Linear(1, 1)})
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ExecutionError) as refused:
        Checkpoint(other).load(tmp_path)
    assert str(refused.value) == (
        f"the checkpoint in {tmp_path} is of another model: it lacks d.weight, d.bias; it has "
        "c.weight, c.bias, c.running_mean, c.running_var, c.num_batches_tracked and 1 more, which "
        "the model has not; b.weight is [2, 2] there and [2, 3] here; its loss has parameters: "
        "pass loss_fn="
    )
    assert_same(other.state_dict(), before)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = partition(layers(), 1)[0]
    optimizer = decaying(model.parameters())
    Checkpoint(model, optimizer).save(tmp_path)
    for match, other in {
        "saved with AdamW, but that of the model is SGD": momentum(model.parameters()),
        r"in param group 0 of the model, but .* differ: weight_decay 0\.3 and 0\.0, lr 0\.05 and": (
            adamw(model.parameters())
        ),
    }.items():
        with pytest.raises(ExecutionError, match=match):
            Checkpoint(model, other).load(tmp_path)
    partial = torch.optim.AdamW([model.get_parameter("0.weight")])
    Checkpoint(model, partial).save(tmp_path)
    with pytest.raises(ExecutionError, match=r"does not have 3\.weight, which is in param group 0"):
        Checkpoint(model, optimizer).load(tmp_path)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(7))])
    with pytest.raises(ExecutionError, match=r"of shape \[7\], that is in no state dict"):
        Checkpoint(model, stranger).save(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model = partition(layers(), 1)[0]

    def refusal(folder: Path = tmp_path) -> str:
        with pytest.raises(ExecutionError) as refused:
            Checkpoint(model).load(folder)
        return str(refused.value)

    assert "there is no such folder" in refusal(tmp_path / "none")
    assert "it has no .metadata" in refusal()
    assert not Checkpoint.is_at(tmp_path)
    Checkpoint(model).save(tmp_path)
    assert Checkpoint.is_at(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    content, metadata = data.read_bytes(), (tmp_path / ".metadata").read_bytes()
    data.write_bytes(content[:-10])
    assert f"it has {len(content) - 10} bytes, and had {len(content)}" in refusal()
    data.unlink()
    assert f"{data.name} is missing" in refusal()
    data.write_bytes(content)
    (tmp_path / ".metadata").write_bytes(metadata[:-10])
    assert f"{tmp_path / '.metadata'} is damaged" in refusal()
    (tmp_path / ".metadata").unlink()
    assert "as after a save that was interrupted" in refusal()


class Mischief:
    def __reduce__(self) -> Any:
        return print, ("mischief",)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("place", ["../elsewhere", "{folder}/elsewhere"])
def test_a_checkpoint_names_no_file_outside_of_its_folder(
    tmp_path: Path, place: str, listed: bool
) -> None:
    model = partition(layers(), 1)[0]
    folder = tmp_path / "checkpoint"
    Checkpoint(model).save(folder)
    pickled, files = unsealed((folder / ".metadata").read_bytes(), folder / ".metadata")
    metadata = pickle.loads(pickled)
    (file,) = {info.relative_path for info in metadata.storage_data.values()}
    (folder / file).rename(tmp_path / "elsewhere")
    named = place.format(folder=tmp_path)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=named)
    found = {named: files[file]} if listed else {}
    (folder / ".metadata").write_bytes(sealed(pickle.dumps(metadata), found))
    with pytest.raises(ExecutionError, match="names a file elsewhere"):
        Checkpoint(model).load_weights(folder)


def test_loading_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = partition(layers(), 1)[0]
    (tmp_path / ".metadata").write_bytes(sealed(pickle.dumps(Mischief()), {}))
    with pytest.raises(ExecutionError, match=r"not the metadata of a checkpoint.*builtins\.print"):
        Checkpoint(model).load(tmp_path)
    for state in ({"a": Mischief()}, {"a": Batches([])}):
        scheduler = Keeper(state)
        with pytest.raises(ExecutionError, match="the state of keeper can't be kept"):
            Checkpoint(model, others={"keeper": scheduler}).save(tmp_path)
    assert not capsys.readouterr().out


class Keeper:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_folder_has_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a save ends: as the process does, so that nobody tidies up."""
    model, other = (nn.Linear(2, 2) for _ in range(2))
    Checkpoint(model).save(tmp_path)
    for place, name in ((FileSystemWriter, "finish"), (Path, "replace"), (os, "fsync")):

        def dies(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(place, name, dies)
            with pytest.raises(KeyboardInterrupt):
                Checkpoint(other).save(tmp_path)
        found = nn.Linear(2, 2)
        Checkpoint(found).load(tmp_path)
        assert_same(found.state_dict(), model.state_dict())
    Checkpoint(other).save(tmp_path)
    Checkpoint(found).load(tmp_path)
    assert_same(found.state_dict(), other.state_dict())
    assert len(list(tmp_path.iterdir())) == 2  # what the others have left is gone


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
}


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_schedulers_go_on(
    make_scheduler: Callable[[Optimizer], Any], lr: Any, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)

    def parts() -> tuple[Optimizer, Any]:
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return optimizer, make_scheduler(optimizer)

    def rates(optimizer: Optimizer, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            advance(scheduler, 1.0)
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, scheduler = parts()
    rates(optimizer, scheduler, 2)
    Checkpoint(model, optimizer, scheduler=scheduler).save(tmp_path)
    resumed, again = parts()
    Checkpoint(model, resumed, scheduler=again).load(tmp_path)
    assert rates(resumed, again, 5) == rates(optimizer, scheduler, 5)
    assert type(resumed.param_groups[0]["lr"]) is type(lr)


def test_every_state_of_a_module_is_kept(tmp_path: Path) -> None:
    """Extra state, numbers of any type, what torch.compile names otherwise."""

    class Counts(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    first, second = (nn.Sequential(Counts(2, 2), nn.BatchNorm1d(2)).bfloat16() for _ in range(2))
    first.get_submodule("0").seen = 5  # type: ignore[assignment]
    first.get_buffer("1.num_batches_tracked").fill_(3)
    compiled: Any = torch.compile(first, backend="eager")
    Checkpoint(compiled).save(tmp_path)
    Checkpoint(second).load(tmp_path)
    assert_same(
        {name: value for name, value in second.state_dict().items() if "extra" not in name},
        {name: value for name, value in first.state_dict().items() if "extra" not in name},
    )
    assert second.get_submodule("0").seen == 5


def test_an_optimizer_of_the_callers_is_kept(tmp_path: Path) -> None:
    """Over the stages of an executor that has none, with states that are no tensors."""
    batches = random_batches(4)

    def trained(begin: int, end: int, load: bool) -> dict[str, Tensor]:
        schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
        stages = partition(layers(), schedule)
        optimizer = torch.optim.SGD(
            [p for module in stages.values() for p in module.parameters()], lr=0.1, momentum=0.9
        )
        with Executor(schedule, stages, MSE, in_process=True) as executor:
            checkpoint = Checkpoint(executor, optimizer)
            if load:
                checkpoint.load(tmp_path)
                assert all(state["note"] == (1, 0.5) for state in optimizer.state.values())
            for x, y in batches[begin:end]:
                executor.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()
                for state in optimizer.state.values():
                    state["note"] = (1, 0.5)
                if executor.steps == 2 and not load:
                    checkpoint.save(tmp_path)
            found = gathered_state(executor)
            assert found is not None
            return found

    expected = trained(0, 4, load=False)
    assert_same(trained(2, 4, load=True), expected)


@pytest.mark.parametrize("copies", [False, True])
def test_torchs_own_tools_read_it(
    copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch writes a copy of the metadata, and leaves ours, as torch 2.11 does."""
    finish = FileSystemWriter.finish

    def finish_copy(self: FileSystemWriter, metadata: Any, results: Any) -> None:
        finish(self, dataclasses.replace(metadata), results)

    if copies:
        monkeypatch.setattr(FileSystemWriter, "finish", finish_copy)
    model = partition(layers(), 1)[0]
    optimizer = adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    Checkpoint(model, optimizer).save(tmp_path / "folder")
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True)
    assert_same(found["model"], model.state_dict())
    weight = model.get_parameter("3.weight")
    moments = found["optimizer"]["state"]["3.weight"]
    assert torch.equal(moments["exp_avg"], optimizer.state[weight]["exp_avg"])


def test_gradients_are_neither_kept_nor_left_behind(tmp_path: Path) -> None:
    """Those of a step that failed, or that waits for its update, are of no weights any more."""
    fails = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and bool(target[0, 0] == 7):
            raise RuntimeError("no loss")
        return MSE(output, target)

    (x, y), *_ = random_batches(1)
    y[-2:] = 7  # its last microbatch, after the backwards of the first
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = partition(layers(), schedule)
    with Executor(schedule, stages, loss, momentum, in_process=True) as executor:
        checkpoint = Checkpoint(executor)
        checkpoint.save(tmp_path)
        executor.step(x, target=y)
        expected = gathered_state(executor)
        fails = True
        with pytest.raises(ExecutionError, match="no loss"):
            executor.step(x, target=y)
        fails = False
        checkpoint.load(tmp_path)
        executor.step(x, target=y)
        found = gathered_state(executor)
        assert found is not None
        assert expected is not None
        assert_same(found, expected)
        executor.step(x, target=y, update=False)
        with pytest.raises(ExecutionError, match="gradients of stage 0 wait for an update"):
            checkpoint.save(tmp_path)
        executor.step(x, target=y)
        checkpoint.save(tmp_path)


def test_what_can_not_be_kept_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ExecutionError, match="scheduler must have state_dict and load_state_dict"):
        Checkpoint(model, scheduler=3)  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match="a checkpoint saves an Executor or a model"):
        Checkpoint({"weight": 1})  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match="step must be an int of at least 0"):
        Checkpoint(model).step = -1
    with training_by("1f1b on 2", decaying) as training:
        with pytest.raises(ExecutionError, match="leave out optimizer="):
            Checkpoint(training.model, training.optimizer)
        with pytest.raises(ExecutionError, match="leave out loss_fn="):
            Checkpoint(training.model, loss_fn=MSE)


def test_groups_that_depend_on_the_cut_are_refused_for_a_scheduler(tmp_path: Path) -> None:
    def without_empty(parameters: Any) -> Optimizer:
        given = list(parameters)
        groups = [[p for p in given if p.ndim > 1], [p for p in given if p.ndim < 2]]
        return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)

    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = partition([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)], schedule)
    with Executor(schedule, stages, MSE, without_empty, in_process=True) as executor:
        scheduler = lr_scheduler.StepLR(executor.optimizers[0], 2)
        with pytest.raises(ExecutionError, match="have 1 and 2 param groups"):
            Checkpoint(executor, scheduler=scheduler).save(tmp_path)
        Checkpoint(executor).save(tmp_path)
        Checkpoint(executor).load(tmp_path)
