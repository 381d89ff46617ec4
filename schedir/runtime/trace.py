"""Records the steps of a process; rank 0 makes timelines from the records of all ranks.

A `Gauge` measures a step's sizes: it observes one step of each input shape. A forward leaves to its
backward the tensors that autograd saves, and the stage's input. An I leaves to its W the tensors
that the nodes of the graph still hold, and the gradients that came to them. Memory that several
tensors share counts once. Weights and the user's tensors do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from schedir.ir import Ints, Kind, Schedule
from schedir.runtime import recorder
from schedir.runtime.accelerator import Mark
from schedir.runtime.call import Call
from schedir.runtime.memory import Saved, plain_parts
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import CLOCK_TAG, Control
from schedir.runtime.processes.groups import Group, Message
from schedir.runtime.program.instruction import Bound, Instruction, Observer
from schedir.runtime.recorder import COLUMNS, Anchor, Nanoseconds, Recorder, Taken, timeline
from schedir.runtime.session import Session
from schedir.runtime.stage.split_backward import nodes_below
from schedir.runtime.stage.stage import Cell, Cells, Stage
from schedir.simulator import Measured, Sizes, Timeline

_FEWEST_STEPS = 8
"""The steps that are kept at least, however many actions they have."""

_MOST_SHAPES = 64
_WEIGHED = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.OPTIM_STEP
_MEASURED = "boundary", "input", "activation", "deferred", "gradient", "early_gradient"


@attrs.frozen(eq=False)
class _Step:
    """A recorded step: its number, the list that has run, its sizes, and its marks with that of its
    beginning; `updates` if its OPTIM_STEPs have run."""

    number: int
    schedule: Schedule
    gauge: Gauge
    updates: bool
    marks: tuple[Mark, Taken]


@attrs.frozen(eq=False)
class _Report:
    """The record of a process, for rank 0.

    For each step it has the stamps of its ranks' places, by rank 0's clock within `error`
    nanoseconds, and the bytes that its stages keep, as fields of `Sizes` by stage.
    """

    error: float
    stamps: Sequence[Nanoseconds]
    sizes: Sequence[Mapping[str, Mapping[int, int]] | None]


class Trace:
    """The steps of this process's ranks, until rank 0 asks for their timelines.

    Its `recorder` observes all instructions of the lists that train. It keeps the latest steps, of
    at most `most` actions over all ranks. All ranks of a pipeline make one together.
    """

    def __init__(self, plan: Plan, session: Session, stages: Mapping[int, Stage]) -> None:
        self._plan, self._control, self._stages = plan, session.control, stages
        self._spans_hosts = session.spans_hosts
        self.recorder = Recorder(plan.accelerator, traces=True)
        self.most = 1 << (15 if plan.accelerator.queues else 18)  # an event takes more memory
        self._gauges: dict[int, Gauge] = {}
        self._gauge = Gauge()
        self._measures = False
        self._steps: deque[_Step] = deque()
        self._actions = 0  # of these
        self._clocks = self._read_clocks()

    def observers(self, signature: int, first: bool) -> Iterable[Observer]:
        """The observers of a call with another input signature than the one before. The first call
        of a signature holds copies that later ones do not, so the second call is measured."""
        self._gauge = self._gauges.setdefault(signature, Gauge())
        self._measures = not first
        if len(self._gauges) > _MOST_SHAPES:
            del self._gauges[next(iter(self._gauges))]
        return () if first or self._gauge.finished else (self._gauge,)

    def keep(self, call: Call, schedule: Schedule, began: Mark, taken: Taken, cells: Cells) -> None:
        """Keep a step that began at a mark."""
        if self._measures and not self._gauge.finished:
            self._gauge.finish(self._stages, cells)
        updates = call.updates
        self._steps.append(_Step(call.step, schedule, self._gauge, updates, (began, taken)))
        self._actions += len(schedule.columns)
        while self._actions > self.most and len(self._steps) > _FEWEST_STEPS:
            self._actions -= len(self._steps.popleft().schedule.columns)

    def timelines(self) -> list[Timeline]:
        """The timelines of the steps since the last call, on rank 0; none on other ranks. All ranks
        call it, after the device has finished all steps."""
        steps = list(self._steps)
        report = self._report(steps)
        self._steps.clear()
        self._actions = 0
        reports = self._control.collect(report, numbers=self._control.pipeline)
        if reports is None:
            return []
        # Of any two ranks.
        error = 1e-9 * sum(sorted(report.error for report in reports)[-2:])
        return [
            timeline(
                step.schedule,
                np.concatenate([report.stamps[number] for report in reports]),
                _sizes([report.sizes[number] for report in reports], step.schedule.stages),
                Measured(step.number, error),
            )
            for number, step in enumerate(steps)
        ]

    def _report(self, steps: Sequence[_Step]) -> _Report:
        begin, self._clocks = self._clocks, self._read_clocks()
        taken, error = self.recorder.read([step.marks for step in steps], begin, self._clocks)
        rows, kept = cache(self._rows), cache(self._kept)
        stamps = [
            self._placed(step, rows(step.schedule), times)
            for step, times in zip(steps, taken, strict=True)
        ]
        return _Report(error, stamps, [kept(step.gauge) for step in steps])

    def _read_clocks(self) -> Anchor:
        """An anchor by rank 0's clock, which all processes of one host have."""
        if not self._spans_hosts:
            return self.recorder.anchor()
        reading = read_clocks(self._control)
        return by_rank_0(reading, self.recorder.anchor())

    def _rows(self, schedule: Schedule) -> Ints:
        """The starts of the rows of the places of the ranks here; see `Recorder.of_list`."""
        return np.concatenate(
            [self.recorder.of_list(schedule, rank) for rank in self._plan.local_ranks]
        )

    def _placed(self, step: _Step, rows: Ints, times: Nanoseconds) -> Nanoseconds:
        """The stamps of the places of the ranks here, whose rows start at `rows`; shape
        [places, 4], 0 for none."""
        stamps: Nanoseconds = times[rows[:, None] + np.arange(COLUMNS)]
        stamps[rows < 0] = 0
        if self._plan.updates and not step.updates:
            columns = step.schedule.columns
            left_out = columns.is_kind(Kind.OPTIM_STEP, Kind.REDUCE_GRAD)
            here = np.isin(columns.rank, self._plan.local_ranks)
            stamps[left_out[here]] = 0
        return stamps

    def _kept(self, gauge: Gauge) -> dict[str, dict[int, int]] | None:
        """The bytes that the stages here keep; None if no call was measured yet."""
        if not gauge.finished:
            return None
        kept = gauge.kept | {"weight": {}, "optimizer": {}, "gradient": {}, "shard_ways": {}}
        for index, stage in self._stages.items():
            ways = 1 if stage.sharded is None else stage.sharded.ways
            state = [] if stage.optimizer is None else [*stage.optimizer.state.values()]
            kept["shard_ways"][index] = ways  # of a sharded stage a part is here
            kept["weight"][index] = ways * _size(_held(stage.modules))
            kept["optimizer"][index] = ways * _size(tree_leaves(state))
            kept["gradient"][index] = ways * gauge.kept["gradient"][index]
        return kept


def _sizes(found: Sequence[Mapping[str, Mapping[int, int]] | None], stages: int) -> Sizes | None:
    """The sizes of all stages, with the largest of a stage's replicas; None if some are unknown."""
    known = [sizes for sizes in found if sizes is not None]
    if len(known) < len(found):
        return None

    def of(name: str, stage: int) -> int:
        return max(sizes[name].get(stage, 0) for sizes in known)

    by_stage: dict[str, Any] = {
        name: tuple(of(name, stage) for stage in range(stages)) for name in known[0]
    }
    # All of an activation, where no I of a stage was seen.
    seen = {stage for sizes in known for stage in sizes["deferred"]}
    whole = zip(by_stage["deferred"], by_stage["activation"], strict=True)
    deferred = tuple(kept if s in seen else every for s, (kept, every) in enumerate(whole))
    by_stage["deferred"] = deferred if seen else None
    by_stage["shard_ways"] = max(by_stage["shard_ways"], default=1)
    # There is a boundary after each stage but the last.
    return Sizes(**by_stage | {"boundary": by_stage["boundary"][:-1] or 0})


class Gauge:
    """Measures the bytes that the stages here keep, by stage, during a call.

    `kept` has fields of `Sizes`, for one microbatch: `boundary` is what it sends to the next stage,
    `input` what it needs to be run again, `activation` all that its forward leaves to its backward,
    with its input, and `deferred` what remains of that between I and W. `gradient` is what is
    accumulated before an OPTIM_STEP, or at the end of the call, `early_gradient` what no W adds of
    it.
    """

    def __init__(self) -> None:
        self.kept: dict[str, dict[int, int]] = {name: {} for name in _MEASURED}
        self.finished = False
        self._seen: set[tuple[int, Kind]] = set()
        self._late: dict[int, int] = {}  # the bytes of the parameters that Ws add gradients of

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        kind, run, cell = instruction.action.kind, instruction.run, instruction.cell
        stage = instruction.stage
        if stage is None or not (instruction.listed and kind in _WEIGHED):
            return instruction

        def weighed() -> None:
            # Of each stage the first is measured: no later microbatch has more rows.
            if (stage.index, kind) in self._seen:
                run()
                return
            self._seen.add((stage.index, kind))
            if cell is None:
                self._gradients_of(stage)
                run()
            elif kind is Kind.BACKWARD_INPUT:
                self._split(stage, cell, run)
            else:
                self._forward(stage, cell, run)

        return attrs.evolve(instruction, run=weighed)

    def _forward(self, stage: Stage, cell: Cell, run: Bound) -> None:
        """Run a forward, or a recomputation."""
        inputs, saved = cell.leaves, Saved()
        with saved.hooks():
            run()
        if cell.saved is not None:  # by hooks within these, which saw nothing
            saved = cell.saved
        here = [tensor for _, tensor in saved.here()]
        self._note("input", stage.index, _size(inputs))
        self._note("activation", stage.index, _left(stage, cell, [*inputs, *here]))

    def _split(self, stage: Stage, cell: Cell, run: Bound) -> None:
        """Run an I."""
        roots = [
            root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node
            for root in cell.outputs
            if root is not None and (isinstance(root, GradientEdge) or root.requires_grad)
        ]
        run()
        part = cell.weight_part
        assert part is not None  # the I has left it
        late = (cast(Any, node).variable for node in part.accumulators())
        self._late[stage.index] = _size(late)
        self._note(
            "deferred", stage.index, _left(stage, cell, [*part.kept(), *_still_saved(roots)])
        )

    def _gradients_of(self, stage: Stage) -> None:
        grads = (p.grad for p in stage.weights.newest)
        self.kept["gradient"].setdefault(stage.index, _size(grads))

    def _note(self, name: str, stage: int, size: int) -> None:
        """Keep the largest measurement."""
        kept = self.kept[name]
        kept[stage] = max(kept.get(stage, 0), size)

    def finish(self, stages: Mapping[int, Stage], cells: Cells) -> None:
        """Finish the measurement at the end of the call."""
        self.finished = True
        for stage in stages.values():
            self._gradients_of(stage)
        for index, late in self._late.items():
            self._note("early_gradient", index, max(0, self.kept["gradient"][index] - late))
        for cell in cells.values():
            self._note("boundary", cell.stage, cell.learned.after.nbytes)


def _left(stage: Stage, cell: Cell, tensors: Iterable[Any]) -> int:
    """The bytes of tensors, without the memory of the weights and of the user's tensors."""
    beside = (cell.batch, cell.extra, cell.target, cell.loss_keywords)
    memory, others = _memory(tensors), _memory([*_held(stage.modules), *tree_leaves(beside)])
    return sum(memory[at] for at in memory.keys() - others)


def _still_saved(roots: Iterable[Node]) -> Iterator[Tensor]:
    """The tensors that the nodes of a graph have saved, and not freed."""
    for node in nodes_below(roots):
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                with suppress(RuntimeError):  # it is freed already
                    found = getattr(node, name)
                    yield from found if isinstance(found, tuple) else (found,)


def _held(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _memory(values: Iterable[Any]) -> dict[int, int]:
    """The memory of the tensors among these values: the bytes of each storage, once."""
    tensors = (value for value in values if isinstance(value, Tensor))
    parts = (part for tensor in tensors for part in plain_parts(tensor.detach()))
    storages = (part.untyped_storage() for part in parts)
    return {storage._cdata: storage.nbytes() for storage in storages}


def _size(values: Iterable[Any]) -> int:
    return sum(_memory(values).values())


# The offset between the clocks of two processes:
#
#     process 0              ┌─▶ arrived ─ left ─┐            by its clock all go
#     process 1     asked ───┘                   └──▶ heard    has one of its own
#
# A message arrives after it is sent. So 0's clock is ahead of 1's by at most arrived − asked, and
# by at least left − heard. Each round gives such an interval, and the offset lies in all of them:
# the quickest message of each direction bounds their intersection (Cristian, Probabilistic clock
# synchronization, 1989; NTP's four stamps, RFC 5905, section 8). Two readings some time apart give
# the drift.

_ROUNDS = 32
_ANSWER = "the clock of"  # what a wait is for, in words
_FASTEST_DRIFT = 1000e-6  # of two clocks: an operating system corrects each by half of it at most


@attrs.frozen
class Reading:
    """The `offset` by which process 0's clock was ahead when this clock showed `at`, within
    `error`; all in nanoseconds."""

    at: int
    offset: float = 0.0
    error: float = 0.0


def reading_of(rounds: Sequence[Sequence[int]]) -> Reading:
    """The reading of several rounds, at the time of the quickest; each has the nanoseconds when it
    was asked, arrived, left and was heard."""
    asked, arrived, left, heard = np.array(rounds).T
    best = np.argmin((heard - asked) - (left - arrived))
    at = int(asked[best] + heard[best]) // 2
    most = (arrived - asked + _FASTEST_DRIFT * abs(asked - at)).min()
    least = (left - heard - _FASTEST_DRIFT * abs(heard - at)).max()
    return Reading(at, (most + least) / 2, abs(most - least) / 2)


def by_rank_0(reading: Reading, anchor: Anchor) -> Anchor:
    """An anchor as rank 0's clock would have shown it, by a reading made just before."""
    drift = _FASTEST_DRIFT * abs(anchor.at - reading.at)
    error = anchor.error + reading.error + drift
    return Anchor(anchor.at + round(reading.offset), error, anchor.mark)


def read_clocks(control: Control) -> Reading:
    """This process's clock beside that of its pipeline's rank 0; all its ranks call it."""
    first, *others = control.pipeline
    if control.own != first:
        return reading_of([_ask(control.group, first) for _ in range(_ROUNDS)])
    for number in others:
        _answer(control.group, number)
    return Reading(recorder.now())  # by which all go


def _ask(group: Group, number: int) -> Sequence[int]:
    """One round with another process, which answers."""
    # Posted before it can come, and so found at once.
    answered = group.expect(2, number, CLOCK_TAG, _ANSWER)
    asked = recorder.now()
    question = _tell(group, number, 0)
    stamps = answered.wait()
    heard = recorder.now()
    question.wait()
    return asked, *stamps.tolist(), heard


def _answer(group: Group, number: int) -> None:
    """Tell another process in each round what one's own clock shows."""
    question = group.expect(1, number, CLOCK_TAG, _ANSWER)
    for left in reversed(range(_ROUNDS)):
        question.wait()
        arrived = recorder.now()
        if left:
            question = group.expect(1, number, CLOCK_TAG, _ANSWER)
        _tell(group, number, arrived, recorder.now()).wait()


def _tell(group: Group, number: int, *stamps: int) -> Message:
    content = torch.tensor(stamps, dtype=torch.int64, device="cpu")
    return group.tell(content, number, CLOCK_TAG, "its clock")
