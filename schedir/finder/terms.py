"""The work to schedule, checked, and turned into the tasks of the search, in numbers; and how much
work a search may do.

All microbatches of a stage cost the same, so two of them that change places make the same schedule
by other names: the k-th FORWARD of a stage in its rank's list is that of microbatch k, and so is
its k-th backward. So an order is, for each rank, a list of the steps of `graph.board`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import attrs

from schedir.errors import SchedirError
from schedir.graph.alive import HELD_UNTIL, HeldUntil
from schedir.graph.board import WAYS, Steps, steps_of
from schedir.ir import DEFAULT_CHANNEL, Placement, channel_model
from schedir.library import Pipeline, expect_fewer, wave, wrapped
from schedir.simulator import CostModel, Timeline

FORWARD, LEAN, BACKWARD, INPUT, WEIGHT, RECOMPUTE = range(len(WAYS))
"""The ways of a step: F, an F that will be run again, B, I, W, R."""
Objective: TypeAlias = Literal["makespan", "span"]
"""What to minimise: when the last action ends, or the longest time from a rank's first forward to
the end of its last compute, which is the cost of a step if steps follow each other."""
OBJECTIVES = get_args(Objective)
StepsAt: TypeAlias = Literal["last", "anywhere"]
"""Where a rank updates its stages: at the end of its list, or where it would wait."""
STEPS = get_args(StepsAt)
_PLACEMENTS: dict[str, Callable[[Pipeline], Placement]] = {"wrapped": wrapped, "wave": wave}
_ALIASES = {"v": "wave"}
PLACEMENT_NAMES = (*_PLACEMENTS, *_ALIASES)
"""The names of placements, aliases included."""


DEFAULT_SECONDS = 5.0
"""How long a slow core works on each placement of a search without `seconds`."""
_RATE = 640_000  # units of work a second, on a slow core
SCHEDULED = 8
"""Units of work for each action that a style puts in order."""
_ANY = 15  # units of work of any candidate


class Budget:
    """What is left of the work that a slow core does in `seconds`, which may be done several
    `times`; `progress` takes (done, total), of all of these.

    If `seconds` are given, each time is over at the latest when this process has computed for that
    long. `cut` is True if the clock, or `stop`, ended the search before its work was done.
    """

    def __init__(
        self,
        seconds: float | None,
        stop: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
        times: int,
    ) -> None:
        self._seconds = math.inf if seconds is None else seconds
        if seconds is None:
            seconds = DEFAULT_SECONDS
        elif isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"seconds must be a number, not {seconds!r}")
        elif not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a number >= 0, not {seconds}")
        self._whole = int(seconds * _RATE)
        self._total = self._whole * times
        self._before = self._allowed = self._spent = 0
        self._until = math.inf
        self.candidates = 0
        self.cut = False
        self._stop, self._progress = stop, progress

    def begin(self, share: float = 1.0) -> None:
        """Allow a share of the whole work, whatever has been done before."""
        self._before += self._allowed
        self._allowed, self._spent = int(self._whole * share), 0
        if self._seconds < math.inf:
            self._until = time.process_time() + self._seconds * share

    def spend(self, units: int) -> None:
        """One candidate more."""
        self.candidates += 1
        self._spent += units + _ANY
        if self._progress is not None:
            done = self._before + min(self._spent, self._allowed)
            self._progress(min(done, self._total), self._total)

    @property
    def over(self) -> bool:
        """True if all work is done, or the search must end."""
        if self._spent >= self._allowed:
            return True
        ended = self._stop() or (self._until < math.inf and time.process_time() >= self._until)
        self.cut |= ended
        return ended


def _at_least(least: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        if type(value) is not int:
            raise TypeError(f"{attribute.name} must be an int, not {value!r}")
        if value < least:
            raise ValueError(f"{attribute.name} must be at least {least}, not {value}")

    return check


_NAMES = {Real: "a number", type(None): "None"}


def _a(*types: type) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            names = " or ".join(_NAMES.get(t, t.__name__) for t in types)
            raise TypeError(f"{attribute.name} must be {names}, not {value!r}")

    return check


def _one_of(*names: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in names:
            raise ValueError(f"{attribute.name} must be {' or '.join(names)}, not {value!r}")

    return check


@attrs.frozen(kw_only=True)
class Terms:
    """The work, its costs, its limits, and the objective; see `schedir.search`.

    `boundaries` are where the layers were cut whose costs these are, if anybody knows.
    """

    ranks: int = attrs.field(validator=_at_least(1))
    microbatches: int = attrs.field(validator=_at_least(1))
    chunks: int = attrs.field(validator=_at_least(1))
    costs: CostModel = attrs.field(
        default=None,
        converter=attrs.converters.default_if_none(factory=CostModel),  # type: ignore[misc]
        validator=_a(CostModel),
    )
    placement: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_one_of(*PLACEMENT_NAMES))
    )
    memory_limit: float | None = attrs.field(default=None, validator=_a(Real, type(None)))
    max_activations: int | None = attrs.field(default=None, validator=_at_least(0))
    held_until: HeldUntil = attrs.field(default="W", validator=_one_of(*HELD_UNTIL))
    objective: Objective = attrs.field(default="makespan", validator=_one_of(*OBJECTIVES))
    steps: StepsAt = attrs.field(default="last", validator=_one_of(*STEPS))
    split: bool = attrs.field(default=True, validator=_a(bool))
    recompute: bool | None = attrs.field(default=None, validator=_a(bool, type(None)))
    channel: str | None = attrs.field(
        default=None, converter=attrs.converters.optional(channel_model)
    )
    boundaries: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        expect_fewer(self.ranks, self.chunks, self.microbatches)
        if self.memory_limit is not None:
            if self.max_activations is not None:
                raise ValueError("give memory_limit or max_activations, not both")
            if not self.memory_limit >= 0:
                raise ValueError(f"memory_limit must be bytes >= 0, not {self.memory_limit}")
            if not self.costs.sizes.known:
                raise SchedirError(
                    "a memory limit needs bytes to compare with: give the costs activation_bytes, "
                    "weight_bytes and the other sizes"
                )

    @property
    def proved_under(self) -> str:
        """The channel model that what is found must run under."""
        return self.channel or DEFAULT_CHANNEL

    def value(self, line: Timeline) -> float:
        """The objective of a timeline."""
        if self.objective == "makespan":
            return line.makespan
        return max(rank.span for rank in line.ranks)

    @property
    def limit(self) -> float | None:
        """The limit, in bytes or in activations."""
        return self.max_activations if self.memory_limit is None else self.memory_limit

    @property
    def counts_boundaries(self) -> bool:
        """True if the limited bytes include sent and received tensors."""
        sizes = self.costs.by_stage("boundary_bytes", self.ranks * self.chunks - 1)
        return self.memory_limit is not None and any(sizes)

    @property
    def placements(self) -> list[str]:
        """The names of the placements to try; with one chunk, or one rank, all are the same."""
        if self.placement is not None:
            return [_ALIASES.get(self.placement, self.placement)]
        return list(_PLACEMENTS) if self.chunks > 1 and self.ranks > 1 else ["wrapped"]

    def task(self, named: str, reserved: Sequence[float] | None = None) -> Task:
        """The task on a placement. Of a limit in bytes, `reserved` is set aside on each rank.

        Raises SchedirError for costs of other stages, or that lack a link.
        """
        shape = Pipeline(self.ranks, 1, self.chunks, placement=())
        placement = tuple(held[0] for held in _PLACEMENTS[named](shape))
        memory = self.memory(placement, reserved, early=self.split)
        return Task(
            self.microbatches,
            named,
            StageCosts.of(placement, self.costs),
            memory,
            self.objective,
            self.split,
            self.may_recompute
            and memory.limited
            and any(a < b for a, b in zip(memory.lean, memory.full, strict=True)),
        )

    def memory(
        self,
        placement: Sequence[int],
        reserved: Sequence[float] | None = None,
        early: bool = False,
    ) -> Memory:
        """What the ranks of a placement may keep: activations, each until its W or I, or bytes.

        An activation that is run again does not count before that. Of bytes, `reserved` is set
        aside on each rank; with `early`, so is what the first I of a stage adds to its gradient.
        """
        ranks, none = 1 + max(placement), (0,) * len(placement)
        if self.memory_limit is None:
            most = math.inf if self.max_activations is None else self.max_activations
            one = (1,) * len(placement)
            rest = one if self.held_until == "W" else none
            return Memory(one, none, rest, none, (most,) * ranks)

        def each(name: str) -> tuple[float, ...]:
            return self.costs.by_stage(name, len(placement))

        gradient = each("gradient_bytes")
        first = tuple(map(min, each("early_gradient_bytes"), gradient)) if early else none
        always = [*(reserved or (0,) * ranks)]
        for stage, rank in enumerate(placement):
            always[rank] += (
                each("weight_bytes")[stage] + each("optimizer_bytes")[stage] + first[stage]
            )
        return Memory(
            each("activation_bytes"),
            each("input_bytes"),
            each("deferred_bytes"),
            tuple(whole - part for whole, part in zip(gradient, first, strict=True)),
            tuple(self.memory_limit - kept for kept in always),
        )

    @property
    def may_recompute(self) -> bool:
        """True if forwards may be run again where that saves memory."""
        return self.memory_limit is not None if self.recompute is None else self.recompute


@attrs.frozen
class StageCosts:
    """The costs of a pipeline with stage s on rank `placement[s]`, one number per stage.

    `down[s]` is how long the output of stage s - 1 takes to reach stage s, `up[s]` how long the
    gradient of stage s + 1 takes: 0 on one rank, and if there is no such stage. `down_holds` and
    `up_holds` are how long the channel is occupied.
    """

    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    optim_step: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    down_holds: tuple[float, ...]
    up_holds: tuple[float, ...]

    @classmethod
    def of(cls, placement: Sequence[int], costs: CostModel) -> StageCosts:
        """Look them up. Raises SchedirError for costs of other stages, or that lack a link."""
        stages = len(placement)
        sizes = costs.by_stage("boundary_bytes", stages - 1)
        links = [(a, b, size) for (a, b), size in zip(pairwise(placement), sizes, strict=True)]
        down = (0, 0), *(costs.way(a, b, size) for a, b, size in links)
        up = *(costs.way(b, a, size) for a, b, size in links), (0, 0)
        names = [field.name for field in attrs.fields(cls)][1:7]
        return cls(
            tuple(placement),
            *(costs.by_stage(name, stages) for name in names),
            *(tuple(way[part] for way in ways) for part in (0, 1) for ways in (down, up)),
        )

    def alone(self, backward: Sequence[float]) -> tuple[list[float], list[float]]:
        """When the forward of each stage, and its backward of that length, start for a microbatch
        that is alone."""
        down = zip(self.down, self.forward, strict=True)
        up = zip(reversed(self.up), reversed(backward), strict=True)
        starts = list(accumulate(chain(*down, *up)))[::2]
        return starts[: len(backward)], starts[: len(backward) - 1 : -1]


@attrs.frozen(eq=False)
class Memory:
    """What a rank keeps: a number for each stage, and the limit of each rank.

    A (stage, microbatch) keeps `full` from its FORWARD on, or `lean` until it is run again, and
    `rest` between its I and its W. A stage keeps `gradient` from its first gradients on. `limit` is
    the memory that is left for all of these.
    """

    full: tuple[float, ...]
    lean: tuple[float, ...]
    rest: tuple[float, ...]
    gradient: tuple[float, ...]
    limit: tuple[float, ...]

    @property
    def limited(self) -> bool:
        """True if there is a limit."""
        return min(self.limit) < math.inf


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, slots=False)
class Task:
    """The work to put in order: its costs, and what may be kept.

    With `split`, backwards may be split; with `recompute`, forwards may be run again.
    """

    microbatches: int
    named: str
    costs: StageCosts
    memory: Memory
    objective: Objective
    split: bool
    recompute: bool

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return self.costs.placement

    @cached_property
    def stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(self.placement)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank, ascending."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.placement):
            found[rank].append(stage)
        return found

    @cached_property
    def actions(self) -> int:
        """The number of F, I and W."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def inputs(self) -> list[float]:
        """By stage, the least time from the gradient of the output to that of the input."""
        return self._backwards(self.costs.backward_input)

    @cached_property
    def wholes(self) -> list[float]:
        """By stage, the least time from the gradient of the output to those of all else."""
        parts = zip(self.costs.backward_input, self.costs.backward_weight, strict=True)
        return self._backwards([i + w for i, w in parts])

    def _backwards(self, split: Sequence[float]) -> list[float]:
        return [*map(min, self.costs.backward, split if self.split else self.costs.backward)]

    @cached_property
    def period(self) -> float:
        """The time that the busiest rank needs for a microbatch."""
        forward, whole = self.costs.forward, self.wholes
        return max(sum(forward[s] + whole[s] for s in held) for held in self.stages_of) or 1

    @cached_property
    def steps(self) -> Steps:
        """The duration, the inputs and the memory of each step."""
        costs, memory = self.costs, self.memory
        return steps_of(
            self.placement,
            (self.microbatches,),
            {kind: getattr(costs, kind.cost_name) for kind, _ in WAYS},
            {
                "input": list(zip(costs.down, costs.down_holds, strict=True)),
                "output gradient": list(zip(costs.up, costs.up_holds, strict=True)),
            },
            {
                "saved": memory.full,
                "kept": memory.lean,
                "deferred": memory.rest,
                "gradient": memory.gradient,
            },
        )
