"""Whatever two streams share is ordered by events: what no GPU shows but once in a while.

Executors of all ranks run on a device that keeps vector clocks in place of streams; see
`tests/runtime/streams`. What is trained is plain training, as elsewhere; here only order counts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import schedir
from schedir import Action, Kind, Schedule
from schedir.ir import flat
from schedir.passes import offload, strip_communication
from schedir.runtime import Executor, transports
from schedir.runtime.program import compiler, compute
from schedir.runtime.program.compute import Pair
from schedir.runtime.transports import End
from tests.built_in import NAMES, SYNCHRONOUS, variants
from tests.literals import listed
from tests.runtime import aliasing
from tests.runtime.features import round_robin
from tests.runtime.kit import MSE, adamw, linear_stages, numbered
from tests.runtime.lists import ROUNDS, STALE_REPLICAS, bidirectional_v, megatron
from tests.runtime.streams.clocks import CALLER, Clock, FakeDevice, Stream
from tests.runtime.streams.communicators import Posted
from tests.runtime.streams.memory import Race
from tests.runtime.streams.sanitizer import Sanitizer
from tests.runtime.streams.watched import watching
from tests.runtime.test_offload_runs import one_thread  # noqa: F401
from tests.sweeps import examples, sweep

BOTH = pytest.mark.parametrize("communicators", [False, True], ids=["copies", "communicators"])
QUIET: dict[str, Any] = {"nonfinite": "ignore"}  # else the host waits, and orders what should be
TIE = [[(0, "0.weight"), (1, "0.weight")]]


def split(schedule: Schedule, kept: int = 1) -> Schedule:
    """Each B as an I and a W, of which a rank keeps so many back: where they come last, no transfer
    tells other ranks that its gradients are there."""
    lists = []
    for entries in strip_communication(schedule).actions:
        actions = list(flat(entries))
        steps = [a for a in actions if a.kind is Kind.OPTIM_STEP]
        weights: list[Action] = []
        listed: list[Action] = []
        for action in actions:
            if action.kind is Kind.BACKWARD:
                assert action.microbatch is not None
                listed.append(schedir.backward_input(action.stage, action.microbatch))
                weights.append(schedir.backward_weight(action.stage, action.microbatch))
            elif action.kind is not Kind.OPTIM_STEP:
                listed.append(action)
                if len(weights) > kept:
                    listed.append(weights.pop(0))
        lists.append([*listed, *weights, *steps])
    compute = Schedule(f"split {schedule.name}", schedule.microbatches, schedule.placement, lists)
    return schedir.insert_communication(compute)


def away(schedule: Schedule) -> Schedule:
    """With what every microbatch has saved on the host in between."""
    moved = offload(schedule, range(schedule.stages))
    assert moved != schedule
    return attrs.evolve(moved, name=f"away {schedule.name}")


AWAY = listed(
    4,
    "0",
    "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0B0 0RELOAD1 0OFFLOAD2 0F3 0B1 0RELOAD2 0B3 0B2 "
    "0OPTIM_STEP",
)


def normed(times: int) -> nn.Sequential:
    """A layer that is called so often; twice, an I adds its gradient."""
    return nn.Sequential(*[nn.Linear(4, 4)] * times, nn.BatchNorm1d(4), nn.Tanh())


@attrs.frozen
class Run:
    """Three steps, and two evaluations, of all ranks on one device: the first of each learns."""

    schedule: Schedule
    communicators: bool
    options: Mapping[str, Any] = attrs.field(factory=dict)
    evaluates: bool = True

    def on(self, device: FakeDevice) -> list[Race]:
        """What its streams race for."""
        microbatches = self.schedule.microbatches
        with watching(device, self.communicators):
            torch.manual_seed(5)
            stages = [normed(1 + s % 2) for s in range(self.schedule.stages)]
            if "ties" in self.options:
                stages[1].get_submodule("0").load_state_dict(stages[0][0].state_dict())
            options: dict[str, Any] = {"in_process": True, **QUIET, **self.options}
            with Executor(self.schedule, numbered(stages), MSE, adamw, **options) as executor:
                for _ in range(3):
                    x, y = torch.randn(2, 3 * microbatches, 4)
                    result = executor.step(x, target=y, outputs=True)
                    x.zero_(), y.zero_()
                    for output in result.outputs or ():
                        output.zero_()
                    with torch.no_grad():  # as a user may, between two steps
                        torch._foreach_mul_([p for m in stages for p in m.parameters()], 0.9)
                        torch._foreach_zero_([b for m in stages for b in m.buffers()])
                    assert result.loss >= 0
                for _ in range(2 * self.evaluates):
                    x, y = torch.randn(2, 3 * microbatches, 4)
                    assert executor.evaluate(x, target=y).loss >= 0
        return device.races


def built(name: Any, ranks: int, microbatches: int, **parameters: Any) -> Schedule:
    return schedir.build(name, ranks=ranks, microbatches=microbatches, **parameters)


def raced_by(
    device: FakeDevice, schedule: Schedule, stages: Any, *shape: int, communicators: bool = False
) -> FakeDevice:
    """The device, after two steps of these stages on batches of a shape."""
    with (
        watching(device, communicators),
        Executor(schedule, numbered(stages), MSE, adamw, in_process=True, **QUIET) as executor,
    ):
        x, y = torch.randn(2, *shape)
        for _ in range(2):
            executor.step(x, target=y)
    return device


def shown(races: Sequence[Race]) -> str:
    return "\n".join(map(str, races))


def tokens(races: Sequence[Race]) -> set[tuple[str, ...]]:
    """What was carried out at either of the accesses, without its place."""
    place = re.compile(r"(what comes )?(before )?rank \d+ #\d+ ")
    return {tuple(place.sub(r"\2", action) for action in race.actions) for race in races}


def cases() -> Iterator[tuple[Schedule, dict[str, Any]]]:
    for name in NAMES:
        first, last = variants(name)[0], variants(name)[-1]
        for parameters in variants(name):
            yield built(name, 2, 3, **parameters), {}
        yield built(name, 3, 4, **last), {"recompute": True}
        yield built(name, 4, 5, **last), {}
        if name in SYNCHRONOUS:
            yield built(name, 2, 3, **first), {"clip_grad_norm": 0.1}
            yield built(name, 4, 5, **first), {"clip_grad_norm": 0.1, "recompute": [1]}
            yield split(built(name, 2, 4)), {}
    for joined in (megatron(2, 4), megatron(4, 5), bidirectional_v(2, 4)):
        yield joined, {}
    both = {"ties": TIE, "clip_grad_norm": 0.1}
    for schedule in (built(round_robin, 3, 5), built("dualpipe", 2, 4)):
        yield schedule, {}
        yield schedule, both
        yield schedule, {"nonfinite": "skip"}
        yield schedule, {**both, "nonfinite": "skip"}
    for name in NAMES:
        for rule in ("raise", "skip")[: 1 + (name in SYNCHRONOUS)]:
            yield built(name, 2, 3), {"nonfinite": rule}
    yield STALE_REPLICAS, {}
    yield ROUNDS, {}
    for options in ({"clip_grad_norm": 0.1}, {"ties": TIE}):
        yield split(built("1f1b", 2, 3), kept=3), options
    for name in ("1f1b", "zb-h1", "dualpipev"):
        yield away(built(name, 2, 4)), {}
    yield away(megatron(2, 4)), {}
    yield away(bidirectional_v(2, 4)), {}
    for ranks in (2, 3):
        yield built("1f1b", ranks, 4), {"ties": TIE}
        yield built("1f1b", ranks, 4), both


def is_quick(case: tuple[Schedule, dict[str, Any]]) -> bool:
    """Of two ranks: each built-in one once, and once each with what else there is."""
    schedule, options = case
    names = {(): NAMES, ("clip_grad_norm",): ["1f1b"], ("nonfinite",): ["interleaved-1f1b"]}
    other = not schedule.name.startswith(("split", *NAMES))
    return schedule.ranks == 2 and (other or schedule.name in names.get((*options,), ()))


@BOTH
@sweep(
    "schedule, options",
    list(cases()),
    quick=is_quick,
    ids=lambda v: f"{v.name}-{v.ranks}" if isinstance(v, Schedule) else "+".join(v) or "plain",
)
def test_no_stream_races_with_another(
    schedule: Schedule, options: dict[str, Any], communicators: bool
) -> None:
    device = FakeDevice()
    races = Run(schedule, communicators, options).on(device)
    assert not races, shown(races)
    assert len(device.waits) > 2 * schedule.ranks


@BOTH
@examples(25)
@given(seed=st.integers(0, 1 << 32))
def test_no_stream_races_for_memory_that_tensors_share(seed: int, communicators: bool) -> None:
    races = raced(seed, communicators)
    assert not races, shown(races)


def raced(seed: int, communicators: bool) -> list[Race]:
    """What a random schedule of stages whose tensors share memory races for."""
    chance = random.Random(seed)
    schedule = aliasing.draw_schedule(chance, chance.randint(2, 3))
    stages = aliasing.draw_stages(chance, schedule.stages)
    stages[0] = aliasing.First(stages[0])
    recompute = [s for s in range(schedule.stages) if chance.random() < 0.3]
    inputs, target = aliasing.draw_batch(chance, schedule.microbatches)
    device = FakeDevice()
    given: dict[str, Any] = {"in_process": True, "recompute": recompute}
    with (
        watching(device, communicators),
        Executor(schedule, numbered(stages), aliasing.loss_fn, **given) as executor,
    ):
        try:
            for _ in range(3):
                executor.step(inputs, target=target)
        except schedir.ExecutionError:
            return []  # a stage does what is refused
    return device.races


@sweep("communicators", [False, True], quick=[True], ids=["copies", "communicators"])
@sweep("options", [{}, {"clip_grad_norm": 0.1}, {"ties": TIE}], quick=[{}], ids=str)
def test_without_any_one_of_the_waits_there_is_a_race(
    options: dict[str, Any], communicators: bool
) -> None:
    """But for those that say nothing new, as the stream is behind all that already, and one that
    is said again: rank 1 begins with what rank 0 sends, so it need not be told of the caller's. Nor
    need what is received first: that is behind the caller, who is behind all of the step before."""
    first = {("rank 1 #0 1RECV_ACT0", 5), ("rank 1 #4 1SEND_GRAD0", 4)} if communicators else set()
    assert missed(built("1f1b", 2, 2), communicators, options) == {(CALLER, 2), *first}


def test_without_any_one_of_the_waits_of_copies_there_is_a_race() -> None:
    assert not missed(AWAY, False, {})


def missed(schedule: Schedule, communicators: bool, options: dict[str, Any]) -> set[Any]:
    """The waits that say something new, but without which there is no race."""
    run = Run(schedule, communicators, options, evaluates=False)
    whole = FakeDevice()
    assert not run.on(whole)
    waits = set(range(len(whole.waits))) - whole.needless
    assert len(waits) > 10
    return {whole.waits[n] for n in waits if not run.on(FakeDevice(left_out=n))}


# What a checker must find: each is broken here, and mended above.


@BOTH
@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.1}, {"ties": TIE}], ids=str)
def test_a_meeting_that_waits_for_nobody_is_found(
    options: dict[str, Any], communicators: bool
) -> None:
    """Ranks that meet before their steps touch what the others have made, and change it."""

    class Deaf(FakeDevice):
        def wait_for(self, clock: Clock) -> None:
            if "what comes before" not in self.doing:
                super().wait_for(clock)

    races = Run(built("1f1b", 2, 3), communicators, options).on(Deaf())
    assert ("before 0OPTIM_STEP", "1OPTIM_STEP") in tokens(races)


def test_gradients_that_share_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is on its way must not be added to by the next microbatch, where it is not a
    copy that goes."""
    monkeypatch.setattr(compiler, "FromBuffers", lambda transport, pool: transport)
    monkeypatch.setattr(transports.Pool, "empty", torch.empty_strided)
    for module in ("stage.weights", "stage.split_backward"):
        monkeypatch.setattr(f"schedir.runtime.{module}.keep_apart", lambda *_: None)
    stages = [aliasing.Positions() for _ in range(2)]
    device = raced_by(FakeDevice(), built("1f1b", 2, 3), stages, 6, 3, 4, communicators=True)
    assert ("1SEND_GRAD0", "1B1") in tokens(device.races)


def test_a_buffer_that_is_used_again_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_users", lambda _: transports._NOBODY)
    races = Run(built("1f1b", 2, 3), communicators=True).on(FakeDevice())
    assert ("1RECV_ACT1", "1F0") in tokens(races)


@BOTH
def test_a_send_that_nobody_waits_for_is_found(
    communicators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = Posted if communicators else End
    monkeypatch.setattr(posted, "wait", lambda self: True)
    races = Run(built("1f1b", 2, 3), communicators).on(FakeDevice())
    assert (("1RECV_ACT0", "1F0") if communicators else ("1SEND_GRAD0", "0B0")) in tokens(races)


@BOTH
@pytest.mark.parametrize("missing", ["_part", "_meet"])
def test_a_pair_that_does_not_part_or_meet_is_found(
    missing: str, communicators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, missing, lambda _: None)
    assert Run(bidirectional_v(2, 4), communicators).on(FakeDevice())


@pytest.mark.parametrize("holds", [True, False])
def test_memory_that_a_pair_gives_back_is_not_given_again_within_it(
    holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1F0's input, say: 0F0 has made it on the rank's own stream, to which 0F2 goes on, and 1B0
    gives it back on the other one."""
    if not holds:
        monkeypatch.setattr(compute, "_shared", lambda _: None)
    pairs = "0F0 0F1 1F1 1B1 0R1 (1F0;0B1) (1B0;0F2) 0R0 0B0 1F2 1B2 0R2 0B2"
    schedule = listed(3, "0 0", f"{pairs} 0OPTIM_STEP 1OPTIM_STEP")
    device = raced_by(FakeDevice(), schedule, linear_stages(), 6, 4)
    assert any(race.freed for race in device.races) is not holds


class Touches(nn.Linear):
    """Its forward and its backward write to one memory: what both of a pair touch is raced for."""

    touched = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        if made.requires_grad:
            self.touched.add_(1)
            made.register_hook(lambda _: self.touched.add_(1) and None)
        return made


def test_the_two_of_a_pair_do_not_wait_for_each_other() -> None:
    schedule = bidirectional_v(2, 4)
    stages = [Touches(4, 4) if s in (0, 3) else nn.Linear(4, 4) for s in range(4)]
    device = raced_by(FakeDevice(), schedule, stages, 8, 4)
    entries = [e for e in schedule.actions[0] if isinstance(e, schedir.Together)]
    pairs = {tuple(map(str, e.actions)) for e in entries if e.actions[0].kind is Kind.FORWARD}
    assert pairs
    assert tokens(device.races) == pairs


def test_calls_that_train_and_others_share_their_streams() -> None:
    """A matrix product keeps a workspace for each stream."""
    device = FakeDevice()
    assert not Run(built("1f1b", 2, 2), communicators=False).on(device)
    assert len(device._streams) == 1 + 2  # the caller's, and one of each rank


def test_replicas_of_a_stage_add_on_one_stream_that_no_rank_computes_on() -> None:
    """Else the first forward's rank would have those of all others wait, and torch would warn."""
    added: set[tuple[int, int]] = set()

    class Noting(FakeDevice):
        def adding(self, accumulator: Stream | None, reads: Any) -> Any:
            if accumulator is not None:
                added.add((self.current.number, accumulator.number))
            return super().adding(accumulator, reads)

    assert not Run(built(round_robin, 3, 6), communicators=False).on(Noting())
    # Stage 0 has a stream of its own, 1; those of the ranks are 2, 3, 4, and stage 1 is of rank 2.
    assert added == {(2, 1), (3, 1), (4, 4)}


def test_a_forward_does_not_wait_for_what_its_partner_adds_to_gradients() -> None:
    """The accumulators of stage 1 would be made by 1F0, on the side stream, where 0F3 runs next."""
    pairs = "0F0 0F1 0F2 1F1 1B1 (1F0;0B1) 1F2 (1B2;0F3) 1B0 0B0 0B2 1F3 1B3 0B3"
    schedule = listed(4, "0 0", f"{pairs} 0OPTIM_STEP 1OPTIM_STEP")
    device = raced_by(FakeDevice(), schedule, [Touches(4, 4) for _ in range(2)], 8, 4)
    assert tokens(device.races) == {("1F0", "0B1"), ("1B2", "0F3")}


def test_memory_that_another_stream_still_uses_is_not_given_again() -> None:
    for told in (False, True):
        device = FakeDevice()
        with Sanitizer(device):
            other = device.stream()
            made = torch.ones(3)
            ready = device.mark()
            with device.on(other):
                ready.wait()
                copy = made + 1
                done = device.mark()
                if told:
                    device.used(made)
            del made
            after = torch.ones(3)
            assert bool(device.races) is not told
            done.wait()
            assert len(copy + after) == 3
        assert len(device.races) == (not told)


def test_parts_of_one_memory_are_apart() -> None:
    device = FakeDevice()
    with Sanitizer(device):
        whole = torch.zeros(2, 3)
        ready = device.mark()
        with device.on(device.stream()):
            ready.wait()
            whole[1].add_(1)
        whole[0].add_(1)
        assert not device.races
        whole.add_(1)
    assert [str(race) for race in device.races] == [
        "the caller (aten::add_.Tensor) writes what the caller (aten::add_.Tensor) has written, "
        "and does not wait for that"
    ]
