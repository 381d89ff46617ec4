"""A stream of batches, cut into segments; a segment is one call that keeps the pipeline full.

    batches    0 1 2 3 4 5 6 7 │ 8 9 …            of 8 microbatches
    segment    one call of 64  │ the next one     versions from 0, drained at its end
    results     0 1 2 … 7      │

The batches of a segment are drawn before it begins. Then all processes tell each other how many
they have, so that none begins a segment which another can't run. For each length of segments a list
is built, proved and compared once; its engine and its connections are kept. All of them share the
executor's session.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import attrs

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime.call import RUN, StepResult
from schedir.runtime.engine import Engine
from schedir.runtime.feeding import CallArguments, Feed, check_batches, name_of_extra
from schedir.runtime.plan import Plan, plan_of, proved, stages_of
from schedir.runtime.processes.failure import describe
from schedir.runtime.program.handshake import differ, fingerprint

logger = logging.getLogger("schedir")

Build: TypeAlias = Callable[[int], Schedule]
"""Makes the list of a segment, from its number of microbatches."""


@attrs.frozen
class _Said:
    """What a process tells the others before each segment.

    `given` counts the results that it has handed out, and `drawn` the batches that it has drawn;
    `prints` are their fingerprints, if it reads them. Or it has `left` the loop, or has `ended`
    it, for that reason in words.
    """

    given: int
    drawn: int = 0
    prints: Sequence[tuple[int, int]] = ()
    left: bool = False
    ended: str = ""


class Segments:
    """The streams of an executor. Its `engine` has the plan of one batch; a segment has another
    engine, for the same list with more microbatches."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine, self._plan = engine, plan
        self.engines: dict[int, Engine] = {}  # by their microbatches
        self._stream: ReferenceType[Generator[StepResult, None, None]] | None = None
        self._reads = not {0, plan.last_stage}.isdisjoint(plan.local_stages)

    def run(
        self, batches: Iterable[Any], schedule: Build | None, segment: int
    ) -> Iterator[StepResult]:
        """Begin a stream; see `Executor.run`. Raises ExecutionError for wrong arguments, at
        once."""
        plan, size = self._plan, self._plan.schedule.microbatches
        self._engine.session.check_usable()
        self._engine.check_frozen()
        if not plan.updates:
            raise ExecutionError(
                "run steps while the pipeline is full, so it needs an optimizer: make the executor "
                "with optimizer="
            )
        if type(segment) is not int or segment < size or segment % size:
            raise ExecutionError(
                f"segment must be a multiple of the {size} microbatches of a batch, not {segment!r}"
            )
        if not isinstance(batches, Iterable):
            raise ExecutionError(
                "batches must be an iterable of pairs (inputs, target), or of dicts of step's "
                f"arguments, not {type(batches).__name__}"
            )
        build = schedule or self._rebuild()
        self._made(2 * size, build)  # refuses a list that drains between two batches
        stream = self._results(iter(batches), build, segment // size)
        self._stream = ref(stream)
        return stream

    def _rebuild(self) -> Build:
        """The function that makes the executor's list. Raises ExecutionError if it is unknown."""
        own, ties = self._plan.arguments.schedule, stages_of(self._plan.arguments.ties)
        if own.rebuild is not None:
            again = own.rebuild(own.microbatches)
            if proved(again, "async", ties) == proved(own, "async", ties):
                return own.rebuild
        raise ExecutionError(
            f"run can't build {own.name} for more microbatches: it was not made by schedir.build, "
            "or was changed after that; pass schedule=lambda microbatches: …, which makes it"
        )

    def _results(
        self, batches: Iterator[Any], build: Build, most: int
    ) -> Generator[StepResult, None, None]:
        """Yield the result of each batch, from segments of at most `most` batches."""
        given, left, session = 0, None, self._engine.session
        with _interrupts() as interrupted:
            while True:
                feed, error = None, None
                if interrupted:
                    own = _Said(given, ended="was interrupted")
                elif left is not None:
                    own = _Said(left, left=True)
                else:
                    own, feed, error = self._draw(batches, most, given)
                self._compare(own, self._engine.gather(own, RUN), given, error)
                if feed is None:
                    return
                engine = self._engine_of(self._plan.schedule.microbatches * own.drawn, build)
                engine.steps = self._engine.steps
                call = CallArguments([*feed.inputs] or None, [*feed.targets] or None)
                for batch, result in enumerate(engine.results(RUN, call, feed=feed), 1):
                    if batch == own.drawn:
                        session.stop = any(self._engine.gather(session.stops(), RUN))
                    given += 1
                    if left is not None or interrupted:
                        continue  # the pipeline drains
                    session.paused = "in the midst of run; leave its loop, or close() what run gave"
                    try:
                        yield result
                    except GeneratorExit:
                        left = given
                    finally:
                        session.paused = None
                self._engine.steps = engine.steps

    def _draw(
        self, batches: Iterator[Any], most: int, given: int
    ) -> tuple[_Said, Feed | None, Exception | None]:
        """Draw the batches of a segment; returns what to say of them and what the segment is fed,
        None after the last one. If that fails, returns the error too."""
        try:
            drawn = [*map(_arguments, islice(batches, most))]
            feed = _joined([*map(self._engine.cut, drawn)])
        except Exception as error:
            ended = f"could not draw its next batches: {describe(error)}"
            return _Said(given, ended=ended), None, error
        reads = drawn if self._reads else ()
        prints = [(fingerprint(one.inputs), fingerprint(one.target)) for one in reads]
        return _Said(given, len(drawn), prints), feed, None

    def _compare(
        self, own: _Said, said: Sequence[_Said], applied: int, error: Exception | None
    ) -> None:
        """Compare what the processes have said before a segment.

        Raises the error that ended the stream here, or ExecutionError if another process has ended
        it, or if the processes differ: also if one holds other batches than the first stage's.
        """
        done = f"{applied} batches were applied; the pipeline is drained"
        if error is not None:
            error.add_note(f"Executor.run: {done}")
            raise error
        if own.ended:
            raise KeyboardInterrupt(done)
        first, grid = said[0], self._plan.grid
        speaker = grid.number(self._plan.schedule.placement[0][0])
        in_pipeline = {grid.number(rank) for rank in range(grid.ranks)}
        for number, other in enumerate(said):
            differs = ""
            if other.ended:
                differs = f"process {number} {other.ended}; {done}"
            elif (other.left, other.given) != (first.left, first.given) and (
                other.drawn or first.drawn or other.given != first.given
            ):
                differs = (
                    f"process 0 {_stand(first)}, but process {number} {_stand(other)}; all ranks "
                    "must leave the loop after the same result"
                )
                self._engine.session.break_off(differs)
                if own.left:  # the loop is over here, and nobody would catch an exception
                    logger.error("%s", differs)
                    return
            elif other.drawn != first.drawn:
                differs = (
                    f"process 0 has {first.drawn} batches for its next segment, process {number} "
                    f"{other.drawn}; give every rank the same number. {done}"
                )
            elif number in in_pipeline:
                for batch, pair in enumerate(zip(said[speaker].prints, other.prints, strict=False)):
                    if any(differ(one, another) for one, another in zip(*pair, strict=True)):
                        differs = (
                            f"batch {other.given + batch} of process {number} is another one than "
                            f"that of process {speaker}, so the inputs of one would be paired with "
                            "the target of the other; draw the same batches on every rank"
                        )
                        break
            if differs:
                raise ExecutionError(differs, one_line=True)

    def _engine_of(self, microbatches: int, build: Build) -> Engine:
        """The engine for segments of this length, which all processes make at the same time."""
        if microbatches not in self.engines:
            optimizers = self._engine.optimizers
            with self._engine.session.together("making the executor"):
                arguments = attrs.evolve(
                    self._plan.arguments,
                    schedule=self._made(microbatches, build),
                    optimizer=lambda named, stage: optimizers[stage],
                )
                plan = plan_of(arguments)
            size = self._plan.schedule.microbatches
            self.engines[microbatches] = Engine(plan, size, self._engine)
        return self.engines[microbatches]

    def _made(self, microbatches: int, build: Build) -> Schedule:
        """Make the list of a segment.

        Raises ExecutionError if it has another shape than the executor's, drains between batches,
        or does not apply its batches one after the other.
        """
        schedule, own = build(microbatches), self._plan.schedule
        if (schedule.microbatches, schedule.placement) != (microbatches, own.placement):
            raise ExecutionError(
                f"schedule({microbatches}) gave {schedule.name} of {schedule.microbatches} "
                f"microbatches, with stages on ranks {schedule.placement}; the executor's are on "
                f"{own.placement}"
            )
        if microbatches > own.microbatches and not schedule.is_asynchronous:
            raise ExecutionError(
                f"{schedule.name} computes nothing after the OPTIM_STEPs of its stages, so the "
                "pipeline always drains there: call step, or take a list that steps between "
                "backwards, such as pipedream"
            )
        check_batches(schedule, own.microbatches)
        return schedule

    def close(self) -> None:
        """End a stream that has not ended."""
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            stream.close()


def _stand(said: _Said) -> str:
    if said.left:
        return f"has left the loop after result {said.given}"
    return "goes on" if said.drawn else f"has had its last result, {said.given}"


def _arguments(batch: Any) -> CallArguments:
    """The arguments of a step from one batch. Raises ExecutionError for another object."""
    if isinstance(batch, Mapping):
        known = {field.name for field in attrs.fields(CallArguments)}
        if unknown := sorted(set(batch) - known):
            raise ExecutionError(
                f"run: a batch has {', '.join(map(str, unknown))}, but can have only "
                f"{', '.join(sorted(known))}"
            )
        return CallArguments(**{"inputs": None, **batch})
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return CallArguments(*batch)
    raise ExecutionError(
        "run: each batch must be a pair (inputs, target), or a dict of step's arguments, not "
        f"{type(batch).__name__}"
    )


def _joined(feeds: Sequence[Feed]) -> Feed | None:
    """The microbatches of several batches as those of one call; None of no batch. Raises
    ExecutionError if they do not all have the same parts."""
    if not feeds:
        return None
    first, *others = parts = [_parts(feed) for feed in feeds]
    for batch, own in enumerate(others, 1):
        if own.keys() != first.keys():
            raise ExecutionError(
                f"run: batch {batch} of a segment has {', '.join(own) or 'nothing'}, and batch 0 "
                f"{', '.join(first) or 'nothing'}: give all batches of a stream the same arguments"
            )
    joined = {name: [*chain.from_iterable(own[name] for own in parts)] for name in first}
    names = {stage: name_of_extra(stage) for stage in feeds[0].extras}
    return Feed(
        joined.get("inputs", []),
        {stage: joined[name] for stage, name in names.items() if name in joined},
        joined.get("target", []),
        joined.get("loss_kwargs", []),
        [number for feed in feeds for number in feed.counts],
        None,
    )


def _parts(feed: Feed) -> dict[str, Sequence[Any]]:
    """The microbatches that a batch has here, by the argument of `step`."""
    extras = {name_of_extra(stage): own for stage, own in sorted(feed.extras.items())}
    keywords = feed.loss_keywords if any(feed.loss_keywords) else ()
    found = {"inputs": feed.inputs, "target": feed.targets, **extras, "loss_kwargs": keywords}
    return {name: own for name, own in found.items() if own}


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Inside, the first Ctrl-C is noted, so that the pipeline can drain. A second one is raised at
    once."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)
        logger.warning("interrupted: finishing the segment first; press Ctrl-C again to end now")

    if current_thread() is not main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
