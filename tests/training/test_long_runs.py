"""A Trainer that counts steps: endless data, evaluations, checkpoints and logs every so many."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers.optimization import GreedyLR

from schedir.training import (
    Batches,
    Callback,
    Checkpoint,
    History,
    Monitor,
    accuracy,
    evaluate,
    gathered_state,
    warmup_cosine,
)
from tests.runtime.kit import everyone, message_of
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep
from tests.training.test_checkpoint import Kept, assert_same
from tests.training.test_resuming import folders, interrupted_at
from tests.training.test_trainer import (
    HELD_OUT,
    TRAINED,
    Calls,
    Ends,
    Plain,
    an_executor,
    labelled,
    noisy_executor,
    trainer_of,
)

DATA = TensorDataset(*(torch.cat(parts) for parts in zip(*labelled(8, 8, 8), strict=True)))


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without an end, each of which is read once: it says how many."""

    def __init__(self, ends: int | None = None) -> None:
        self.at = self.read = 0
        self.ends = ends

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at != self.ends:
            self.at, self.read = self.at + 1, self.read + 1
            ((x, y),) = labelled(1, seed=self.at)
            yield x[0], y[0]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=8, shuffle=True)  # three batches


SOURCES: dict[str, Callable[[], Batches]] = {
    "sized": lambda: Batches(shuffled()),
    "unsized": lambda: Batches(Unsized(shuffled())),
    "endless": lambda: Batches(shuffled(), repeat=True),
    "stream": lambda: Batches(DataLoader(Stream(), 8)),
    "stream that ends": lambda: Batches(DataLoader(Stream(24), 8)),
}


Log: TypeAlias = tuple[int, float, float]
MakeScheduler: TypeAlias = Callable[[Optimizer], Any]


def keeps(logged: list[Log]) -> Callback:
    """Adds what is logged, without what depends on the time."""
    return Calls(after_log=lambda step, f: logged.append((step, f["loss"], f["lr"])))


@frozen
class Fitted:
    history: History
    weights: dict[str, Tensor] | None
    logged: list[Log]


def cosine(optimizer: Optimizer) -> Any:
    return warmup_cosine(optimizer, warmup=2, steps=13)


def fitted(
    source: str | Batches,
    folder: Path | None = None,
    ends: int | None = None,
    make: MakeScheduler = cosine,
    *,
    rank: int | None = None,
    **options: Any,
) -> Fitted:
    """A training of 13 steps, which may be interrupted before."""
    logged: list[Log] = []
    with noisy_executor(rank, segment=options.get("segment")) as executor:
        given: dict[str, Any] = {
            "max_steps": 13,
            "scheduler": make(executor.optimizer),
            "evaluation": SOURCES["sized"](),
            "metrics": {"accuracy": accuracy},
            "checkpoint": folder,
            "callbacks": [keeps(logged), *([] if ends is None else [Ends(executor, ends)])],
            **options,
        }
        batches = SOURCES[source]() if isinstance(source, str) else source
        trainer = trainer_of(executor, batches, **given)
        with nullcontext() if ends is None else pytest.raises(KeyboardInterrupt):
            trainer.fit()
        return Fitted(trainer.history, gathered_state(executor), logged)


EVERY: dict[str, Any] = {"eval_every": 4, "save_every": 3, "log_every": 2}


@sweep("ends", [4, 7, 10, 12], quick=[7, 12])
@pytest.mark.parametrize("name", SOURCES)
def test_it_goes_on_from_any_step_bit_for_bit(name: str, ends: int, tmp_path: Path) -> None:
    """In the midst of an epoch and at its end, where that is known before and where it is not."""
    whole = fitted(name, **EVERY)
    assert [record.step for record in whole.history] == [4, 8, 12, 13]
    # At step 12 the others do not know yet that there is no more.
    assert whole.history[2].epoch == (4 if name == "sized" else None)
    assert [step for step, _, _ in whole.logged] == [2, 4, 6, 8, 10, 12]
    fitted(name, tmp_path, ends=ends, **EVERY)
    saved = (ends - 1) // 3 * 3  # it is interrupted before it saves
    assert folders(tmp_path)[-1] == f"step-{saved}"
    resumed = fitted(name, tmp_path, **EVERY)
    assert resumed.history == whole.history
    assert_same(resumed.weights, whole.weights)
    assert resumed.logged == [one for one in whole.logged if one[0] > saved]
    assert folders(tmp_path) == ["step-12", "step-13"]


@on_ranks(2)
@sweep("name", ["sized", "endless", "stream"], quick=["stream"])
def test_it_goes_on_from_any_step_on_ranks(name: str, rank: int, folder: Path) -> None:
    whole = fitted(name, rank=rank, **EVERY)
    assert everyone(whole.history) == [whole.history] * 2
    fitted(name, folder, ends=8, rank=rank, **EVERY)
    resumed = fitted(name, folder, rank=rank, **EVERY)
    assert resumed.history == whole.history
    assert_same(resumed.weights, whole.weights)


def test_a_stream_with_a_state_is_not_read_again(tmp_path: Path) -> None:
    """Neither what was handed out before, nor ahead of what is handed out."""
    for ends, steps in ((7, 7), (None, 13 - 6)):
        stream = Stream()
        fitted(Batches(DataLoader(stream, 8)), tmp_path, ends, **EVERY)
        assert stream.read == 8 * steps


def mean(losses: list[tuple[float, int]]) -> float:
    """Of losses and how many rows each is of."""
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


def test_the_loss_of_an_entry_or_a_log_is_the_mean_since_the_one_before() -> None:
    plain, losses = Plain(steps=12), []
    logged: list[Log] = []
    for batch in TRAINED * 4:
        losses.append((plain.step(batch), len(batch[1])))
    with an_executor(None) as executor:
        rates = warmup_cosine(executor.optimizer, warmup=2, steps=12)
        options = {"scheduler": rates, "evaluation": HELD_OUT, "callbacks": [keeps(logged)]}
        every = {"max_steps": 12, "eval_every": 5, "log_every": 4}
        history = trainer_of(executor, Batches(TRAINED, repeat=True), **every, **options).fit()
    assert history[-1].evaluation_loss == plain.evaluation()[0]
    parts = [(5, losses[:5]), (10, losses[5:10]), (12, losses[10:])]
    assert [(record.step, record.loss) for record in history] == [(n, mean(p)) for n, p in parts]
    logs = [(4, losses[:4]), (8, losses[4:8]), (12, losses[8:])]
    assert [log[:2] for log in logged] == [(n, mean(part)) for n, part in logs]


@pytest.mark.parametrize(
    ("limits", "records"),
    [
        ({"epochs": 2, "max_steps": 99}, [(1, 3), (2, 6)]),
        ({"epochs": 9, "max_steps": 4}, [(1, 3), (None, 4)]),
        ({"max_steps": 6}, [(1, 3), (2, 6)]),
        ({"epochs": 2, "eval_every": 2}, [(None, 2), (None, 4), (2, 6)]),
        ({"epochs": 2, "eval_every": 4}, [(None, 4), (2, 6)]),
    ],
)
def test_what_comes_first_ends_it(
    limits: dict[str, int], records: list[tuple[int | None, int]], tmp_path: Path
) -> None:
    seen: list[History] = []

    def run(**limits: Any) -> tuple[list[tuple[int | None, int]], dict[str, Tensor] | None]:
        with noisy_executor(None) as executor:
            callbacks = [Calls(after_epoch=seen.append)]
            given = {"checkpoint": tmp_path, "callbacks": callbacks, **limits}
            trainer = trainer_of(executor, Batches(shuffled()), **given)
            found = [(record.epoch, record.step) for record in trainer.fit()]
            assert executor.steps == found[-1][1]
            assert trainer.fit() == trainer.history  # and no further
            return found, gathered_state(executor)

    found, _ = run(**limits)
    assert found == records
    assert len(seen) == found[-1][1] // 3
    _, longer = run(max_steps=8)
    _, whole = run(max_steps=8, checkpoint=None)
    assert_same(longer, whole)


def test_the_newest_of_both_kinds_of_checkpoints_is_gone_on_from(tmp_path: Path) -> None:
    began: list[int] = []
    callbacks = [Calls(before_training=began.append)]

    def run(**options: Any) -> History:
        with an_executor(None) as executor:
            given = {"checkpoint": tmp_path, "callbacks": callbacks, **options}
            return trainer_of(executor, **given).fit()

    run(max_steps=10)
    assert folders(tmp_path) == ["epoch-3", "step-10"]
    assert [r.step for r in run(epochs=5, keep=3)] == [3, 6, 9, 10, 12, 15]
    assert folders(tmp_path) == ["epoch-4", "epoch-5", "step-10"]
    run(max_steps=16, save_every=9)
    assert began == [0, 10, 15]
    assert folders(tmp_path) == ["epoch-5", "step-16"]
    assert run(epochs=2)[-1].step == 16  # it is further on already
    run(epochs=99, max_steps=20, save_every=1, keep=3)
    assert folders(tmp_path) == ["step-18", "step-19", "step-20"]


def test_endless_batches_are_saved_with_each_entry(tmp_path: Path) -> None:
    fitted("endless", tmp_path, eval_every=5, keep=9)
    assert folders(tmp_path) == ["step-10", "step-13", "step-5"]


def step_and_weights(folder: Path) -> tuple[int, dict[str, Tensor] | None]:
    with noisy_executor(None) as executor:
        Checkpoint(executor).load(folder)
        return executor.steps, gathered_state(executor)


@pytest.mark.parametrize(("best", "mode"), [("loss", "min"), ("loss", "max"), ("accuracy", "max")])
def test_the_best_is_kept_whatever_its_age(best: str, mode: Any, tmp_path: Path) -> None:
    options = {"eval_every": 1, "save_every": 1, "keep": 1, "best": best, "best_mode": mode}
    fitted("endless", tmp_path, ends=9, **options)
    history = fitted("endless", tmp_path, **options).history
    assert folders(tmp_path) == ["best", "step-13"]
    measured = [record.metrics.get(best, record.evaluation_loss) for record in history]
    top = (min if mode == "min" else max)(measured)  # type: ignore[type-var]
    assert history.best is history[measured.index(top)]
    assert history.stale == 12 - measured.index(top)
    step, weights = step_and_weights(tmp_path / "best")
    assert step == history.best.step
    with noisy_executor(None) as executor:
        Checkpoint(executor).load_weights(tmp_path / "best")
        assert_same(gathered_state(executor), weights)
        found = evaluate(executor, Batches(DataLoader(DATA, batch_size=8)), {"accuracy": accuracy})
    assert found.metrics["accuracy"] == history.best.metrics["accuracy"]
    assert found.loss == pytest.approx(history.best.evaluation_loss)


def test_the_best_is_whole_whenever_a_save_is_interrupted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_every": 1, "best": "loss", "best_mode": "max"}
    fitted("endless", tmp_path, max_steps=2, **options)
    before = step_and_weights(tmp_path / "best")
    options |= {"best_mode": "min"}  # the next one is better, surely
    for place in ("replace", "rename"):
        with interrupted_at(Path, place):
            fitted("endless", tmp_path, **options)
        step, weights = step_and_weights(tmp_path / "best")
        if place == "replace":
            assert step == before[0]
            assert_same(weights, before[1])


def test_patience_goes_by_the_measure() -> None:
    values = iter(value for value in (3.0, 1.0, 2.0, 9.0) for microbatch in range(4))

    def given(output: Any, target: Any) -> tuple[float, float]:
        return next(values), 1.0

    options: dict[str, Any] = {"evaluation": HELD_OUT[:1], "metrics": {"given": given}}
    options |= {"best": "given", "best_mode": "max", "patience": 2}
    with an_executor(None) as executor:
        batches = Batches(TRAINED, repeat=True)
        history = trainer_of(executor, batches, max_steps=99, eval_every=2, **options).fit()
    assert [record.metrics["given"] for record in history] == [3, 1, 2]
    assert history.best is history[0]


def test_a_checkpoint_of_the_same_step_stays_one_while_it_is_replaced(tmp_path: Path) -> None:
    """One with the entry at the end, which was not known to be one when it was saved."""
    options: dict[str, Any] = {"epochs": 2, "max_steps": None, "save_every": 3, "keep": 1}
    with mock.patch.object(shutil, "rmtree", wraps=shutil.rmtree) as remove:
        whole = fitted("unsized", tmp_path, **options)
    assert [call.args[0].name for call in remove.call_args_list] == ["step-3"]
    assert folders(tmp_path) == ["step-6"]
    again = fitted("unsized", tmp_path, **options)
    assert again.history == whole.history
    assert [record.step for record in whole.history] == [3, 6]


class Follows(Kept):
    """A scheduler of one's own that halves the rate where a metric is no better than the last."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(last=0.0)
        self.optimizer = optimizer

    def step(self, metric: float) -> None:
        if metric <= self.state["last"]:
            for group in self.optimizer.param_groups:
                group["lr"] /= 2
        self.state["last"] = metric


def plateau(optimizer: Optimizer, mode: Any = "max", threshold: float = 0.1) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, mode, patience=0, threshold=threshold)


def steps(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


BY_METRIC: dict[str, MakeScheduler] = {
    "plateau": plateau,
    "greedy": lambda o: GreedyLR(o, "max", patience=0, factor=0.7, min_lr=1e-6),
    "one's own": Follows,
}
BY_ACCURACY = {"best": "accuracy", "best_mode": "max"}
EACH_EPOCH = {"scheduler_by": "epoch", "epochs": 8, "max_steps": None}
EACH_EVALUATION = {"scheduler_by": "evaluation", "eval_every": 2, "save_every": 3, "max_steps": 20}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (steps, EACH_EPOCH),
        (lambda o: plateau(o, "min", 0.03), EACH_EPOCH),
        (steps, EACH_EVALUATION),
        *((make, EACH_EVALUATION | BY_ACCURACY) for make in BY_METRIC.values()),
    ],
    ids=["by epochs", "plateau by epochs", "by evaluations", *BY_METRIC],
)
def test_a_scheduler_is_stepped_by_what_it_is_said(
    make: MakeScheduler, options: Any, tmp_path: Path
) -> None:
    """As it is alone, by the measure if it takes one, and where it goes on."""
    whole = fitted("sized", tmp_path / "whole", make=make, **options).history
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.05)
    alone = make(optimizer)
    for record in whole:
        assert record.lr == optimizer.param_groups[0]["lr"]
        optimizer.step()
        measure = record.metrics[options["best"]] if "best" in options else record.evaluation_loss
        alone.step(*([] if make is steps else [measure]))
    assert len({record.lr for record in whole}) > 2
    for ends in (11, None):
        part = fitted("sized", tmp_path / "part", ends, make, **options).history
    assert part == whole


def takes_two(optimizer: Optimizer) -> Any:
    class Takes(Follows):
        def step(self, metric: float, epoch: int) -> None:  # type: ignore[override]
            raise AssertionError

    return Takes(optimizer)


EVALUATED, ENDLESS = {"evaluation": HELD_OUT}, Batches(HELD_OUT, repeat=True)
EVERY_TWO = {"max_steps": 4, "eval_every": 2}


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        *(
            (make, options, "needs the evaluation loss or a metric: pass evaluation= and")
            for make in BY_METRIC.values()
            for options in (
                {},
                EVALUATED,
                {"scheduler_by": "epoch"},
                {"scheduler_by": "evaluation"},
                {"scheduler_by": "epoch", "eval_every": 2, **EVALUATED},
            )
        ),
        (lambda _: lr_scheduler.StepLR, EVALUATED, "not <class '.*StepLR'>"),
        (takes_two, EVALUATED, r"Takes.step\(metric: .*\) .* takes more than a metric"),
    ],
)
def test_a_scheduler_that_can_not_be_stepped_is_refused(
    make: MakeScheduler, options: Any, text: str
) -> None:
    with an_executor(None) as executor:
        scheduler = make(executor.optimizer)
        said = message_of(trainer_of, executor, epochs=1, scheduler=scheduler, **options)
    assert re.search(text, said)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_steps": 0}, "max_steps must be an int of at least 1, not 0"),
        ({"max_steps": 4, "eval_every": 2.5}, "eval_every must be an int of at least 1, not 2.5"),
        ({"max_steps": 4, "best": "loss"}, "best needs an evaluation set"),
        ({**EVERY_TWO, "best": "f1", **EVALUATED}, 'must be "loss" or the name of a metric'),
        ({"max_steps": 4, "best_mode": "most"}, 'best_mode must be "min" or "max", not \'most\''),
        ({"epochs": 2}, "batches never ends, so no epoch ends"),
        ({"epochs": 2, "max_steps": 4}, "batches never ends, so no epoch ends"),
        ({"max_steps": 4, **EVALUATED}, "max_steps, eval_every, and scheduler_by"),
        ({"max_steps": 4, "scheduler_by": "epoch"}, "batches never ends"),
        ({**EVERY_TWO, "evaluation": ENDLESS}, "evaluation never ends, so no epoch ends: leave o"),
    ],
)
def test_what_does_not_go_with_endless_batches_is_refused(options: Any, text: str) -> None:
    with an_executor(None) as executor:
        assert text in message_of(trainer_of, executor, SOURCES["endless"](), **options)
        assert executor.steps == 0


@pytest.mark.parametrize("every", [{"eval_every": 1}, {"eval_every": 4, "save_every": 5}])
def test_what_is_due_within_a_segment_waits_and_changes_nothing(every: Any, tmp_path: Path) -> None:
    """Segments of two batches, in epochs of three: they end at steps 2, 3, 5, 6 and so on."""
    quiet = fitted("sized", segment=8, eval_every=99)
    whole = fitted("sized", tmp_path / "whole", segment=8, keep=9, log_every=1, **every)
    assert_same(whole.weights, quiet.weights)
    ends_of_segments = [2, 3, 5, 6, 8, 9, 11, 12, 13]
    assert [step for step, _, _ in whole.logged] == ends_of_segments
    if "save_every" in every:
        assert [record.step for record in whole.history] == [5, 8, 12, 13]
        assert folders(tmp_path / "whole") == ["step-11", "step-13", "step-5"]
    else:
        assert [record.step for record in whole.history] == ends_of_segments
    for ends in (5, None):  # calls: of the executor, a segment is a step
        part = fitted("sized", tmp_path / "part", ends, segment=8, **every)
    assert part.history == whole.history
    assert_same(part.weights, whole.weights)


@pytest.mark.parametrize("segment", [4, 64])
def test_segments_of_a_batch_or_of_all_go_on_bit_for_bit(segment: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"segment": segment, "max_steps": None}
    expected = fitted("sized", epochs=2, **options)
    for epochs in (1, 2):
        found = fitted("sized", tmp_path, epochs=epochs, **options)
    assert found.history == expected.history
    assert_same(found.weights, expected.weights)


@on_ranks(2)
def test_what_is_due_within_a_segment_waits_on_ranks(rank: int, folder: Path) -> None:
    every: dict[str, Any] = {"eval_every": 3, "save_every": 5, "log_every": 2}
    quiet = fitted("endless", rank=rank, segment=8, eval_every=99)
    whole = fitted("endless", rank=rank, segment=8, **every)
    for ends in (5, None):
        found = fitted("endless", folder, ends, rank=rank, segment=8, **every)
    assert_same(found.weights, quiet.weights)
    assert found.history == whole.history
    assert [record.step for record in found.history] == [4, 6, 10, 12, 13]


def test_callbacks_are_called_in_their_order() -> None:
    seen: list[str] = []

    def figures() -> dict[str, float]:
        executor.gather(None)  # the pipeline is drained
        return {"found": 4.5}

    watches = Calls(
        before_training=lambda step: seen.append(f"before {step}"),
        after_step=lambda result: seen.append(f"step of {result.samples:.0f}"),
        figures=figures,
        after_log=lambda step, figures: seen.append(f"log {step} {figures['found']}"),
        after_record=lambda history: seen.append(f"record {history[-1].step}"),
        after_epoch=lambda history: seen.append("epoch"),
        after_training=lambda history: seen.append(f"after {len(history)}"),
    )
    callbacks = [watches, lambda history: seen.append(f"function {len(history)}")]
    with an_executor(None) as executor:
        every = {"max_steps": 4, "eval_every": 2, "log_every": 2}
        trainer_of(executor, TRAINED, callbacks=callbacks, **every).fit()
    assert seen == [
        *("before 0", "step of 8", "step of 8", "log 2 4.5", "record 2", "function 1"),
        *("step of 6", "epoch", "step of 8", "log 4 4.5", "record 4", "function 2", "after 2"),
    ]


def test_what_a_callback_raises_ends_the_training_once_it_is_saved(tmp_path: Path) -> None:
    def fails(step: int, figures: Mapping[str, float]) -> None:
        if step == 4:
            raise KeyboardInterrupt

    ended: list[History] = []
    callbacks = [Calls(after_log=fails, after_training=ended.append)]
    with pytest.raises(KeyboardInterrupt):
        fitted("endless", tmp_path, callbacks=callbacks, **EVERY)
    assert ended
    assert folders(tmp_path) == ["step-3", "step-4"]
    resumed = fitted("endless", tmp_path, **EVERY)
    assert resumed.history == fitted("endless", **EVERY).history


def test_logs_are_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"log_every": 2, "max_steps": 5, "unit": "tokens"}
    with an_executor(None) as executor:
        options["callbacks"] = [Monitor(executor)]
        for progress in (True, False):
            trainer_of(executor, TRAINED, progress=progress, **options).fit()
    number = r"[\d.,e+-]+"
    lines = capsys.readouterr().out.splitlines()
    figures = f"  loss {number}  lr 0.05  tokens_per_second {number}  peak_memory_gib {number}"
    patterns = [f"step 2{figures}", "epoch 1  .*", f"step 4{figures}", "step 5  .*"]
    assert re.fullmatch("\n".join(patterns), "\n".join(lines))


@on_ranks(2)
def test_the_first_rank_logs_and_knows_the_bubble_of_all(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Mapping[str, float]] = []
    times: list[tuple[float, float]] = []
    notes = Calls(
        after_log=lambda step, figures: told.append(dict(figures)),
        after_step=lambda result: times.append((result.busy, result.elapsed)),
    )
    with an_executor(rank) as executor:
        options = {"callbacks": [notes, Monitor(executor)], "progress": True}
        trainer_of(executor, TRAINED, max_steps=3, log_every=3, **options).fit()
    (figures,) = told
    (first, second) = everyone((figures, times[-1]))
    assert {**first[0], "samples_per_second": 0} == {**second[0], "samples_per_second": 0}
    (busy, elapsed), (other, others) = first[1], second[1]
    assert figures["bubble"] == 1 - (busy + other) / (elapsed + others)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in lines] == ([] if rank else ["step 3 ", "epoch 1"])


def test_a_line_says_where_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (3, 4):
        options: dict[str, Any] = {"max_steps": steps, "eval_every": 9, "progress": steps == 4}
        fitted("endless", tmp_path, **options)
    assert capsys.readouterr().out.startswith("resumes after step 3\nstep 4  loss ")


def test_float16_goes_on_with_its_scale(tmp_path: Path) -> None:
    """Of a scaler that grows every second step, in a training that was cut in two."""

    def fit(steps: int, folder: Path | None) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with an_executor(None, scaler=scaler) as executor:
            options = {"autocast": torch.float16, "scaler": scaler, "checkpoint": folder}
            trainer_of(executor, Batches(shuffled()), max_steps=steps, **options).fit()
            return gathered_state(executor), scaler.state_dict()

    fit(5, tmp_path)
    resumed, scale = fit(9, tmp_path)
    through, expected = fit(9, None)
    assert scale == expected
    assert scale["scale"] == 2.0**14
    assert_same(resumed, through)


@pytest.mark.parametrize("fails", ["before_training", "after_training"])
def test_each_callback_that_has_begun_ends_whichever_fails(fails: str) -> None:
    seen: list[str] = []

    def said(name: str, what: str) -> Any:
        def call(_: object) -> None:
            seen.append(f"{what} {name}")
            if (name, what) == ("second", fails):
                raise ValueError("no more of this")

        return call

    callbacks = [
        Calls(**{what: said(name, what) for what in ("before_training", "after_training")})
        for name in ("first", "second", "third")
    ]
    with an_executor(None) as executor, pytest.raises(ValueError, match="no more of this"):
        trainer_of(executor, TRAINED, max_steps=1, callbacks=callbacks).fit()
    ended = [line.split()[1] for line in seen if line.startswith("after")]
    assert ended == (["first"] if fails == "before_training" else ["third", "second", "first"])
