"""All that the runtime can do, each as a training that must equal plain training, bit for bit.

On ranks, or with all of them in this process; on any device. `tests/runtime/test_features.py` runs
them on the CPU and on a GPU in one process, `tools/gpu_hour` on ranks that share a GPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from reference import Recurrence, plain_step, recurrence_of, run_stages
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir import Action, Kind, Pipeline, backward, forward, optim_step, reduce_grad
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE
from schedir.runtime import Executor
from tests.runtime.kit import MSE, Batch, Checkpointed, microbatches_of, momentum
from tests.runtime.lists import bidirectional_v, megatron, recomputed_early, stepping
from tests.runtime.recurrences import delayed, pipedream

MICROBATCHES = 6
RANKS = 2  # of a pipeline


@frozen
class Setting:
    """Where a feature is tried, and how large its boundaries are.

    `rank` is that of this process among all, None for all ranks in this process. `timeout`, in
    seconds, is how long a rank waits for another. Without `reads`, no step but the first may have
    the host wait for the device.
    """

    rank: int | None = None
    device: str = "cpu"
    rows: int = 2  # of a microbatch
    width: int = 6
    steps: int = 3
    timeout: float = 60.0
    reads: bool = True


@frozen
class Workload:
    """What is trained: `stages` makes so many of a width, `batch` draws inputs and target of so
    many rows and a width.

    `given` is what the executor gets of a tensor of the batch, for a device. Losses may differ by
    `near`, relatively.
    """

    stages: Callable[[int, int], list[nn.Module]]
    batch: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = MSE
    given: Callable[[Tensor, str], Tensor] = Tensor.to
    near: float = 1e-5


def linear_layers(dropout: float) -> Callable[[int, int], list[nn.Module]]:
    """A linear layer in each stage."""
    return lambda number, width: [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh())
        for _ in range(number)
    ]


def rows_of_numbers(rows: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, width, generator=generator)
    return x, y


DROPOUT = Workload(linear_layers(0.25), rows_of_numbers)
CHECKPOINTED = Workload(
    lambda number, width: [
        nn.Sequential(nn.Linear(width, width), Checkpointed(nn.Linear(width, width)))
        for _ in range(number)
    ],
    rows_of_numbers,
)
NO_DROPOUT = Workload(linear_layers(0.0), rows_of_numbers)


@frozen
class Feature:
    """A schedule, with what the executor is told to do beside it.

    `pipelines` run it, on ranks of their own, where there are several processes. The tied
    parameters of the `tied` stages start equal. What updates oftener than once is held against its
    `recurrence`, which draws no dropout.
    """

    schedule: schedir.Schedule
    options: dict[str, Any] = field(factory=dict)
    pipelines: int = 1
    tied: tuple[int, ...] = ()
    recurrence: Recurrence | None = None
    workload: Workload = field()

    @workload.default
    def _drawn(self) -> Workload:
        return NO_DROPOUT if self.recurrence else DROPOUT

    @property
    def count(self) -> Callable[[Tensor], float | Tensor]:
        """How many samples a microbatch has, from its target."""
        found: Callable[[Tensor], float | Tensor] = self.options.get("count", len)
        return found

    @property
    def processes(self) -> int:
        """How many run it, where each runs one rank."""
        return self.pipelines * self.schedule.ranks


zero_bubble = "zb-h1"


@schedir.schedule("round-robin", placement=lambda pipe: [(0, 1), 2])
def round_robin(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """PipeDream's 1F1B-RR, flushed: two replicas of stage 0 take turns."""
    own = range(rank, pipe.microbatches, 2) if rank < 2 else range(pipe.microbatches)
    stage = 0 if rank < 2 else 1
    for m in own:
        yield forward(stage, m)
        if stage:
            yield backward(stage, m)
    if not stage:
        for m in own:
            yield backward(stage, m)
        yield reduce_grad(stage)
    yield optim_step(stage)


def _counted(target: Tensor) -> Tensor:
    """The rows, as the target's device knows them."""
    return target.new_full((), len(target))


def _scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**8, growth_interval=1)


@cache
def built(target: Any, ranks: int = RANKS, **parameters: Any) -> schedir.Schedule:
    return schedir.build(target, ranks=ranks, microbatches=MICROBATCHES, **parameters)


_PIPEDREAM = pipedream(RANKS, MICROBATCHES)
_TWO_RATES = delayed((3, 2), MICROBATCHES, lambda s, m: m // (2 if s else 3))

FEATURES: dict[str, Callable[[], Feature]] = {
    "fill-drain": lambda: Feature(built("fill-drain")),
    "1f1b": lambda: Feature(built("1f1b")),
    "interleaved": lambda: Feature(built("interleaved-1f1b", chunks=2)),
    "weight versions": lambda: Feature(built("pipedream"), recurrence=_PIPEDREAM),
    "different rates": lambda: Feature(stepping((3, 2), MICROBATCHES), recurrence=_TWO_RATES),
    "different rates, counted": lambda: Feature(
        stepping((3, 2), MICROBATCHES), {"count": _counted}, recurrence=_TWO_RATES
    ),
    "different rates, summed": lambda: Feature(
        stepping((3, 2), MICROBATCHES), {"weigh": None}, recurrence=_TWO_RATES
    ),
    "split backward": lambda: Feature(built(zero_bubble)),
    "split backward of checkpoints": lambda: Feature(built(zero_bubble), workload=CHECKPOINTED),
    "recompute": lambda: Feature(recomputed_early(built("1f1b"), {0}), {"recompute": [1]}),
    "clipping": lambda: Feature(built("1f1b"), {"clip_grad_norm": 0.05}),
    "ties": lambda: Feature(built("1f1b"), tied=(0, 1)),
    "ties and clipping": lambda: Feature(built("1f1b"), {"clip_grad_norm": 0.05}, tied=(0, 1)),
    "replicas of a stage": lambda: Feature(built(round_robin, ranks=3)),
    "ties of replicas": lambda: Feature(
        built(round_robin, ranks=3), {"clip_grad_norm": 0.05}, tied=(0, 1)
    ),
    "two pipelines": lambda: Feature(built("1f1b"), {"clip_grad_norm": 0.05}, pipelines=2),
    # Powers of two, which change no bit; the scale grows after every step.
    "scaled loss": lambda: Feature(built("1f1b"), {"scaler": _scaler()}, tied=(0, 1)),
    "scaled loss and clipping": lambda: Feature(
        built("interleaved-1f1b"), {"scaler": _scaler(), "clip_grad_norm": 0.05}, pipelines=2
    ),
    "batches": lambda: Feature(megatron(RANKS, MICROBATCHES)),
    "overlapped pairs": lambda: Feature(bidirectional_v(RANKS, MICROBATCHES)),
}
"""By name; several are lists of entries that are run together."""


def _traced(name: str) -> Callable[[], Feature]:
    def feature() -> Feature:
        found = FEATURES[name]()
        return evolve(found, options={**found.options, "trace": True})

    return feature


_TRACED = ["interleaved", "weight versions", "split backward", "recompute", "ties and clipping"]
_TRACED += ["ties of replicas", "two pipelines", "batches", "overlapped pairs"]
FEATURES |= {f"{name}, traced": _traced(name) for name in _TRACED}


def check(name: str, setting: Setting) -> None:
    """Compare training with the feature of that name."""
    compare(FEATURES[name](), setting)


def compare(feature: Feature, setting: Setting) -> None:
    """Train with a feature and without schedir; raises AssertionError where the two differ."""
    loss_fn, near = feature.workload.loss_fn, feature.workload.near
    whole = _stages(feature, setting)
    line, place = 0, setting.rank
    options = {"timeout": setting.timeout, "in_process": place is None, **feature.options}
    if feature.tied:
        options["ties"] = [[(stage, "0.weight") for stage in feature.tied]]
    if place is not None:
        line, place = divmod(place, feature.schedule.ranks)
        if feature.pipelines > 1:
            shape = feature.pipelines, feature.schedule.ranks
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    stages = range(feature.schedule.stages)
    here = stages if place is None else feature.schedule.stages_of(place)
    local = {stage: copy.deepcopy(whole[stage]) for stage in here}
    optimizers = [momentum(stage.parameters()) for stage in whole]
    with Executor(feature.schedule, local, loss_fn, momentum, **options) as executor:
        for step, drawn in enumerate(_batches(feature, setting)):
            given = [feature.workload.given(tensor, setting.device) for tensor in drawn[line]]
            batches = [(x.to(setting.device), y.to(setting.device)) for x, y in drawn]
            with _no_host_read() if step and not setting.reads else nullcontext():
                result = executor.step(given[0], target=given[1])
            number = feature.schedule.microbatches
            pieces = [piece for batch in batches for piece in microbatches_of(batch, number)]
            clips = "clip_grad_norm" in feature.options
            expected = plain_step(
                whole,
                loss_fn,
                () if clips else optimizers,
                pieces,
                feature.recurrence or recurrence_of(feature.schedule, feature.pipelines),
                seed=None if feature.recurrence else (0, step),
                weigh=feature.options.get("weigh", "samples"),
                count=feature.count,
                ties=options.get("ties", ()),
            )
            if clips:
                _clip(feature, whole, result.grad_norm)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            _assert_near("the loss", result.loss, expected, near)
        evaluated = executor.evaluate(given[0], target=given[1]).loss
        if feature.options.get("trace"):
            _check_timelines(executor, setting, line, result.busy)
    _assert_near("the loss of evaluate", evaluated, _evaluated(feature, whole, batches), near)
    for stage, module in local.items():
        _assert_equal(stage, module, whole[stage])


@contextmanager
def _no_host_read() -> Iterator[None]:
    """Inside, it is an error to have the host wait for a GPU."""
    with warnings.catch_warnings():
        # Torch warns, once it is set, that it does not see all waits.
        warnings.filterwarnings("ignore", ".*Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _stages(feature: Feature, setting: Setting) -> list[nn.Module]:
    torch.manual_seed(7)
    stages = feature.workload.stages(feature.schedule.stages, setting.width)
    for stage in feature.tied[1:]:
        tied = {"0.weight": stages[feature.tied[0]].state_dict()["0.weight"]}
        stages[stage].load_state_dict(tied, strict=False)
    return [stage.to(setting.device) for stage in stages]


def _batches(feature: Feature, setting: Setting) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each step the batch of every pipeline; the same on all ranks."""
    generator = torch.Generator().manual_seed(11)
    shape = setting.rows * feature.schedule.microbatches, setting.width
    for _ in range(setting.steps):
        yield [feature.workload.batch(*shape, generator) for _ in range(feature.pipelines)]


def _clip(feature: Feature, whole: Sequence[nn.Module], norm: float | None) -> None:
    """As torch clips; a tied parameter counts once, and its copies are clipped with it."""
    copies = {whole[stage].get_parameter("0.weight") for stage in feature.tied[1:]}
    counted = [p for stage in whole for p in stage.parameters() if p not in copies]
    limit = feature.options["clip_grad_norm"]
    expected = float(torch.nn.utils.clip_grad_norm_(counted, limit))
    assert norm is not None
    _assert_near("the norm", norm, expected)
    for p in copies:
        p.grad = whole[feature.tied[0]].get_parameter("0.weight").grad


@torch.no_grad()
def _evaluated(feature: Feature, whole: Sequence[nn.Module], batches: Sequence[Batch]) -> float:
    stages, loss_fn = [stage.eval() for stage in whole], feature.workload.loss_fn
    losses = [float(loss_fn(run_stages(stages, x), y)) for x, y in batches]
    if "weigh" in feature.options:  # the microbatches are equal
        return sum(losses) * feature.schedule.microbatches
    counts = [float(feature.count(y)) for _, y in batches]
    return sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)


def _check_timelines(executor: Executor, setting: Setting, line: int, busy: float) -> None:
    """A timeline for each step, that of the first pipeline, on its rank 0; `busy` is that of the
    last one here."""
    timelines = executor.timelines()
    assert not executor.timelines()
    speaks = line == 0 and executor.rank == 0
    assert [t.measured.step for t in timelines if t.measured] == [*range(setting.steps)] * speaks
    for timeline in timelines:
        check_timeline(timeline)
    for timeline in timelines[1:]:  # the first step has learned how far ahead receives go
        assert timeline.schedule == executor.schedule
    if speaks:
        ranks = [0] if setting.rank is not None else range(executor.schedule.ranks)
        found = sum(timelines[-1].ranks[rank].busy for rank in ranks)
        columns = timelines[-1].schedule.columns
        near = max(1e-6 * busy, 1e-9 * len(columns.where(*COMPUTE)))  # stamps are in nanoseconds
        if setting.device != "cpu":  # a timeline is by the host's clock, busy by the device's
            assert timelines[-1].measured is not None
            near += 2 * len(ranks) * timelines[-1].measured.clock_error
        # The parts of a pair are apart by a few lines of Python, and what a busy machine does then.
        equal = columns.joined.any() or abs(found - busy) <= near
        assert equal, f"{found} s of {busy} s, within {near} s"


def check_timeline(timeline: schedir.Timeline) -> None:
    """What a measured timeline must hold, whatever the machine does meanwhile."""
    columns, transfers = timeline.schedule.columns, graph_of(timeline.schedule).transfers
    starts, ends = timeline.starts, timeline.ends
    assert timeline.measured is not None
    error = timeline.measured.clock_error
    compute = columns.is_kind(*COMPUTE - {Kind.OPTIM_STEP})  # which a step may leave out
    assert not np.isnan(starts[compute]).any()
    assert not np.isnan(ends[compute]).any()
    assert not np.isnan(starts[transfers.send]).any()
    assert np.nanmin(starts) == 0
    for rank in range(columns.ranks):
        own = np.flatnonzero(compute & (columns.rank == rank) & ~columns.joined)
        assert (starts[own][1:] >= ends[own][:-1]).all()
    partners = np.flatnonzero(compute & columns.joined)
    assert (starts[partners] == starts[partners - 1]).all()
    assert (ends[partners] == ends[partners - 1]).all()
    # What is made, sent and used comes in that order.
    assert (starts[transfers.user] >= ends[transfers.maker] - error).all()
    assert (starts[transfers.send] >= ends[transfers.maker] - error).all()
    seen = ~np.isnan(ends[transfers.receive])
    assert (ends[transfers.receive] <= starts[transfers.user])[seen].all()
    assert np.array_equal(starts[transfers.send], starts[transfers.receive])
    assert np.array_equal(ends[transfers.send], ends[transfers.receive], equal_nan=True)
    # All idle time has its cause, and one chain leads from the beginning to the end.
    for stats, waits in zip(timeline.ranks, timeline.idle, strict=True):
        assert abs(sum(idle.end - idle.start for idle in waits) - stats.idle) < 1e-6
    path = list(timeline.critical_path)
    assert ends[path[-1]] == timeline.makespan
    assert np.all(np.diff(starts[path][~np.isnan(starts[path])]) >= -error)
    before = slice(columns.starts[columns.rank[path[0]]], path[0])
    assert not compute[before].any()  # a rank's first, which waits for nobody


def _assert_near(what: str, found: float, expected: float, near: float = 1e-5) -> None:
    """Of numbers that are summed up on the device, or in another order."""
    assert abs(found - expected) <= near * abs(expected), f"{what} is {found}, not {expected}"


def _assert_equal(stage: int, mine: nn.Module, theirs: nn.Module) -> None:
    other = theirs.state_dict()
    apart = {
        name: float((value - other[name]).abs().max())
        for name, value in mine.state_dict().items()
        if not torch.equal(value, other[name])
    }
    assert not apart, f"stage {stage} differs from plain training by at most {apart}"
