"""A Trainer does what the loop does that everybody writes, in one process, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from reference import plain_step
from torch import Tensor, nn

import schedir
from schedir import ExecutionError
from schedir.runtime import Executor, StepResult
from schedir.training import (
    Batches,
    Callback,
    Trainer,
    accuracy,
    evaluate,
    gathered_state,
    partition,
    perplexity,
    warmup_cosine,
)
from tests.runtime.kit import adamw, assert_equal_stages, everyone, message_of, microbatches_of
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import pipelines
from tests.training.test_checkpoint import assert_same

LOSS = nn.functional.cross_entropy
CLASSES = 3
Labelled: TypeAlias = tuple[Tensor, Tensor]


def classifier() -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, CLASSES)]


def labelled(*rows: int, seed: int = 0) -> list[Labelled]:
    """A batch of each number of rows."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 4, generator=draw), torch.randint(3, (n,), generator=draw)) for n in rows
    ]


TRAINED = labelled(8, 8, 6)
HELD_OUT = labelled(8, 8, 3, seed=1)  # the last: fewer than microbatches
EVALUATED: dict[str, Any] = {"evaluation": HELD_OUT, "metrics": {"accuracy": accuracy}}


def an_executor(rank: int | None, **options: Any) -> Executor:
    """Of two ranks; None: both in this process."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    here = range(2) if rank is None else [rank]
    whole = classifier()
    given = {"optimizer": adamw, "in_process": rank is None, **options}
    return Executor(schedule, {i: whole[i] for i in here}, LOSS, **given)


def noisy_executor(rank: int | None, chunks: int = 1, segment: int | None = None) -> Executor:
    """Of layers with dropout, cut in two or four."""
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    name = name if segment is None else "pipedream"
    schedule = schedir.build(name, ranks=2, microbatches=4, chunks=chunks)
    torch.manual_seed(7)
    layers = [nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, CLASSES)]
    stages = partition(layers, schedule, by="uniform")
    return Executor(schedule, stages, LOSS, adamw, in_process=rank is None)


def trainer_of(executor: Executor, batches: Any = None, **options: Any) -> Trainer:
    given = Batches(TRAINED) if batches is None else batches
    return Trainer(executor, given, **{"progress": False, **options})


class Plain:
    """The same training by hand, in one process, on the whole model."""

    def __init__(self, steps: int, autocast: bool = False) -> None:
        self.stages = classifier()
        self.optimizers = [adamw(stage.parameters()) for stage in self.stages]
        self.schedulers = [warmup_cosine(o, warmup=2, steps=steps) for o in self.optimizers]
        self.autocast = autocast

    def epoch(self) -> tuple[float, float]:
        total = 0.0
        for batch in TRAINED:
            lr = self.optimizers[0].param_groups[0]["lr"]
            total += self.step(batch) * len(batch[1])
        return total / sum(len(y) for _, y in TRAINED), lr

    def step(self, batch: Labelled) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = plain_step(self.stages, LOSS, self.optimizers, microbatches_of(batch, 4))
        for scheduler in self.schedulers:
            scheduler.step()
        return loss

    @torch.no_grad()
    def evaluation(self) -> tuple[float, float]:
        """The loss as the samples weigh it, and how many in all are right."""
        model = nn.Sequential(*self.stages)
        total, right, number = 0.0, 0, 0
        for x, y in HELD_OUT:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                pieces = [(model(a), b) for a, b in microbatches_of((x, y), min(4, len(y)))]
            sums = [len(b) * float(LOSS(o.float(), b)) for o, b in pieces]
            total += sum(sums) / len(y) * len(y)
            right += sum(int((o.argmax(-1) == b).sum()) for o, b in pieces)
            number += len(y)
        return total / number, right / number


@pytest.mark.parametrize(("rank", "autocast"), [(None, None), (None, torch.bfloat16)])
def test_it_trains_as_the_loop_by_hand(rank: int | None, autocast: torch.dtype | None) -> None:
    plain = Plain(steps=9, autocast=autocast is not None)
    with an_executor(rank) as executor:
        scheduler = warmup_cosine(executor.optimizer, warmup=2, steps=9)
        options = {"scheduler": scheduler, "autocast": autocast, **EVALUATED}
        history = trainer_of(executor, TRAINED, epochs=3, **options).fit()
        stages = executor.stages
        if rank is not None:
            assert everyone(history) == [history] * 2
    assert len(history) == 3
    for epoch in history:
        assert (epoch.loss, epoch.lr) == plain.epoch()
        assert (epoch.evaluation_loss, epoch.metrics["accuracy"]) == plain.evaluation()
    assert_equal_stages(stages, plain.stages)


@on_ranks(2)
def test_it_trains_as_the_loop_by_hand_on_ranks(rank: int) -> None:
    test_it_trains_as_the_loop_by_hand(rank, None)


@on_ranks(4)
def test_metrics_are_those_of_all_pipelines(rank: int) -> None:
    mesh = pipelines()
    line, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    shares = [labelled(8, 8), labelled(4, 3, seed=1)]
    with Executor(schedule, {place: classifier()[place]}, LOSS, adamw, mesh=mesh) as executor:
        found = evaluate(executor, shares[line], {"accuracy": accuracy})
        assert everyone(found) == [found] * 4
    model = nn.Sequential(*classifier())
    x, y = (torch.cat(parts) for parts in zip(*shares[0], *shares[1], strict=True))
    assert found.metrics == {"accuracy": int((model(x).argmax(-1) == y).sum()) / 23}
    assert found.loss == pytest.approx(LOSS(model(x), y).item(), rel=1e-6)


@on_ranks(2)
def test_ranks_that_evaluate_different_numbers_of_batches_are_refused(rank: int) -> None:
    with an_executor(rank) as executor:
        data = labelled(*[8] * (2 + rank))
        said = message_of(evaluate, executor, data, {"accuracy": accuracy})
    assert "call 2 of rank 1 is evaluate" in said
    assert "but call 2 of rank 0 is gather; every rank must make the same calls" in said


class Getting(nn.Module):
    """A loss that is better in each training step, and in each evaluation the next of some."""

    def __init__(self, *evaluated: float) -> None:
        super().__init__()
        self.evaluated = iter(evaluated)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.training:
            return output.sum()
        return 0.0 * output.sum() + next(self.evaluated)


@on_ranks(2)
@pytest.mark.parametrize(
    ("evaluated", "epochs", "best"),
    [((5.0, 4.0, 4.0, 4.5, 1.0), 4, 2), ((3.0, 5.0, 2.0, 6.0, 7.0), 5, 3), ((math.nan,) * 3, 2, 0)],
)
def test_it_stops_once_patience_ends_on_every_rank_alike(
    rank: int, evaluated: tuple[float, ...], epochs: int, best: int
) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=1)
    loss = Getting(*evaluated)  # the last rank's alone is called
    with Executor(schedule, {rank: classifier()[rank]}, loss, adamw) as executor:
        data = labelled(4)
        trainer = trainer_of(executor, data, epochs=9, evaluation=data, patience=2)
        history = trainer.fit()
        assert trainer.fit() == history  # and goes no further
    assert len(history) == epochs
    assert (history.best.epoch if history.best else 0) == best


class Calls(Callback):
    """Calls functions in place of methods: `Calls(after_log=print)`."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        vars(self).update(methods)


class Ends(Callback):
    """What ends a training after so many steps."""

    def __init__(self, executor: Executor, steps: int, error: Any = KeyboardInterrupt) -> None:
        self.executor, self.steps, self.error = executor, steps, error

    def after_step(self, result: StepResult) -> None:
        if self.executor.steps == self.steps:
            raise self.error


def test_what_a_callback_raises_ends_the_training_which_may_go_on() -> None:
    with an_executor(None) as executor:
        trainer = trainer_of(executor, TRAINED, epochs=3, callbacks=[Ends(executor, 5)])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        assert len(trainer.history) == 1
        assert len(trainer.fit()) == 3
        assert executor.steps == 5 + 2 * 3


@on_ranks(2)
def test_a_training_that_diverges_keeps_the_good_checkpoint(rank: int, folder: Path) -> None:
    """What is not finite in the last step of the second epoch, which the last stage can't know."""
    with an_executor(rank) as executor:
        (first,) = trainer_of(executor, epochs=1, checkpoint=folder).fit()
        good = {s: copy.deepcopy(module) for s, module in executor.stages.items()}
    diverging, last = an_executor(rank, timeout=60.0), 2 * len(TRAINED) - 1
    if rank == 0:
        bias = diverging.stages[0].get_parameter("0.bias")
        bias.register_hook(lambda grad: grad * (math.nan if diverging.steps >= last else 1.0))
    said = message_of(trainer_of(diverging, epochs=3, checkpoint=folder).fit)
    assert "the gradient of 0.bias of stage 0 has NaN" in said
    dist.barrier()  # both have failed: whoever is to write has had its turn
    with an_executor(rank) as executor:
        history = trainer_of(executor, epochs=1, checkpoint=folder).fit()
        assert [*history] == [first]
        assert_equal_stages(executor.stages, [good.get(s, nn.Module()) for s in range(2)])


def test_steps_that_are_skipped_are_no_part_of_the_loss() -> None:
    skipped: list[tuple[tuple[int, int], ...]] = []
    sees = Calls(after_step=lambda result: skipped.append(result.skipped))
    (x, y), *others = TRAINED
    losses = []
    for data in ([(x, y), *others], [(x, y), (x * math.nan, y), *others]):
        with an_executor(None, nonfinite="skip") as executor:
            rates = torch.optim.lr_scheduler.StepLR(executor.optimizer, step_size=100)
            options = {"epochs": 1, "scheduler": rates, "callbacks": [sees]}
            losses.append(trainer_of(executor, data, **options).fit()[0].loss)
            assert rates.last_epoch == len(data)
    assert losses[0] == losses[1]
    assert skipped == [()] * (len(TRAINED) + 1) + [((0, 0), (1, 0))] + [()] * len(others)


def test_segments_are_those_of_run(tmp_path: Path) -> None:
    """And a training goes on only with the same."""
    data = TRAINED[:2]
    with noisy_executor(None, segment=8) as executor:
        losses = [result.loss for result in executor.run(data, segment=8)]
        expected = gathered_state(executor)
    with noisy_executor(None, segment=8) as executor:
        assert trainer_of(executor, data, epochs=1, segment=8).fit()[0].loss == sum(losses) / 2
        assert_same(gathered_state(executor), expected)
    for segment, other in ((8, 4), (None, 8)):
        folder = tmp_path / str(segment)
        with noisy_executor(None, segment=8) as executor:
            trainer_of(executor, checkpoint=folder, epochs=1, segment=segment).fit()
        with noisy_executor(None, segment=8) as executor:
            trainer = trainer_of(executor, checkpoint=folder, epochs=2, segment=other)
            said = f"segment={segment}, but this Trainer has segment={other}"
            assert said in message_of(trainer.fit)


def test_it_goes_on_under_another_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with noisy_executor(None) as executor:
        first = trainer_of(executor, checkpoint=tmp_path, epochs=2).fit()
    with noisy_executor(None, chunks=2) as executor:
        history = trainer_of(executor, checkpoint=tmp_path, epochs=3).fit()
        assert trainer_of(executor, checkpoint=tmp_path, epochs=3).fit() == history
    assert history[:2] == first[:]
    assert len(history) == 3
    assert caplog.messages == [f"nothing to train: step {history[-1].step} is the last already"]


@on_ranks(2)
def test_a_checkpoint_that_not_all_ranks_see_is_refused(rank: int, folder: Path) -> None:
    with noisy_executor(rank) as executor:
        trainer_of(executor, checkpoint=folder / "run", epochs=1).fit()
        mine = folder / ("run" if rank else "elsewhere")
        trainer = trainer_of(executor, checkpoint=mine, epochs=2)
        assert "process 0 does not see the checkpoint" in message_of(trainer.fit)


def test_callbacks_may_change_until_a_training_begins() -> None:
    seen: list[Any] = []
    with an_executor(None) as executor:
        trainer = trainer_of(executor, epochs=1)
        trainer.callbacks = [*trainer.callbacks, seen.append]
        assert seen == [trainer.fit()]
        assert trainer.metrics == {}


def test_it_prints_a_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with an_executor(None) as executor:
        history = Trainer(executor, Batches(TRAINED), epochs=2, **EVALUATED).fit()
        trainer_of(executor, epochs=1).fit()
    first, second = capsys.readouterr().out.splitlines()
    assert second == f"{history[1]}  1 after the best"
    assert first == (
        f"epoch 1  loss {history[0].loss:.4f}  evaluation {history[0].evaluation_loss:.4f}  "
        f"accuracy {history[0].metrics['accuracy']:.4f}  lr 0.05"
    )


@pytest.mark.parametrize(("limit", "steps"), [({"epochs": 2}, 6), ({"max_steps": 4}, 4)])
def test_a_terminal_has_the_log_beside_a_bar_of_the_steps(
    limit: Any, steps: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich takes a terminal to be
    monkeypatch.setenv("COLUMNS", "150")
    with an_executor(None) as executor:
        trainer_of(executor, progress=True, log_every=2, **limit).fit()
    printed = capsys.readouterr().out
    assert f"0/{steps}" in printed  # drawn a few times a second, so maybe nothing else
    assert f"{steps}/{steps}" in printed
    assert "samples_per_second" in printed
    assert "step 2" not in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 0}, "epochs must be an int of at least 1, not 0"),
        ({"epochs": None}, "nothing says when the training ends: pass epochs= or max_steps="),
        ({"segment": 0}, "segment must be an int of at least 1, not 0"),
        ({"segment": 4}, "1f1b computes nothing after"),
        ({"patience": 0}, "patience must be an int of at least 1, not 0"),
        ({"keep": None}, "keep must be an int of at least 1, not None"),
        ({"patience": 2}, "patience needs an evaluation set: pass evaluation= as well"),
        ({"metrics": {"a": accuracy}}, "metrics needs an evaluation set"),
        ({"autocast": torch.float16}, r"or torch.float16 with Executor\(…, scaler=…\), not"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler must be the executor's"),
        ({"batches": None}, r"batches must be an iterable of pairs .*, not NoneType"),
        ({"evaluation": 3}, r"evaluation must be an iterable of pairs .*, not int"),
        ({"scheduler": torch.optim.lr_scheduler}, r"object with step\(\), not <module"),
        ({"callbacks": print}, "callbacks must be a list, not builtin_function_or_method"),
        ({"callbacks": [3]}, "a callback is a Callback or a function of the history, not int"),
        ({"callbacks": [Callback]}, "not the class Callback"),
        ({**EVALUATED, "metrics": [accuracy]}, "metrics must be a dict .*, not list"),
        ({**EVALUATED, "metrics": {"a": 3}}, "metric 'a' must be a function .* not int"),
        ({**EVALUATED, "metrics": {"a": perplexity}}, "'a' must be a function .* not perplexity"),
        ({"batches": []}, "training: there is no batch"),
        ({"batches": (x for x in TRAINED)}, "a generator yields its batches only once"),
        ({"batches": [{"x": 1}]}, "batch 1 is no pair .* but dict; .* Batches"),
        ({"batches": [torch.ones(2, 4)]}, "batch 1 is no pair .* but Tensor"),
        ({"checkpoint": "nowhere"}, r"a list does not know where .* batches=Batches\(…\)"),
        ({"evaluation": []}, "evaluation: there is no batch"),
        ({**EVALUATED, "metrics": {"m": lambda o, t: 0.5}}, "metric 'm' must return .*"),
        ({**EVALUATED, "metrics": {"m": lambda o, t: (o, t)}}, "metric 'm' must return"),
        ({**EVALUATED, "metrics": {"m": lambda o, t: accuracy(o, t[:1])}}, r"\[\.\.\.\]"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], text: str) -> None:
    given = {"batches": TRAINED, "epochs": 2, "progress": False, **options}
    with an_executor(None) as executor, pytest.raises(ExecutionError, match=text):
        Trainer(executor, **given).fit()


def test_an_executor_without_optimizer_is_refused() -> None:
    with an_executor(None, optimizer=None) as executor:
        assert "has no optimizer" in message_of(trainer_of, executor, epochs=1)


def test_targets_that_the_loss_ignores_are_not_counted_as_wrong() -> None:
    output = torch.eye(3).repeat(2, 1, 1)  # [2, 3, 3]: the classes 0, 1, 2, twice
    target = torch.tensor([[0, 1, -100], [0, 0, -100]])
    assert tuple(map(int, accuracy(output, target))) == (3, 4)


def test_perplexity() -> None:
    assert perplexity(math.log(50.0)) == pytest.approx(50.0)
    assert perplexity(1000.0) == math.inf


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_without_warmup_the_cosine_is_that_of_torch(floor: float) -> None:
    def rates(make: Callable[..., Any], number: int, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.4)
        scheduler = make(optimizer, **options)
        found = []
        for _ in range(number):
            found += scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
        return found

    annealing = torch.optim.lr_scheduler.CosineAnnealingLR
    expected = rates(annealing, 11, T_max=10, eta_min=floor * 0.4)
    found = rates(warmup_cosine, 14, warmup=0, steps=10, floor=floor)
    assert found[:11] == pytest.approx(expected)
    assert found[10:] == [floor * 0.4] * 4
    warm = rates(warmup_cosine, 14, warmup=3, steps=13, floor=floor)
    assert warm[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert warm[3:] == found[:11]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"warmup": -1, "steps": 5}, "not -1 of 5"),
        ({"warmup": 5, "steps": 5}, "not 5 of 5"),
        ({"warmup": 0, "steps": 5, "floor": 2.0}, "floor must be a share"),
    ],
)
def test_a_warmup_that_does_not_fit_is_refused(options: dict[str, Any], text: str) -> None:
    optimizer = adamw([nn.Parameter(torch.ones(1))])
    assert text in message_of(warmup_cosine, optimizer, **options)
