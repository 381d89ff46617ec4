"""Records what every entry of a step takes; rank 0 makes timelines of the records of all ranks.

A `Recorder` is an observer. Each instruction has a row of marks, which are read after the step:

    0F0            BEGAN ─ run ─ ENDED
    1F0            WAITED ─ receives ─ FOUND = BEGAN ─ run ─ ENDED
    0SEND_ACT0     BEGAN ─ run                                     posted then
    0OFFLOAD0      BEGAN ─ run ─ ENDED                             on the CPU; else as a post
    0REDUCE_GRAD   BEGAN ─ run … WAITED ─ sum ─ FOUND              before its OPTIM_STEP

A mark is an event of a GPU, and on the CPU a look at the clock. The timeline is made from them:

    rank 0   0F0 ┊ 0SEND_ACT0                        posted at a
    rank 1   1RECV_ACT0 ┊ waits ────────┐ 1F0        posted at b, waited for from c to d

The transfer starts at max(a, b): over gloo and over NCCL nothing moves before both ends are posted.
It ends at d, if the rank has waited for it. If the data was there already, nobody has seen when it
came, and its end is NaN. Entries that did not run are NaN too, such as an OPTIM_STEP if the caller
steps.

A `Gauge` measures a step's sizes: it observes one step of each input shape. A forward leaves to its
backward the tensors that autograd saves, and the stage's input. An I leaves to its W the tensors
that the nodes of the graph still hold, and the gradients that came to them. Memory that several
tensors share counts once. Weights and the user's tensors do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, Action, Ints, Kind, Schedule, flat
from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.call import Call
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.memory import Saved, plain_parts
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import CLOCK_TAG, Control
from schedir.runtime.processes.groups import Group, Message
from schedir.runtime.program.instruction import Bound, Instruction, Observer
from schedir.runtime.session import Session
from schedir.runtime.stage.split_backward import nodes_below
from schedir.runtime.stage.stage import Cell, Cells, Stage
from schedir.runtime.transports import wait_for
from schedir.simulator import Measured, Sizes, Timeline

now: Callable[[], int] = perf_counter_ns
"""Nanoseconds on the clock of this process; whoever keeps the time of a step reads it here."""

Nanoseconds: TypeAlias = NDArray[np.int64]

BEGAN, ENDED, WAITED, FOUND = range(4)
COLUMNS = 4

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
        rows = cache(partial(self.recorder.rows, ranks=self._plan.local_ranks))
        kept = cache(self._kept)
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


_AT_ONCE = 50_000
"""The most nanoseconds that a wait takes if the data is there already; a longer one had to wait."""


def timeline(
    schedule: Schedule, stamps: Nanoseconds, sizes: Sizes | None, measured: Measured
) -> Timeline:
    """The timeline of a step from the stamps of all places, by one clock; shape [places, 4], 0 for
    no stamp."""
    posted, ended, waits, found = stamps.T
    starts, ends = posted.copy(), ended.copy()
    # The parts of an overlapped pair run one after the other; each gets the time of both.
    for second in np.flatnonzero(schedule.columns.joined & (ends > 0)).tolist():
        first = second - 1
        starts[second], ends[first] = starts[first], ends[second]
    # The entries that had to wait for their input.
    waited = found - waits > _AT_ONCE
    graph = graph_of(schedule)
    transfers = graph.transfers
    send, receive, user = transfers.send, transfers.receive, transfers.user
    known = (posted[send] > 0) & (posted[receive] > 0)
    for side in (send, receive):
        starts[side] = np.where(known, np.maximum(posted[send], posted[receive]), 0)
        ends[side] = np.where(waited[user] & known, found[user], 0)
    # Sums start once all ranks have posted them, and end when the first rank that had to wait,
    # before its OPTIM_STEPs, finds them there.
    for turn in graph.collectives:
        places = np.array(turn)
        seen = found[places[waited[places]]]
        all_there = posted[places].min() > 0
        starts[places] = posted[places].max() if all_there else 0
        ends[places] = seen.min() if all_there and len(seen) else 0
    # Two clocks may differ by more than a transfer takes.
    both = (starts > 0) & (ends > 0)
    starts[both] = np.minimum(starts[both], ends[both])
    begun = starts[starts > 0].min(initial=np.iinfo(np.int64).max)
    from_begin, to_end = (
        np.where(times > 0, 1e-9 * (times - begun), np.nan) for times in (starts, ends)
    )
    return Timeline(schedule, from_begin, to_end, sizes=sizes, unit="s", measured=measured)


@attrs.frozen(eq=False)
class Anchor:
    """A moment on a host's clock, in nanoseconds and within `error`, with the device's mark."""

    at: int
    error: float
    mark: Mark


@attrs.frozen(eq=False)
class Taken:
    """The marks of a call, row after row, None for no mark; the rows of compute start at
    `computes`."""

    marks: Sequence[Mark | None]
    computes: Iterable[int]

    def busy(self) -> float:
        """The seconds in compute; the host waits for the device."""
        total = 0.0
        for row in self.computes:
            began, ended = self.marks[row + BEGAN], self.marks[row + ENDED]
            if began and ended:
                ended.synchronize()
                total += began.elapsed_time(ended)
        return 1e-3 * total


class Recorder:
    """The marks of the instructions that it observes, until they are taken: of all with `traces`,
    otherwise those of compute.

    A row belongs to an action at an index of a rank's list, in any program.
    """

    def __init__(self, accelerator: Accelerator, traces: bool) -> None:
        self._accelerator, self._traces = accelerator, traces
        self._rows: dict[tuple[int, int, Action], int] = {}
        self._computes: list[int] = []
        self._sums: dict[Reduction, int] = {}
        # Never replaced by another list: the wrapped instructions hold it.
        self._marks: list[Mark | None] = []

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        if not (self._traces or instruction.computes):
            return instruction
        row, run, wait = self._row(instruction), instruction.run, instruction.wait
        began, ended, waited, found = range(row, row + COLUMNS)
        marks, mark, posted = self._marks, self._accelerator.mark, self._sums
        receives, sums, listed = instruction.receives, instruction.sums, instruction.listed
        # A GPU copies beside its compute, and nobody sees when a copy ends.
        copies = instruction.action.kind in COPIES and not self._accelerator.queues
        ends = instruction.computes or copies
        # A wait's end is also the begin, which saves a mark; except for a pair's second part, which
        # waits before the first.
        begin = began if listed else found

        def timed_wait() -> None:
            marks[waited] = mark(timed=True)
            wait_for(receives)
            marks[found] = marks[begin] = mark(timed=True)
            if wait is not None:
                wait()  # for the sends that have arrived by then, to free their memory

        def timed_run() -> None:
            if not ends or marks[began] is None:  # else its wait has ended there
                marks[began] = mark(timed=True)
            for reduction in sums:
                posted.pop(reduction, None)
                posted[reduction] = row
            run()
            if ends:
                marks[ended] = mark(timed=True)

        def after_sums() -> None:
            # One after the other, in the order of their posts, to see the end of each: work on the
            # sums, and barriers, take time too.
            for reduction in [reduction for reduction in posted if reduction in sums]:
                at = posted.pop(reduction)
                marks[at + WAITED] = mark(timed=True)
                reduction.wait()
                marks[at + FOUND] = mark(timed=True)
            run()

        return attrs.evolve(
            instruction,
            wait=timed_wait if wait is not None and self._traces else wait,
            run=timed_run if listed else after_sums if sums else run,
        )

    def _row(self, instruction: Instruction) -> int:
        """The start of an instruction's row."""
        key = instruction.rank, instruction.index, instruction.action
        if key not in self._rows:
            self._rows[key] = len(self._marks)
            self._marks += [None] * COLUMNS
            if instruction.action.kind in COMPUTE:
                self._computes.append(self._rows[key])
        return self._rows[key]

    def take(self) -> Taken:
        """Take the marks of the call that is over."""
        taken = Taken([*self._marks], [*self._computes])
        self._marks[:] = [None] * len(self._marks)
        self._accelerator.use_again(filter(None, taken.marks), after=taken)
        return taken

    def rows(self, schedule: Schedule, ranks: Iterable[int]) -> Ints:
        """The starts of the rows of some ranks' actions, in the order of their lists; -1 for an
        action that does nothing here."""
        found = [
            self._rows.get((rank, index, action), -1)
            for rank in ranks
            for index, entry in enumerate(schedule.actions[rank])
            for action in flat([entry])
        ]
        return np.array(found, np.int64)

    def anchor(self) -> Anchor:
        """An anchor at the current time, after the device has finished its queued work."""
        self._accelerator.synchronize()

        def attempt() -> Anchor:
            before = now()
            mark = self._accelerator.mark(timed=True)
            mark.synchronize()
            after = now()
            return Anchor((before + after) // 2, (after - before) / 2, mark)

        return min((attempt() for _ in range(8)), key=attrgetter("error"))

    def read(
        self, calls: Sequence[tuple[Mark, Taken]], first: Anchor, last: Anchor
    ) -> tuple[list[Nanoseconds], float]:
        """The marks of calls between two anchors, each with the mark that it began at, as times on
        the anchors' clock, 0 for none; and by how many nanoseconds they may be wrong.

        A device has its own clock, whose drift is taken to be even. The times of a call count from
        its beginning, because a GPU's times have few digits: it returns a float of 32 bits, so an
        hour is rounded by an eighth of a millisecond.
        """
        begins = [first.mark, *(begun for begun, _ in calls), last.mark]
        gaps = [one.elapsed_time(other) for one, other in pairwise(begins)]
        *after, whole = accumulate(gaps)
        pace = (last.at - first.at) / whole if whole else 0.0
        found = []
        for began, (begun, taken) in zip(after, calls, strict=True):
            marks = [began + begun.elapsed_time(mark) if mark else -1 for mark in taken.marks]
            times = np.array(marks, np.float64)
            at = first.at + np.rint(pace * times).astype(np.int64)
            found.append(np.where(times < 0, 0, at))
        lost = 1e6 * float(np.spacing(np.array(gaps, np.float32)).sum()) / 2
        return found, max(first.error, last.error) + self._accelerator.queues * lost


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
    return Reading(now())  # by which all go


def _ask(group: Group, number: int) -> Sequence[int]:
    """One round with another process, which answers."""
    # Posted before it can come, and so found at once.
    answered = group.expect(2, number, CLOCK_TAG, _ANSWER)
    asked = now()
    question = _tell(group, number, 0)
    stamps = answered.wait()
    heard = now()
    question.wait()
    return asked, *stamps.tolist(), heard


def _answer(group: Group, number: int) -> None:
    """Tell another process in each round what one's own clock shows."""
    question = group.expect(1, number, CLOCK_TAG, _ANSWER)
    for left in reversed(range(_ROUNDS)):
        question.wait()
        arrived = now()
        if left:
            question = group.expect(1, number, CLOCK_TAG, _ANSWER)
        _tell(group, number, arrived, now()).wait()


def _tell(group: Group, number: int, *stamps: int) -> Message:
    content = torch.tensor(stamps, dtype=torch.int64, device="cpu")
    return group.tell(content, number, CLOCK_TAG, "its clock")
