"""How every call opens: the rank of the first stage announces it, and all others compare.

            rank of the first stage              another rank
            ───────────────────────              ────────────
    early                                        posts its first receives, by the shapes
                                                 of the call before
            announces call and signature ─────▶  compares them with its own call and batch

            if the input signature is that of the call before:
            runs its list                        runs the rest of its list

            if it is another one, as shapes differ:
    early   sends placeholders to what others    the same; drops what it has received
            have posted
            runs its list, with described        the same
            payloads if the signature is new

A transport whose `early` is false does without the lines marked so: nothing is posted before the
announcement has arrived, and so there is nothing to take back.

The announcement goes over a tree of the ranks, beside the pipeline's traffic, which is tagged by
kind of call: until ranks have compared, no payload meets a buffer that is not its own.

    pipeline 0   rank 0 ─▶ rank 1 ─▶ rank 3        within a pipeline, over a tree of its ranks
                      └──▶ rank 2
    pipeline 1   rank 0 ─▶ …                       between pipelines, over one of their first ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from schedir.runtime.batch.feeding import Feed
from schedir.runtime.batch.microbatches import Batch
from schedir.runtime.boundaries.learned import Lessons, mask_gradients
from schedir.runtime.boundaries.signature import Signatures
from schedir.runtime.call import Call
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import PIPELINE_TAG, RANK_TAG, Control
from schedir.runtime.program.announcement import (
    SIZE,
    UNKNOWN,
    Announcement,
    announcement_of,
    check_same_batch,
    check_same_call,
    decoded,
    encoded,
)
from schedir.runtime.program.instruction import Instruction
from schedir.runtime.program.observers import Observer, listening, observed
from schedir.runtime.program.programs import Program, Programs
from schedir.runtime.program.running import advance
from schedir.runtime.stage.cells import Cells
from schedir.runtime.transports.transport import wait_for


class Announcements:
    """Sends the announcements of the rank that speaks for each pipeline to all processes."""

    def __init__(self, plan: Plan, control: Control) -> None:
        self._grid = grid = plan.grid
        self._speaker = speaker = plan.schedule.placement[0][0]
        # One process may run several ranks.
        ranks = [*dict.fromkeys(grid.number((speaker + i) % grid.ranks) for i in range(grid.ranks))]
        self._within = control.relay(ranks, SIZE, RANK_TAG)
        speakers = [grid.number(speaker, line) for line in range(grid.pipelines)]
        self._between = (
            control.relay(speakers, SIZE, PIPELINE_TAG) if grid.rank == speaker else None
        )

    def exchange(self, own: Announcement) -> Announcement:
        """What the speaker of the pipeline is about to do, compared with what this process is.

        Raises OneLineError where they make different calls, or hold different batches.
        """
        grid, speaker = self._grid, self._speaker
        if self._between is not None:
            first = decoded(self._between.pass_on(encoded(own)))
            check_same_call(own, first, grid, speaker, pipeline=0)
        received = self._within.pass_on(encoded(own))
        if grid.rank == speaker:
            return own
        found = decoded(received)
        check_same_call(own, found, grid, speaker, grid.pipeline)
        check_same_batch(own, found, grid.rank, speaker)
        return found

    def last(self, call: Call) -> None:
        """Announce that there is no other call; nobody has to be there to hear it."""
        for relay in (self._between, self._within):
            if relay is not None:
                relay.leave(encoded(Announcement(call.request, call.number)))


@attrs.frozen(eq=False)
class Opened:
    """A call that has been announced: the lists to run, of which `done` entries have been run.

    `learns` is what the first call of an input signature finds out; None in later ones.
    """

    announcement: Announcement
    program: Program
    lists: Sequence[Sequence[Instruction]]
    done: int = 0
    learns: Lessons | None = None

    @property
    def rows(self) -> int | None:
        """Those of the whole batches, None for ready microbatches."""
        return None if self.announcement.rows == UNKNOWN else self.announcement.rows


class Opening:
    """Opens the calls of one kind: those that train, or those that don't.

    The program that was run last is kept, and the input signature that it is for: a rank that does
    not see the input takes the next call to be like it. `newcomers` are who watches a call of
    another signature than the call before, by its number, and whether that is to be learned.
    """

    def __init__(
        self,
        announcements: Announcements,
        signatures: Signatures,
        programs: Programs,
        cells: Cells,
        ranks: Sequence[int],
        newcomers: Callable[[int, bool], Iterable[Observer]] | None = None,
    ) -> None:
        self._announcements, self._cells = announcements, cells
        self.signatures, self.programs = signatures, programs
        self._newcomers = newcomers
        self._ranks = ranks
        self._latest: tuple[int, Program] | None = None

    def open(self, call: Call, inputs: Batch | None, feed: Feed) -> Opened:
        """Begin a call on the microbatches of `feed`, which were cut from `inputs`.

        Raises ExecutionError where other ranks do something else.
        """
        observers = listening()
        signature = self.signatures.number(feed, inputs, call.precision)
        own = announcement_of(call, feed, signature)
        if self._latest is None:
            return self._anew(self._announcements.exchange(own), observers)
        expected, program = self._latest
        lists = [observed(instructions, observers) for instructions in program.lists]
        if program.early:
            advance(lists[0][: program.early], call)
        announcement = self._announcements.exchange(own)
        if announcement.signature == expected:
            return Opened(announcement, program, lists, program.early)
        if self.programs.posts_early:
            self._take_back(program)
        return self._anew(announcement, observers)

    def _take_back(self, program: Program) -> None:
        """End the receives that were posted for a call such as the one before."""
        for send_placeholders in program.answers:
            send_placeholders()
        for cell in self._cells:
            for works in cell.works:
                wait_for(works)
            cell.drop_received()

    def _anew(self, announcement: Announcement, observers: Sequence[Observer]) -> Opened:
        """Go on under the input signature that is announced, which may be a new one."""
        number = announcement.signature
        lessons = self.signatures.known(number)
        learns = None
        if lessons is None:
            learns, program = self._cells.learn(), self.programs.first
            self._latest = None
        else:
            self._cells.know(lessons)
            program = self.programs.of(number)
            self._latest = number, program
        if self._newcomers is not None:
            observers = [*observers, *self._newcomers(number, lessons is None)]
        lists = [observed(instructions, observers) for instructions in program.lists]
        return Opened(announcement, program, lists, learns=learns)

    def end(self, opened: Opened) -> None:
        """The call has ended well: what it has learned is known.

        After a first one all ranks of the pipeline come here, as how far ahead receives are posted
        depends on all of them.
        """
        if opened.learns is not None:
            mask_gradients(opened.learns, opened.program.schedule, self._ranks)
            self.programs.forget(self.signatures.add(opened.learns))
            self.programs.of(opened.announcement.signature)

    def reset(self) -> None:
        """A call has failed: the next one, where there can be one, starts anew."""
        self.programs.clear()
        self._latest = None
