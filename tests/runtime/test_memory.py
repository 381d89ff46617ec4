"""How long memory is held: what is sent, what is received, and what a step takes at its peak."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import schedir
from schedir.runtime import Executor, plan
from schedir.runtime.accelerator import Host
from schedir.runtime.boundary import TensorMeta, meta_of
from schedir.runtime.program import program
from schedir.runtime.transports import Batch, FromBuffers, Pool, Work
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    assert_equal_gradients,
    gradients,
    linear_stages,
    microbatches_of,
    numbered,
    random_batches,
    sgd,
)
from tests.runtime.queueing import Queueing
from tests.sweeps import is_quick

WIDTH, ROWS = 64, 16
BOUNDARY = 4 * WIDTH * ROWS  # bytes


class Live(TorchDispatchMode):
    """The bytes of all that torch has made inside and that still lives, and the most so far.

    What is smaller than `least` bytes does not count, nor does the memory of `others`.
    """

    def __init__(self, others: Iterable[Tensor] = (), least: int = BOUNDARY) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least = least
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage and storage.nbytes() >= self._least and storage._cdata not in self._others:
                known = self._made.get(storage._cdata)
                if known is None or known[0].expired():
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return made

    def now(self) -> int:
        """What lives of it now."""
        self._made = {key: own for key, own in self._made.items() if not own[0].expired()}
        return sum(size for _, size in self._made.values())


def peak(microbatches: int) -> int:
    """Of a step of 1F1B on four ranks in one process, all shapes known."""
    schedule = schedir.build("1f1b", ranks=4, microbatches=microbatches)
    stages = numbered(linear_stages(4, WIDTH))
    inputs, target = ([t] * microbatches for t in torch.randn(2, ROWS, WIDTH))
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        executor.step(inputs, target=target)
        with Live() as live:
            executor.step(inputs, target=target)
    return int(live.peak)


@pytest.fixture
def no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small boundaries would all be received ahead, up to a mebibyte."""
    monkeypatch.setattr(program, "SPARE_BYTES", 0)


@pytest.mark.usefixtures("no_spare")
@pytest.mark.parametrize("device", [Host, Queueing])  # which uses receive buffers again
def test_the_peak_of_a_step_does_not_grow_with_its_microbatches(
    device: type[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "accelerator_of", device)
    assert peak(8) == peak(64) > 4 * BOUNDARY


def peaks_of_segments(segment: int) -> list[int]:
    """Of each segment of a stream, all shapes known; batches of eight microbatches."""
    schedule = schedir.build("pipedream", ranks=4, microbatches=8)
    stages = numbered(linear_stages(4, WIDTH))
    batch: Any = tuple([t] * 8 for t in torch.randn(2, ROWS, WIDTH))
    found = []
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        for turn in range(3 if is_quick() else 11):
            with Live() as live:
                list(executor.run([batch] * (segment // 8), segment=segment))
            found += [live.peak] * bool(turn)
    return found


@pytest.mark.usefixtures("no_spare")
def test_the_peak_of_a_stream_grows_neither_with_its_segments_nor_with_their_length() -> None:
    assert {*peaks_of_segments(16), *peaks_of_segments(64)} == {peaks_of_segments(8)[0]}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        # By B0 the first three have arrived: rank 1 runs its B0 after its F2.
        (Host, [0, 1, 2, 3, 1, 1, 1, 1]),
        # What is under way there is a copy.
        (Queueing, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_what_was_sent_is_let_go_before_its_backward(
    device: type[Host], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many outputs of rank 0 of four live before each of its forwards.

    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 …
    """
    monkeypatch.setattr(plan, "accelerator_of", device)
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in made))
            y = super().forward(x)
            made.append(weakref.ref(y))
            return y

    schedule = schedir.build("1f1b", ranks=4, microbatches=8)
    stages = {**numbered(linear_stages(4)), 0: First(4, 4)}
    with Executor(schedule, stages, MSE, sgd, in_process=True) as executor:
        for x, y in random_batches(2):
            executor.step(x, target=y)
    assert alive[-8:] == expected


class Scale(torch.autograd.Function):
    """A node that Python holds rather than C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0]


class Odd(nn.Linear):
    """Its outputs have edges of all kinds: of a leaf, of a custom Function, of a view, and none."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.leaf = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y = super().forward(x)
        return self.leaf, Scale.apply(y), y[:, :2], x  # type: ignore[no-untyped-call]


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return b * a.sum() + torch.cat((c, c), 1) + x


SPLIT = listed(2, "0 1", "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1I1 1W0 1W1", name="split")


@pytest.mark.parametrize("schedule", [schedir.build("1f1b", ranks=2, microbatches=2), SPLIT])
def test_the_graph_of_what_was_sent_stays(schedule: schedir.Schedule) -> None:
    stages: list[nn.Module] = [Odd(), Sum()]
    model = copy.deepcopy(stages)
    ((x, y),) = random_batches(1, rows=4)
    with Executor(schedule, numbered(stages), MSE, in_process=True) as executor:
        executor.step(x, target=y, update=False)
    plain_step(model, MSE, (), microbatches_of((x, y), 2))
    assert_equal_gradients(gradients(stages), gradients(model))


def empty(pool: Pool, meta: TensorMeta) -> Tensor:
    return pool.empty(meta.shape, meta.stride, dtype=meta.dtype)


@pytest.fixture
def pool() -> Pool:
    return Pool(torch.device("cpu"))


META = meta_of(torch.empty(2, 3))


def test_a_buffer_is_used_again_once_nobody_has_it(pool: Pool) -> None:
    first, second = empty(pool, META), empty(pool, META)
    place = first.data_ptr()
    assert second.data_ptr() != place
    first.fill_(1.0)
    del first
    again = empty(pool, META)
    # By its version a module that changes its input is found.
    assert (again.data_ptr(), again._version) == (place, 0)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x,
        Tensor.detach,
        lambda x: x[1:],
        Tensor.untyped_storage,
        lambda x: (x.requires_grad_() ** 2).sum(),  # its graph has saved it
    ],
)
def test_what_somebody_keeps_is_not_given_out(pool: Pool, keep: Callable[[Tensor], Any]) -> None:
    kept = [keep(empty(pool, META))]
    other = empty(pool, META)
    places = {buffer.data_ptr() for buffers in pool._buffers.values() for buffer in buffers}
    assert len(places) == 2
    kept.clear()
    assert {empty(pool, META).data_ptr(), other.data_ptr()} == places


def test_layouts_do_not_share_buffers(pool: Pool) -> None:
    shapes = [torch.empty(2, 3), torch.empty(3, 2), torch.empty(3, 2).t()]
    for tensor in (*shapes, torch.empty(2, 3, dtype=torch.int32)):
        buffer = empty(pool, meta_of(tensor))
        found = buffer.shape, buffer.stride(), buffer.dtype
        assert found == (tensor.shape, tensor.stride(), tensor.dtype)
    assert len(pool._buffers) == 4


def test_after_a_call_a_pool_lets_go_of_what_is_kept_and_what_it_did_not_need(pool: Pool) -> None:
    for _ in range(2):
        kept = empty(pool, META)
        empty(pool, META)
        pool.trim()
        ((free,),) = pool._buffers.values()
        assert free.data_ptr() != kept.data_ptr()
    empty(pool, meta_of(torch.empty(5)))
    pool.trim()
    assert [*pool._buffers] == [((5,), (1,), torch.float32)]


@pytest.mark.parametrize("batched", [False, True])
def test_a_buffer_that_is_sent_is_not_given_out_before_that_is_waited_for(
    pool: Pool, batched: bool
) -> None:
    sent: list[tuple[int, Tensor]] = []

    def send(tensor: Tensor, _: int) -> Any:
        """It is done at once, and its work holds nothing."""
        sent.append((tensor.data_ptr(), tensor.clone()))
        return Mock()

    poster = Mock(send=send, together=lambda posts: [send(p.tensor, p.peer) for p in posts])
    sending = FromBuffers(poster, pool)
    values = [torch.full((2, 3), float(n), requires_grad=True) for n in range(4)]
    works: list[Work] = []
    for tensor in values[:2]:
        batch = Batch(poster)
        works.append((FromBuffers(batch, pool) if batched else sending).send(tensor, 1))
        batch.post()
    first, second = (place for place, _ in sent)
    assert len({first, second, *(tensor.data_ptr() for tensor in values)}) == 6
    works.pop(0).wait()
    works += [sending.send(tensor, 1) for tensor in values[2:]]
    assert sent[2][0] == first
    assert sent[3][0] not in (first, second)
    assert all(torch.equal(a, b) for a, (_, b) in zip(values, sent, strict=True))


class Keeps(nn.Linear):
    """Keeps what it was given, and hands a view of its input on."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.given: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training and type(x) is Tensor:
            self.given.append((x, x.detach().clone()))
        return super().forward(x)


class Passes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


@pytest.mark.usefixtures("no_spare")
@pytest.mark.parametrize("name", ["1f1b", "fill-drain", "pipedream"])
def test_buffers_that_are_used_again_train_as_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the modules keep, and what they hand on of their input, is not overwritten."""
    schedule = schedir.build(name, ranks=4, microbatches=8)
    stages: list[nn.Module] = [nn.Linear(4, 4), Keeps(), Passes(), nn.Linear(4, 4)]
    losses, trained = [], []
    for device in (Queueing, Host):
        here = copy.deepcopy(stages)
        monkeypatch.setattr(plan, "accelerator_of", device)
        with Executor(schedule, numbered(here), MSE, sgd, in_process=True) as executor:
            losses.append([executor.step(x, target=y).loss for x, y in random_batches(3)])
            pools = {**executor._engine.training.parts.pools}  # closing lets go of them
        keeps = here[1]
        assert isinstance(keeps, Keeps)
        assert len(keeps.given) == 24
        assert all(torch.equal(*pair) for pair in keeps.given)
        assert bool(pools) is (device is Queueing)
        if pools and name == "1f1b":  # two that are received, and two that are under way
            assert [len(own) for own in pools[3]._buffers.values()] == [4]
        trained.append([p.detach().clone() for module in here for p in module.parameters()])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *trained))
