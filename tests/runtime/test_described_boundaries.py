"""Boundaries whose shapes depend on data: payloads travel with their description in every call.

The model packs its tokens: it drops the padding, and what is left differs between microbatches and
calls of one input shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from reference import plain_step, recurrence_of
from torch import Tensor, nn

import schedir
from schedir.errors import LoadError
from schedir.passes import offload
from schedir.runtime import Executor, plan
from schedir.runtime.boundary import Boundary, boundary_of
from schedir.runtime.call import STEP, Now
from schedir.runtime.program.transfers import Message, Messenger
from schedir.runtime.transports import Work
from tests.built_in import EVERY
from tests.runtime.features import (
    MICROBATCHES,
    Feature,
    Setting,
    Workload,
    built,
    compare,
    round_robin,
)
from tests.runtime.kit import (
    MSE,
    Batch,
    Calls,
    Twins,
    linear_stages,
    microbatches_of,
    numbered,
    random_batches,
    refused,
)
from tests.runtime.lists import megatron
from tests.runtime.nccl_over_gloo import nccl_over_gloo
from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.queueing import Queueing
from tests.sweeps import sweep

WORDS = 5


def packed(tokens: Tensor) -> Tensor:
    """Without the padding."""
    return tokens[tokens > 0]


def packs(number: int, width: int) -> list[nn.Module]:
    """An embedding that packs, layers with dropout, and a head."""
    first = Calls(lambda embed, tokens: embed(packed(tokens)), nn.Embedding(WORDS, width))
    inner = [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.25), nn.Tanh())
        for _ in range(number - 2)
    ]
    stages = [first, *inner, nn.Linear(width, WORDS)]
    return stages if number > 1 else [nn.Sequential(*stages)]


def padded(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens that are their own target; none is left of a row of zeros."""
    tokens = torch.randint(-3, WORDS, (rows, width), generator=generator).clamp(min=0)
    tokens[1:, 0] += 1 - tokens[1:, 0].sign()
    return tokens, tokens


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens, and 0 over none."""
    summed = nn.functional.cross_entropy(output, packed(target), reduction="sum")
    return summed / max(len(output), 1)


def count(target: Tensor) -> Tensor:
    return packed(target).new_tensor(len(packed(target)))


PACKED = Workload(packs, padded, loss_of)


def packing(schedule: schedir.Schedule, **options: Any) -> Feature:
    """The training of a list with all its boundaries described."""
    marks = dict.fromkeys(range(schedule.stages - 1), "described")
    return Feature(schedule, {"boundaries": marks, "count": count, **options}, workload=PACKED)


def shaped(name: str, ranks: int) -> schedir.Schedule | None:
    """A schedule of 8 microbatches; None if it takes no such shape."""
    try:
        return schedir.build(name, ranks=ranks, microbatches=8)
    except LoadError:
        return None


ON_RANKS = [(ranks, name) for ranks in (2, 4) for name in EVERY]
OPTIONS: dict[str, Callable[[], Feature]] = {
    "1f1b": lambda: packing(built("1f1b"), trace=True),
    "recomputed": lambda: packing(built("1f1b"), recompute=True),
    "offloaded": lambda: packing(offload(built("zb-h1"), [0, 1]), trace=True),
    "weight versions": lambda: packing(built("pipedream")),
    "replicas of a stage": lambda: packing(built(round_robin, ranks=3)),
    "batches": lambda: packing(megatron(2, MICROBATCHES)),
    "two pipelines": lambda: attrs.evolve(packing(built("interleaved-1f1b")), pipelines=2),
    "clipped": lambda: packing(built("1f1b"), clip_grad_norm=0.05),
}
PROCESSES = [(make().processes, name) for name, make in OPTIONS.items()]


@sweep("ranks", [1, 2, 4], quick=[2])
@sweep("name", EVERY, quick=["1f1b", "dualpipev", "chimera", "pipedream", "zbv"])
def test_every_schedule_trains_packed_in_one_process(name: str, ranks: int) -> None:
    schedule = shaped(name, ranks)
    if schedule is not None:
        compare(packing(schedule), Setting())


@sweep("ranks, name", ON_RANKS, quick=[(2, "interleaved-1f1b"), (4, "1f1b")], ids=name_of)
@on_ranks()
def test_every_schedule_trains_packed_on_ranks(rank: int, ranks: int, name: str) -> None:
    schedule = shaped(name, ranks)
    assert schedule is not None
    compare(packing(schedule), Setting(rank=rank))


@pytest.mark.parametrize("name", [n for n in OPTIONS if OPTIONS[n]().pipelines == 1])
@pytest.mark.parametrize("queues", [False, True])
def test_with_all_else_in_one_process(
    name: str, queues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if queues:
        monkeypatch.setattr(plan, "accelerator_of", Queueing)
    compare(OPTIONS[name](), Setting())


@sweep("ranks, name", PROCESSES, quick=lambda case: case[1] in {"offloaded"}, ids=name_of)
@on_ranks()
def test_with_all_else_on_ranks(rank: int, ranks: int, name: str) -> None:
    compare(OPTIONS[name](), Setting(rank=rank))


@sweep("ranks, name", PROCESSES, quick=lambda case: case[1] in {"recomputed"}, ids=name_of)
@on_ranks()
def test_over_nccl_messages_go_by_the_host(
    rank: int, ranks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "accelerator_of", Queueing)
    with nccl_over_gloo():
        compare(OPTIONS[name](), Setting(rank=rank))


def batches_of(number: int, microbatches: int = 4, rows: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [padded(rows * microbatches, 5, generator) for _ in range(number)]


def selects_and_pools(number: int = 3) -> list[nn.Module]:
    """Only the second boundary has shapes that depend on data; the others are agreed."""
    torch.manual_seed(5)
    selects = Calls(lambda layer, x: layer(x)[x[..., 0] > 0], nn.Linear(4, 4))
    pools = Calls(lambda layer, x: layer(x).sum(0, keepdim=True), nn.Linear(4, 4))
    stages = [nn.Embedding(WORDS, 4), selects, pools]
    return [*stages, *(nn.Linear(4, 4) for _ in stages[: number - 3])]


def norm_of(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def train(twins: Twins, batches: Sequence[Batch], **options: Any) -> None:
    """Train and evaluate, beside plain training."""
    with twins.executor(norm_of, timeout=30, **options) as executor:
        for x, y in batches:
            before = executor.evaluate(x, target=y).loss
            assert executor.step(x, target=y).loss == before == twins.step((x, y), norm_of)
        assert (executor.infer(x) is None) is (twins.schedule.stages - 1 not in twins.local)
    twins.assert_equal()


@on_ranks(3)
@pytest.mark.parametrize("marks", [0, 1, 2])
def test_a_mark_on_any_one_rank_suffices(rank: int, marks: int) -> None:
    """That of the sender, of the receiver, or another one; an evaluation, which sends nothing back,
    comes first."""
    schedule = schedir.build("1f1b", ranks=3, microbatches=4)
    twins = Twins(selects_and_pools(), schedule, rank)
    train(twins, batches_of(4), boundaries={1: "described"} if rank == marks else None)


@on_ranks(2)
def test_input_shapes_alternate(rank: int) -> None:
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    batches = [b for pair in zip(batches_of(3), batches_of(3, rows=3), strict=True) for b in pair]
    train(Twins(selects_and_pools(4), schedule, rank), batches, boundaries={1: "described"})


def test_the_error_of_a_shape_that_changes_names_the_mark() -> None:
    schedule = schedir.build("1f1b", ranks=4, microbatches=2)
    stages, marks = numbered(packs(4, 4)), dict[int, str]()
    for stage in range(3):
        says = rf"stage returned .*pass boundaries=\{{{stage}: 'described'\}}"
        with Executor(schedule, stages, loss_of, in_process=True, boundaries=marks) as executor:
            (x, y), other = batches_of(2, 2)
            executor.step(x, target=y)
            with refused(says):
                executor.step(other[0], target=other[1])
        marks[stage] = "described"


@pytest.mark.parametrize(
    ("boundaries", "said"),
    [
        ({0: "describe"}, r"stage 0 has 'describe'; give 'described', or an example of its output"),
        ("described", r"must be by stage, such as \{0: 'described'\}, not 'described'"),
        ({5: "described"}, r"there is no stage 5, only 0\.\.1"),
    ],
)
def test_a_mark_that_is_none_is_refused(boundaries: Any, said: str) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    with refused(said):
        Executor(schedule, numbered(linear_stages()), MSE, in_process=True, boundaries=boundaries)


def train_in_segments(rank: int | None) -> None:
    size, batches = 4, batches_of(4)
    schedule = schedir.build("pipedream", ranks=2, microbatches=size)
    twins = Twins(packs(2, 4), schedule, rank)
    with twins.executor(loss_of, boundaries={0: "described"}, count=count) as executor:
        assert len([*executor.run(batches, segment=2 * size)]) == 4
    recurrence = recurrence_of(schedir.build("pipedream", ranks=2, microbatches=2 * size))
    for pair in (batches[:2], batches[2:]):
        pieces = [piece for batch in pair for piece in microbatches_of(batch, size)]
        plain_step(twins.whole, loss_of, twins.optimizers, pieces, recurrence, count=count)
    twins.assert_equal()


def test_a_segment_of_batches_trains_packed() -> None:
    """It is one call, and the next one has other shapes."""
    train_in_segments(None)


@on_ranks(2)
def test_a_segment_of_batches_trains_packed_on_ranks(rank: int) -> None:
    train_in_segments(rank)


def test_what_a_first_call_has_learned_is_not_relied_on() -> None:
    """Stages and a loss that work in place only in later calls train as they do on copies, and the
    user's tensors stay as they are."""
    in_place = [False]

    def changed(x: Tensor) -> Tensor:
        return x.mul_(2) if in_place[0] else x * 2

    def scales(layer: nn.Module, x: Tensor, by: Tensor) -> Any:
        return layer(changed(x)) * changed(by)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, changed(target))

    by = torch.full((1,), 3.0)
    stages = [
        Calls(scales, nn.Linear(4, 4)),
        Calls(lambda one, x: one(changed(x)), nn.Linear(4, 4)),
    ]
    twins, whole = Twins(stages, built("1f1b")), nn.Sequential(*(s.layers[0] for s in stages))
    options: dict[str, Any] = {"boundaries": {0: "described"}, "optimizer": None}
    options["kwargs_chunk_spec"] = {"by": "replicate"}
    with twins.executor(loss, **options) as executor:
        for in_place[0] in (False, True):
            (x, y), before = random_batches(1, 12)[0], random_batches(1, 12)[0]
            executor.step(x, target=y, stage_inputs={0: {"by": by}})
            assert torch.equal(x, before[0])
            assert torch.equal(y, before[1])
            assert by == 3
            first, last = whole
            for a, b in microbatches_of(before, 6):
                (MSE(last(first(a * 2) * 6 * 2), b * 2) / 6).backward()
    twins.assert_equal_gradients()


@attrs.frozen(eq=False)
class Received:
    """A receive of a channel from this process to itself."""

    sent: deque[Tensor]
    buffer: Tensor

    def wait(self) -> bool:
        tensor = self.sent.popleft()
        assert tensor.shape == self.buffer.shape, "gloo would abort the process"
        self.buffer.copy_(tensor)
        return True


@attrs.define(eq=False)
class Loop:
    """A channel from this process to itself, which counts what is sent."""

    sent: deque[Tensor] = attrs.field(factory=deque)
    number: int = 0

    def send(self, tensor: Tensor, peer: int) -> Work:
        self.number += 1
        self.sent.append(tensor.clone())
        return Received(self.sent, tensor)

    def receive(self, buffer: Tensor, peer: int) -> Work:
        return Received(self.sent, buffer)


class Letters:
    """A messenger that writes to itself."""

    def __init__(self) -> None:
        self.now, self.firsts, self.rests = Now([0]), Loop(), Loop()
        self._posted = Messenger(self.firsts, self.rests, torch.device("cpu"), self.now)
        self._coming: dict[str, Work] = {}
        self._came: list[Message] = []

    def send(self, number: int, **tensors: Tensor) -> None:
        """Send one tensor a message in a call, by key."""
        self.now.call = STEP.of_number(number)
        for key, tensor in tensors.items():
            self.give(key, boundary_of(tensor), tensor)

    def give(self, key: str, boundary: Boundary, tensor: Tensor) -> None:
        """Send a tensor in the current call."""
        self._coming[key] = self._posted.expect((key, 0, 0), 0, self._came.append)
        self._posted.send((key, 0, 0), Message(boundary, boundary.metas, (tensor,)), 0)

    def take(self, key: str) -> tuple[Boundary, Tensor]:
        """What was sent beside the tensor, and the tensor."""
        self._coming.pop(key).wait()
        message = self._came.pop()
        (tensor,) = message.tensors
        return message.beside, tensor


def test_messages_of_lengths_that_were_seen_are_one_transfer_each() -> None:
    """So at equal shapes a step has as many transfers as with agreed ones. No message is as long as
    one over another boundary."""
    letters, rests = Letters(), []
    short, long, none = torch.randn(2, 4), torch.randn(300, 4).t(), torch.randn(0, 4)
    calls = [(short, none), (short, none), (long, short), (none, long), (short, short), (long,)]
    for number, tensors in enumerate(calls):
        sent = dict(zip("ab", tensors, strict=False))
        letters.send(number, **sent)
        for key, tensor in reversed(sent.items()):
            beside, came = letters.take(key)
            assert beside == boundary_of(tensor)
            assert torch.equal(came, tensor)
            assert came.stride() == tensor.stride()
        rests.append(letters.rests.number)
    assert letters.firsts.number == 11
    assert rests == [0, 0, 2, 3, 4, 5]


def test_a_constant_comes_as_what_it_is() -> None:
    """A description that only seems to be as the one before is sent."""
    letters = Letters()
    for constant in (1, True, 1.0, 1.0, 0.0, -0.0, None, "1"):
        letters.now.call = STEP.of_number(0)
        letters.give("a", boundary_of((torch.zeros(2), constant)), torch.zeros(2))
        came = letters.take("a")[0].leaves[1]
        assert (type(came), repr(came)) == (type(constant), repr(constant))


def test_a_message_belongs_to_its_call() -> None:
    letters = Letters()
    letters.send(0, a=torch.zeros(1), b=torch.zeros(1))
    letters.take("b")
    letters.send(1, a=torch.ones(1))
    assert letters.take("a")[1] == 1
