"""A schedule: one list of typed actions per rank, where each stage lives, and what is tied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import attrs
import numpy as np

from schedir.display import Displayed
from schedir.errors import UnsoundError
from schedir.ir.action import MAX_NUMBER, Action, Entry, is_number
from schedir.ir.columns import Columns, Ints, columns_of
from schedir.ir.kinds import COMMUNICATION, COMPUTE, STEPS, Kind
from schedir.ir.tokens import clip, parse_entry, printable

T = TypeVar("T")

Placement: TypeAlias = tuple[tuple[int, ...], ...]
"""`placement[stage]`: the ranks that hold the stage, ascending; several for replicas."""


@attrs.frozen
class Source:
    """The line of Python that yielded an action.

    >>> import schedir
    >>> print(schedir.Source("my_schedule.py", 12))
    my_schedule.py:12
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}"


@attrs.frozen(eq=False)
class Sources:
    """The source of every place: `line_of` is an index into the distinct `lines`, -1 for none."""

    lines: tuple[Source, ...]
    line_of: Ints


class Placed:
    """What has a placement of stages."""

    placement: Placement

    @property
    def stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.placement)

    @cached_property
    def _stages_by_rank(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for stage, held in enumerate(self.placement):
            for rank in held:
                found.setdefault(rank, []).append(stage)
        return found

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending: its model chunks."""
        return tuple(self._stages_by_rank.get(rank, ()))


def _ranks_of_stages(placement: Iterable[int | Iterable[int]]) -> Placement:
    # A tuple of one rank is shared by all stages there: a file may place millions of them.
    alone: dict[int, tuple[int, ...]] = {}

    def ranks(held: int | Iterable[int]) -> tuple[int, ...]:
        several = (held,) if isinstance(held, int) else tuple(sorted(held))
        return alone.setdefault(several[0], several) if len(several) == 1 else several

    return tuple(map(ranks, placement))


def _columns(actions: Columns | Iterable[Iterable[Entry]]) -> Columns:
    return actions if isinstance(actions, Columns) else columns_of(actions)


def _parsed(rank: int, entries: str | Iterable[str | Entry]) -> Iterator[Entry]:
    """The entries of a rank's list, with its tokens parsed."""
    given = entries.split() if isinstance(entries, str) else entries
    for index, entry in enumerate(given):
        if isinstance(entry, str):
            try:
                yield parse_entry(entry)
            except ValueError as error:
                raise ValueError(f"rank {rank} #{index} {clip(entry)}: {error}") from None
        else:
            yield entry


# Not slotted, so that derived values can be cached beside the fields.
@attrs.frozen(slots=False, repr=False)
class Schedule(Displayed, Placed):
    """One list of typed actions per rank: what is printed, checked, simulated and executed.

    `placement[stage]` names the ranks that hold the stage; a bare int stands for one rank.
    `actions[rank]` is a rank's list, any iterable of entries (each an `Action`, or several
    `Together`), or `Columns`. `sources` are the lines of Python that yielded the actions. `rebuild`
    makes the same generator's schedule for another number of microbatches, and is None if no
    generator made this one. `boundaries` are the first layers of all stages but the first, if the
    schedule was made for one cut of a model. None of these takes part in equality or the hash, and
    passes keep them.

    Raises ValueError for fields that can't describe any schedule, and TypeError for an entry that
    is not an Action or a list that is not a list. `schedir.check` says whether the actions make
    sense.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    >>> schedule
    <Schedule 1f1b: 2 ranks, 2 stages, 4 microbatches, 34 actions>
    >>> schedule.stages_of(1), str(schedule.actions[0][0])
    ((1,), '0F0')
    """

    name: str
    microbatches: int
    placement: Placement = attrs.field(converter=_ranks_of_stages)
    columns: Columns = attrs.field(alias="actions", converter=_columns)
    sources: Sources | None = attrs.field(default=None, eq=False)
    rebuild: Callable[[int], Schedule] | None = attrs.field(default=None, eq=False)
    boundaries: tuple[int, ...] | None = attrs.field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        name = self.name
        fits = isinstance(name, str) and name and name.isprintable() and name == name.strip()
        if not fits or "#" in name:
            raise ValueError(f"name must be one printable line without '#', not {name!r}")
        if not is_number(self.microbatches) or self.microbatches < 1:
            raise ValueError(
                f"microbatches must be an int in 1..{MAX_NUMBER}, not {self.microbatches!r}"
            )
        if not self.ranks:
            raise ValueError("a schedule needs at least one rank")
        if not self.placement:
            raise ValueError("a schedule needs at least one stage")
        for stage, held in enumerate(self.placement):
            if not held or len(set(held)) < len(held) or not all(map(is_number, held)):
                raise ValueError(f"placement of stage {stage} must name distinct ranks: {held}")
            if held[0] < 0 or held[-1] >= self.ranks:
                raise ValueError(
                    f"placement of stage {stage} names a rank outside 0..{self.ranks - 1}: {held}"
                )
        if self.sources is not None and len(self.sources.line_of) != len(self.columns):
            raise ValueError("sources must have one entry for each action")
        if self.boundaries is not None:
            starts = (0, *self.boundaries)
            if len(starts) != self.stages or any(a >= b for a, b in pairwise(starts)):
                raise ValueError(
                    f"boundaries must be {self.stages - 1} layers, rising from at least 1, for "
                    f"{self.stages} stages, not {self.boundaries}"
                )

    @classmethod
    def of(
        cls,
        name: str,
        placement: Iterable[int | Iterable[int]],
        lists: Iterable[str | Iterable[str | Entry]],
        microbatches: int | None = None,
    ) -> Schedule:
        """The schedule with these lists, one for each rank, in the tokens of the text form.

        A list is a string of tokens, or an iterable of tokens and entries. Without `microbatches`,
        the highest microbatch named decides how many there are.

        Raises ValueError, with the place in the lists, for a bad token, and everything that
        `Schedule` raises.

        >>> import schedir
        >>> schedir.Schedule.of("mine", [0, 1], ["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0) 1B1"])
        <Schedule mine: 2 ranks, 2 stages, 2 microbatches, 8 actions>
        """
        if isinstance(lists, str):
            raise TypeError("lists must hold one list for each rank, not be a str")
        columns = columns_of(
            _parsed(rank, entries) if isinstance(entries, Iterable) else entries
            for rank, entries in enumerate(lists)
        )
        if microbatches is None:
            microbatches = 1 + int(columns.microbatch.max(initial=-1))
            if not microbatches:
                raise ValueError("the lists name no microbatch; say how many there are")
        return cls(name, microbatches, placement, columns)

    @cached_property
    def actions(self) -> tuple[tuple[Entry, ...], ...]:
        """`actions[rank]`: the list of a rank, one entry for each index."""
        if not self.columns.together:
            return self.flat
        return tuple(tuple(self.columns.entries_of(rank)) for rank in range(self.ranks))

    @cached_property
    def flat(self) -> tuple[tuple[Action, ...], ...]:
        """`flat[rank]`: the actions of a rank's entries, one after the other."""
        return tuple(tuple(self.columns.of_rank(rank)) for rank in range(self.ranks))

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """Results that were worked out for this object, by name, so that nobody computes them
        again."""
        return {}

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What is remembered in `memo` under a name, made the first time."""
        if name not in self.memo:
            self.memo[name] = make()
        found: T = self.memo[name]
        return found

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.columns.ranks

    @cached_property
    def holdings(self) -> tuple[tuple[int, int], ...]:
        """Every (stage, rank) such that the rank holds the stage, ascending."""
        return tuple((stage, rank) for stage, held in enumerate(self.placement) for rank in held)

    def source_of(self, rank: int, index: int) -> Source | None:
        """The line of Python that yielded `actions[rank][index]`, None if it is not known."""
        if self.sources is None:
            return None
        line = self.sources.line_of[self.columns.place(rank, index)]
        return None if line < 0 else self.sources.lines[line]

    @cached_property
    def is_complete(self) -> bool:
        """True if the lists hold their communication, or need none."""
        local = len(self.placement[0]) == 1 and len(set(self.placement)) == 1
        return local or self.stages == 1 or bool(self.columns.is_kind(*COMMUNICATION).any())

    @cached_property
    def is_asynchronous(self) -> bool:
        """True if some rank computes for a stage again after the stage's OPTIM_STEP: there is no
        flush."""
        columns = self.columns
        held = columns.rank * self.stages + columns.stage
        steps = columns.where(Kind.OPTIM_STEP)
        computes = columns.where(*(COMPUTE - {Kind.OPTIM_STEP}))
        first = np.full(self.ranks * self.stages, len(columns))
        first[held[steps[::-1]]] = steps[::-1]  # of several the last assignment counts
        return bool((computes > first[held[computes]]).any())

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the text form, in hex. Equal schedules have equal hashes on every machine."""
        from hashlib import sha256  # with OpenSSL, which a check needs nothing of

        return sha256(sched_text(self).encode()).hexdigest()

    def take(self, places: Ints, starts: Ints) -> Schedule:
        """The schedule with only the actions at `places`, in that order, and their sources."""
        sources = self.sources
        return attrs.evolve(
            self,
            actions=self.columns.take(places, starts),
            sources=None if sources is None else Sources(sources.lines, sources.line_of[places]),
        )


FORMAT_VERSION = 1


def sched_text(schedule: Schedule, boundaries: tuple[int, ...] | None = None) -> str:
    """The text form of a schedule, with boundaries if there are any; `schedir.ir.text` describes
    and parses it."""
    lines = [
        f"schedir {FORMAT_VERSION}",
        f"name {schedule.name}",
        f"microbatches {schedule.microbatches}",
        f"placement {placement_text(schedule.placement)}",
        *([f"boundaries {' '.join(map(str, boundaries))}"] if boundaries else []),
        *(" ".join([f"rank {n}:", *map(str, own)]) for n, own in enumerate(schedule.actions)),
    ]
    return "\n".join(lines) + "\n"


def placement_text(placement: Iterable[Iterable[int]]) -> str:
    """The ranks of each stage, as the text form has them: `0 1,3 2`."""
    return " ".join(",".join(map(str, held)) for held in placement)


def starts_of(ranks: Ints, number: int) -> Ints:
    """Where each of `number` ranks starts, given the rank of every place, ascending."""
    return np.searchsorted(ranks, np.arange(number + 1)).astype(np.int64)


def expect_schedule(value: object) -> None:
    """Raise TypeError for anything that is not a Schedule, such as a schedule's name."""
    if not isinstance(value, Schedule):
        raise TypeError(
            f"schedule must be a Schedule, not {type(value).__name__}; make one with "
            'schedir.build("1f1b", ranks=2, microbatches=8)'
        )


def expect_stages(schedule: Schedule, stages: object, what: str) -> None:
    """Raise TypeError for anything but a collection of stages, and ValueError for an unknown stage.
    `what` is the verb in the message."""
    if not isinstance(stages, Collection) or isinstance(stages, str | bytes):
        raise TypeError(f"stages must be a collection of stage numbers, not {stages!r}")
    last = schedule.stages - 1
    for stage in stages:
        if not is_number(stage) or stage > last:
            raise ValueError(f"{schedule.name} has no stage {stage!r} to {what}, only 0..{last}")


# Ties are groups of stages that share parameters, such as the embeddings of the first and the last
# stage. The gradient of a tied parameter is the sum over its stages, taken before any of them
# steps. So the k-th OPTIM_STEPs of all stages of a group happen together, on every rank that holds
# one of them.

Ties: TypeAlias = tuple[tuple[int, ...], ...]
"""The groups, each of two or more different stages; a stage may be in several."""


def ties_of(schedule: Schedule, groups: Iterable[Iterable[int]]) -> Ties:
    """The groups of stages as ties of the schedule. Raises ValueError for a group that can't be
    one."""
    ties = []
    for group in groups:
        tie = tuple(group) if isinstance(group, Iterable) else ()
        if len(tie) < 2:
            raise ValueError(
                f"a tie is a group of two or more stages, such as (0, 3), not {group!r}"
            )
        expect_stages(schedule, tie, "tie")
        if len(set(tie)) < len(tie):
            raise ValueError(f"the tie {tie} names a stage twice")
        ties.append(tie)
    return tuple(ties)


def tied_steps(schedule: Schedule, ties: Ties) -> list[tuple[int, ...]]:
    """The places of the OPTIM_STEPs that happen together: the k-th ones of all stages of a tie, on
    all their ranks. Ties that share a stage count as one tie.

    If some stage has fewer OPTIM_STEPs, the turns that it lacks are left out. Raises UnsoundError
    for an OPTIM_STEP on a rank that does not hold its stage.
    """
    if not ties:
        return []
    columns = schedule.columns
    steps: dict[tuple[int, int], list[int]] = {holding: [] for holding in schedule.holdings}
    for place in columns.where(*STEPS).tolist():
        holding = int(columns.stage[place]), int(columns.rank[place])
        if holding not in steps:
            raise UnsoundError(f"rank {holding[1]} updates stage {holding[0]}, not its own")
        steps[holding].append(place)
    groups: list[set[int]] = []
    for tie in ties:
        joins = [group for group in groups if not group.isdisjoint(tie)]
        groups = [group for group in groups if group.isdisjoint(tie)]
        groups.append(set(tie).union(*joins))
    return [
        turn
        for group in groups
        for turn in zip(
            *(steps[stage, rank] for stage in sorted(group) for rank in schedule.placement[stage]),
            strict=False,
        )
    ]


def shared_steps(schedule: Schedule, ties: Ties) -> list[int]:
    """The places of the tied OPTIM_STEPs at which ranks communicate to add up their gradients."""
    rank = schedule.columns.rank
    turns = tied_steps(schedule, ties)
    return [place for turn in turns if len({*rank[list(turn)].tolist()}) > 1 for place in turn]
