"""A checkpoint of one training is loaded by any other of the same model, and by a plain one."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.optim import Optimizer, lr_scheduler

import schedir
from schedir import ExecutionError, Schedule
from schedir.runtime import Executor
from schedir.training import Batches, Checkpoint, gathered_state, partition
from schedir.training.checkpoint.storage import _Unpickler, sealed, unsealed
from tests.runtime.kit import (
    MSE,
    Batch,
    ScaledLoss,
    adamw,
    message_of,
    microbatches_of,
    momentum,
    random_batches,
)
from tests.runtime.test_optimizer_view import SCHEDULERS, advance, decaying


def layers(width: int = 4, dropout: float = 0.0) -> list[nn.Module]:
    """With statistics, and one without parameters."""
    torch.manual_seed(5)
    first = [nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(dropout)]
    return [*first, nn.Linear(width, 4), nn.LayerNorm(4), nn.Linear(4, 4)]


def built(name: str, ranks: int = 2, **options: Any) -> Schedule:
    return schedir.build(name, ranks=ranks, microbatches=4, **options)


def executor_of(
    schedule: Schedule,
    make: Any = adamw,
    of: list[nn.Module] | None = None,
    loss_fn: Any = MSE,
    **options: Any,
) -> Executor:
    rank = options["mesh"].get_local_rank("pp") if "mesh" in options else None
    into = schedule.stages if options.get("in_process") else schedule
    stages = partition(of or layers(), into, by="uniform", rank=rank)
    return Executor(schedule, stages, loss_fn, make, ties=stages.ties, **options)


def whole() -> nn.Module:
    return partition(layers(), 1)[0]


def step_plainly(model: nn.Module, optimizer: Optimizer, batch: Batch, loss_fn: Any = MSE) -> None:
    plain_step([model], loss_fn, [optimizer], microbatches_of(batch, 4))


class Training:
    """One way to train the model: in this process by a schedule, or plainly."""

    def __init__(self, schedule: Schedule | None) -> None:
        self.loss_fn = ScaledLoss()
        self.model: Any = whole()
        given: dict[str, Any] = {}
        if schedule is None:
            self.optimizer = decaying([*self.model.parameters(), self.loss_fn.scale])
            given = {"optimizer": self.optimizer, "loss_fn": self.loss_fn}
        else:
            self.model = executor_of(schedule, decaying, None, self.loss_fn, in_process=True)
            self.optimizer = self.model.optimizer
        self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.checkpoint = Checkpoint(self.model, scheduler=self.scheduler, **given)

    def step(self, batch: Batch) -> None:
        if isinstance(self.model, Executor):
            self.model.step(batch[0], target=batch[1])
        else:
            step_plainly(self.model, self.optimizer, batch, self.loss_fn)
        self.scheduler.step()

    def state(self) -> dict[str, Tensor]:
        is_cut = isinstance(self.model, Executor)
        found: Any = gathered_state(self.model) if is_cut else self.model.state_dict()
        return dict(found)

    def close(self) -> None:
        if isinstance(self.model, Executor):
            self.model.close()


WAYS = {
    "plain": None,
    "1f1b on 2": built("1f1b"),
    "fill-drain on 4": built("fill-drain", 4),
    "interleaved on 2": built("interleaved-1f1b", chunks=3),
    "pipedream on 3": built("pipedream", 3),
}


def assert_same(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> None:
    """Bit for bit, or both on another rank."""
    assert (one or {}).keys() == (other or {}).keys()
    for name, value in (one or {}).items():
        assert other is not None
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("saver", WAYS)
def test_a_checkpoint_of_any_cut_goes_on_under_every_other(saver: str, tmp_path: Path) -> None:
    """And then trains on as the plain model does; pipedream does so otherwise."""
    batches = random_batches(5)
    with closing(Training(WAYS[saver])) as first:
        for batch in batches[:3]:
            first.step(batch)
        first.checkpoint.step = 3
        first.checkpoint.save(tmp_path)
        saved = first.state()
    reference: dict[str, Tensor] = {}
    for loader, schedule in WAYS.items():
        with closing(Training(schedule)) as second:
            second.checkpoint.load(tmp_path)
            assert_same(second.state(), saved)
            assert second.scheduler.last_epoch == second.checkpoint.step == 3
            assert schedule is None or second.model.steps == 3
            for batch in batches[3:]:
                second.step(batch)
            found = {**second.state(), "loss": second.loss_fn.scale}
            if loader == "plain":
                reference = found
            elif loader != "pipedream on 3":
                assert_same(found, reference)


def test_what_a_checkpoint_is_without(tmp_path: Path) -> None:
    """What is asked for must be there; what is there need not be asked for."""
    model = whole()
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
    other = whole()
    nn.init.zeros_(other.get_parameter("0.weight"))
    Checkpoint(other).load(tmp_path / "all")
    assert_same(other.state_dict(), model.state_dict())


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(2)})
    Checkpoint(model, loss_fn=ScaledLoss()).save(tmp_path)
    other = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(3, 2), "d": nn.Linear(1, 1)})
    before = copy.deepcopy(other.state_dict())
    assert message_of(Checkpoint(other).load, tmp_path) == (
        f"the checkpoint in {tmp_path} is of another model: it lacks d.weight, d.bias; it has "
        "c.weight, c.bias, c.running_mean, c.running_var, c.num_batches_tracked and 1 more, which "
        "the model has not; b.weight is [2, 2] there and [2, 3] here; its loss has parameters: "
        "pass loss_fn="
    )
    assert_same(other.state_dict(), before)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = whole()
    optimizer = decaying(model.parameters())
    Checkpoint(model, optimizer).save(tmp_path)
    for make, message in (
        (momentum, "saved with AdamW, but that of the model is SGD"),
        (adamw, r"param group 0 .* differ: weight_decay 0\.3 and 0\.0, lr 0\.05 and"),
    ):
        with pytest.raises(ExecutionError, match=message):
            Checkpoint(model, make(model.parameters())).load(tmp_path)
    partial = torch.optim.AdamW([model.get_parameter("0.weight")])
    Checkpoint(model, partial).save(tmp_path)
    with pytest.raises(ExecutionError, match=r"does not have 3\.weight, which is in param group 0"):
        Checkpoint(model, optimizer).load(tmp_path)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(7))])
    with pytest.raises(ExecutionError, match=r"of shape \[7\], that is in no state dict"):
        Checkpoint(model, stranger).save(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(whole())
    assert "there is no such folder" in message_of(checkpoint.load, tmp_path / "none")
    assert "it has no .metadata" in message_of(checkpoint.load, tmp_path)
    assert not Checkpoint.is_at(tmp_path)
    checkpoint.save(tmp_path)
    assert Checkpoint.is_at(tmp_path)
    (tmp_path / ".metadata").unlink()
    assert "as after a save that was interrupted" in message_of(checkpoint.load, tmp_path)


class Mischief:
    def __reduce__(self) -> Any:
        return print, ("mischief",)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("place", ["../elsewhere", "{folder}/elsewhere"])
def test_a_checkpoint_names_no_file_outside_of_its_folder(
    tmp_path: Path, place: str, listed: bool
) -> None:
    model = whole()
    folder = tmp_path / "checkpoint"
    Checkpoint(model).save(folder)
    pickled, manifest = unsealed((folder / ".metadata").read_bytes(), folder / ".metadata")
    metadata = pickle.loads(pickled)
    (file,) = {info.relative_path for info in metadata.storage_data.values()}
    (folder / file).rename(tmp_path / "elsewhere")
    named = place.format(folder=tmp_path)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=named)
    found = {named: manifest["files"][file]} if listed else {}
    (folder / ".metadata").write_bytes(sealed(pickle.dumps(metadata), {"files": found}))
    assert "names a file elsewhere" in message_of(Checkpoint(model).load_weights, folder)


def test_loading_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = whole()
    (tmp_path / ".metadata").write_bytes(sealed(pickle.dumps(Mischief()), {"files": {}}))
    with pytest.raises(ExecutionError, match=r"not the metadata of a checkpoint.*builtins\.print"):
        Checkpoint(model).load(tmp_path)
    for value in (Mischief(), Batches([])):
        with pytest.raises(ExecutionError, match="the state of keeper can't be kept"):
            Checkpoint(model, others={"keeper": Kept(a=value)}).save(tmp_path)
    assert not capsys.readouterr().out


class Kept:
    """What is saved beside a training: some values by name."""

    def __init__(self, **values: Any) -> None:
        self.state = values

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


KINDS = ("LambdaLR", "MultiStepLR", "CyclicLR", "SWALR", "ReduceLROnPlateau", "SequentialLR")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_schedulers_go_on(kind: str, lr: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def parts() -> tuple[Optimizer, Any]:
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rate(optimizer: Optimizer, scheduler: Any) -> float:
        optimizer.step()
        advance(scheduler, 1.0)
        return float(optimizer.param_groups[0]["lr"])

    optimizer, scheduler = parts()
    for _ in range(2):
        rate(optimizer, scheduler)
    Checkpoint(model, optimizer, scheduler=scheduler).save(tmp_path)
    resumed, again = parts()
    Checkpoint(model, resumed, scheduler=again).load(tmp_path)
    assert all(rate(resumed, again) == rate(optimizer, scheduler) for _ in range(5))
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
    theirs, mine = first.state_dict(), second.state_dict()
    assert theirs.pop("0._extra_state") == mine.pop("0._extra_state") == {"seen": 5}
    assert_same(mine, theirs)


def test_an_optimizer_of_the_callers_is_kept(tmp_path: Path) -> None:
    """Over the stages of an executor that has none, with states that are no tensors."""
    batches = random_batches(4)

    def trained(begin: int, end: int, load: bool) -> dict[str, Tensor] | None:
        with executor_of(built("1f1b"), None, in_process=True) as executor:
            held = [p for module in executor.stages.values() for p in module.parameters()]
            optimizer = momentum(held)
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
            return gathered_state(executor)

    expected = trained(0, 4, load=False)
    assert_same(trained(2, 4, load=True), expected)


def test_gradients_are_neither_kept_nor_left_behind(tmp_path: Path) -> None:
    """Those of a step that failed, or that waits for its update, are of no weights any more."""
    fails = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and bool(target[0, 0] == 7):
            raise RuntimeError("no loss")
        return MSE(output, target)

    (x, y), *_ = random_batches(1)
    y[-2:] = 7  # its last microbatch, after the backwards of the first
    with executor_of(built("1f1b"), momentum, None, loss, in_process=True) as executor:
        checkpoint = Checkpoint(executor)
        checkpoint.save(tmp_path)
        executor.step(x, target=y)
        expected = gathered_state(executor)
        fails = True
        assert "no loss" in message_of(executor.step, x, target=y)
        fails = False
        checkpoint.load(tmp_path)
        executor.step(x, target=y)
        assert_same(gathered_state(executor), expected)
        executor.step(x, target=y, update=False)
        assert "gradients of stage 0 wait for an update" in message_of(checkpoint.save, tmp_path)
        executor.step(x, target=y)
        checkpoint.save(tmp_path)


def test_what_can_not_be_kept_is_refused() -> None:
    model = nn.Linear(2, 2)
    said = message_of(Checkpoint, model, scheduler=3)
    assert "scheduler must have state_dict and load_state_dict" in said
    assert "a checkpoint saves an Executor or a model" in message_of(Checkpoint, {"weight": 1})
    with pytest.raises(ExecutionError, match="step must be an int of at least 0"):
        Checkpoint(model).step = -1
    with executor_of(built("1f1b"), in_process=True) as executor:
        assert "leave out optimizer=" in message_of(Checkpoint, executor, executor.optimizer)
        assert "leave out loss_fn=" in message_of(Checkpoint, executor, loss_fn=MSE)


def test_groups_that_depend_on_the_cut_are_refused_for_a_scheduler(tmp_path: Path) -> None:
    def without_empty(parameters: Any) -> Optimizer:
        given = list(parameters)
        groups = [[p for p in given if p.ndim > 1], [p for p in given if p.ndim < 2]]
        return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)

    of: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    with executor_of(built("1f1b"), without_empty, of, in_process=True) as executor:
        scheduler = lr_scheduler.StepLR(executor.optimizers[0], 2)
        with pytest.raises(ExecutionError, match="have 1 and 2 param groups"):
            Checkpoint(executor, scheduler=scheduler).save(tmp_path)
        Checkpoint(executor).save(tmp_path)
        Checkpoint(executor).load(tmp_path)


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickles the members of enumerations."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_members_are_read_as_any_python_has_written_them_and_no_other_attributes() -> None:
    def read(of: object, name: str) -> object:
        return _Unpickler(io.BytesIO(pickle.dumps(Attribute(of, name)))).load()

    for member in _MEM_FORMAT_ENCODING:
        assert read(_MEM_FORMAT_ENCODING, member.name) is member
    for of, name in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")):
        with pytest.raises((AttributeError, KeyError)):
            read(of, name)
