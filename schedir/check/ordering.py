"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from schedir.check import rules
from schedir.check.diagnostics import Diagnostic, locate
from schedir.check.rules import Rule
from schedir.ir import Action, Kind, Position, Schedule


def ordering(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with the order of compute on each rank. Expects a sound structure."""
    for rank in range(schedule.ranks):
        yield from _compute_order(schedule, rank)
    ledgers = [_ledgers(actions) for actions in schedule.actions]
    steps = any(ledger.steps for by_stage in ledgers for ledger in by_stage.values())
    reducing = _reducing(schedule, ledgers)
    for rank, by_stage in enumerate(ledgers):
        for stage in sorted(by_stage):
            yield from _reduced(schedule, rank, stage, by_stage[stage], reducing, steps)
    yield from _empty_reduces(schedule, ledgers)
    if steps:
        for rank, by_stage in enumerate(ledgers):
            for stage in sorted(by_stage):
                yield from _applied_once(schedule, rank, stage, by_stage[stage])
        yield from _equally_often(schedule, ledgers)
        yield from _same_groups(schedule, ledgers)


def _reducing(schedule: Schedule, ledgers: list[dict[int, _Ledger]]) -> set[int]:
    """The stages whose gradients need a REDUCE_GRAD.

    Replicated stages do. On one rank it sums over a data-parallel group that the schedule does not
    show, so either all of those stages have it, or none.
    """
    single = {stage for stage, held in enumerate(schedule.placement) if len(held) == 1}
    over_data = any(
        ledger.has_reduce() and stage in single
        for by_stage in ledgers
        for stage, ledger in by_stage.items()
    )
    return set(range(schedule.stages)) - (set() if over_data else single)


def _compute_order(schedule: Schedule, rank: int) -> Iterator[Diagnostic]:
    """Every action stands behind what it uses of its own rank."""
    actions = schedule.actions[rank]
    places = {
        (action.kind, action.stage, action.microbatch): index
        for index, action in enumerate(actions)
    }
    for index, action in enumerate(actions):
        for rule, kind, neighbour in _USES.get(action.kind, ()):
            used = places.get((kind, action.stage + neighbour, action.microbatch))
            if used is not None and used > index:
                yield rule.found(
                    f"{action} is listed before {actions[used]}, whose result it uses",
                    locate(schedule, rank, index),
                    locate(schedule, rank, used),
                    help=f"move rank {rank} #{index} behind rank {rank} #{used}",
                )


_OUTPUT_GRADIENT = (
    (rules.INPUT_NOT_READY, Kind.BACKWARD, 1),
    (rules.INPUT_NOT_READY, Kind.BACKWARD_INPUT, 1),
)
_OWN_FORWARD = (rules.BACKWARD_BEFORE_FORWARD, Kind.FORWARD, 0)
# For each kind: what it uses, as (rule broken, kind, offset of the stage).
_USES: dict[Kind, tuple[tuple[Rule, Kind, int], ...]] = {
    Kind.FORWARD: ((rules.INPUT_NOT_READY, Kind.FORWARD, -1),),
    Kind.BACKWARD: (_OWN_FORWARD, *_OUTPUT_GRADIENT),
    Kind.BACKWARD_INPUT: (_OWN_FORWARD, *_OUTPUT_GRADIENT),
    Kind.BACKWARD_WEIGHT: (
        _OWN_FORWARD,
        (rules.WEIGHT_BEFORE_INPUT, Kind.BACKWARD_INPUT, 0),
    ),
}


@attrs.frozen
class _Step:
    """An OPTIM_STEP, the gradients accumulated into it, and the REDUCE_GRADs before it."""

    index: int
    gradients: tuple[int, ...]
    microbatches: frozenset[int]
    reduces: tuple[int, ...]


@attrs.define
class _Ledger:
    """One stage on one rank: its steps, and the indices that no step has followed yet."""

    steps: list[_Step] = attrs.field(factory=list)
    gradients: list[int] = attrs.field(factory=list)
    microbatches: set[int] = attrs.field(factory=set)
    reduces: list[int] = attrs.field(factory=list)

    def rounds(self) -> Iterator[tuple[Sequence[int], Sequence[int], int | None]]:
        """The gradients and REDUCE_GRADs of each step with its index, then those of none."""
        for step in self.steps:
            yield step.gradients, step.reduces, step.index
        yield self.gradients, self.reduces, None

    def has_reduce(self) -> bool:
        """True where the stage has any REDUCE_GRAD."""
        return any(reduces for _, reduces, _ in self.rounds())


def _ledgers(actions: tuple[Action, ...]) -> dict[int, _Ledger]:
    ledgers: dict[int, _Ledger] = {}
    for index, action in enumerate(actions):
        kind = action.kind
        if kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:
            ledger = ledgers.setdefault(action.stage, _Ledger())
            ledger.gradients.append(index)
            if action.microbatch is not None:
                ledger.microbatches.add(action.microbatch)
        elif kind is Kind.REDUCE_GRAD:
            ledgers.setdefault(action.stage, _Ledger()).reduces.append(index)
        elif kind is Kind.OPTIM_STEP:
            ledger = ledgers.setdefault(action.stage, _Ledger())
            ledger.steps.append(
                _Step(
                    index,
                    tuple(ledger.gradients),
                    frozenset(ledger.microbatches),
                    tuple(ledger.reduces),
                )
            )
            ledger.gradients.clear()
            ledger.microbatches.clear()
            ledger.reduces.clear()
    return ledgers


def _reduced(
    schedule: Schedule, rank: int, stage: int, ledger: _Ledger, reducing: set[int], steps: bool
) -> Iterator[Diagnostic]:
    """Between two OPTIM_STEPs the gradients come first, then the REDUCE_GRAD."""
    for gradients, reduces, step in ledger.rounds():
        for reduce in reduces:
            late = [index for index in gradients if index > reduce]
            if late:
                yield rules.REDUCE_BEFORE_GRADIENTS.found(
                    f"{len(late)} of stage {stage}'s gradients come after its REDUCE_GRAD",
                    locate(schedule, rank, reduce),
                    locate(schedule, rank, late[-1]),
                    help=f"move rank {rank} #{reduce} behind rank {rank} #{late[-1]}",
                )
        # Gradients behind the last OPTIM_STEP are never applied, which _applied_once says.
        where = step if step is not None else gradients[-1] if gradients and not steps else None
        if stage in reducing and not reduces and where is not None:
            held = schedule.placement[stage]
            why = (
                f"it lives on ranks {_and(held)}"
                if len(held) > 1
                else "those of other stages on one rank are"
            )
            side = "before" if step is not None else "behind"
            yield rules.STEP_WITHOUT_REDUCE.found(
                f"no REDUCE_GRAD sums stage {stage}'s gradients, but {why}",
                locate(schedule, rank, where),
                help=f"put {stage}REDUCE_GRAD {side} rank {rank} #{where}",
            )


def _empty_reduces(schedule: Schedule, ledgers: list[dict[int, _Ledger]]) -> Iterator[Diagnostic]:
    """The k-th REDUCE_GRAD of a replicated stage sums something new on one rank at least."""
    for stage, held in enumerate(schedule.placement):
        if len(held) == 1:
            continue
        turns: dict[int, list[tuple[Position, bool]]] = {}
        for rank in held:
            turn = 0
            for gradients, reduces, _ in ledgers[rank].get(stage, _Ledger()).rounds():
                before = -1
                for reduce in reduces:
                    new = any(before < index < reduce for index in gradients)
                    turns.setdefault(turn, []).append(((rank, reduce), new))
                    before, turn = reduce, turn + 1
        for ends in turns.values():
            # Unequal turns have no counterpart at all, which is another finding.
            if len(ends) == len(held) and not any(new for _, new in ends):
                yield rules.EMPTY_REDUCE.found(
                    f"no replica of stage {stage} has a gradient that is not summed yet",
                    *(locate(schedule, *place) for place, _ in ends),
                    help="remove it on every rank of the stage",
                )


def _applied_once(
    schedule: Schedule, rank: int, stage: int, ledger: _Ledger
) -> Iterator[Diagnostic]:
    """Every gradient has an OPTIM_STEP behind it, and every OPTIM_STEP has gradients."""
    replicated = len(schedule.placement[stage]) > 1
    for step in ledger.steps:
        # A replica may have run none of the step's microbatches; REDUCE_GRAD gives it the sum.
        if not step.gradients and not (replicated and step.reduces):
            yield rules.EMPTY_STEP.found(
                f"stage {stage} has accumulated no gradient since its last OPTIM_STEP",
                locate(schedule, rank, step.index),
                help="remove it, or move it behind the backwards that it belongs to",
            )
    if not ledger.gradients:
        return
    late = [locate(schedule, rank, index) for index in ledger.gradients]
    if ledger.steps:
        step_index = ledger.steps[-1].index
        yield rules.STEP_BEFORE_GRADIENTS.found(
            f"{len(late)} of stage {stage}'s gradients are computed after its last OPTIM_STEP",
            locate(schedule, rank, step_index),
            *late,
            help=f"move rank {rank} #{step_index} behind rank {rank} #{ledger.gradients[-1]}",
        )
    else:
        yield rules.GRADIENT_NEVER_APPLIED.found(
            f"stage {stage} has no OPTIM_STEP on rank {rank}, though other stages have",
            *late,
            help=f"add {stage}OPTIM_STEP behind rank {rank} #{ledger.gradients[-1]}",
        )


def _equally_often(schedule: Schedule, ledgers: list[dict[int, _Ledger]]) -> Iterator[Diagnostic]:
    """The replicas of a stage have the same number of OPTIM_STEPs."""
    for stage, held in enumerate(schedule.placement):
        steps = {rank: ledgers[rank].get(stage, _Ledger()).steps for rank in held}
        fewest, least = min((len(steps[rank]), rank) for rank in held)
        for rank in held:
            if len(steps[rank]) > fewest:
                yield rules.UNEVEN_STEPS.found(
                    f"stage {stage} has {len(steps[rank])} OPTIM_STEPs on rank {rank}, but "
                    f"{fewest} on rank {least}",
                    locate(schedule, rank, steps[rank][fewest].index),
                    help=f"give every rank of stage {stage} the same OPTIM_STEPs",
                )


def _same_groups(schedule: Schedule, ledgers: list[dict[int, _Ledger]]) -> Iterator[Diagnostic]:
    """The k-th OPTIM_STEP of every stage applies the same microbatches as the loss stage's."""
    groups: dict[int, list[set[int]]] = {}
    places: dict[int, list[Position]] = {}
    for stage, held in enumerate(schedule.placement):
        for rank in held:
            ledger = ledgers[rank].get(stage, _Ledger())
            if ledger.gradients:
                return  # reported by _applied_once, which this would only echo
            for turn, step in enumerate(ledger.steps):
                stage_groups = groups.setdefault(stage, [])
                if turn == len(stage_groups):
                    stage_groups.append(set())
                    places.setdefault(stage, []).append((rank, step.index))
                stage_groups[turn] |= step.microbatches
    last = schedule.stages - 1
    for stage in range(last):
        here, loss = groups.get(stage, []), groups.get(last, [])
        for turn in range(min(len(here), len(loss))):
            if here[turn] != loss[turn]:
                yield rules.UNEVEN_STEPS.found(
                    f"OPTIM_STEP {turn} of stage {stage} applies microbatches {_and(here[turn])}, "
                    f"that of the loss stage {_and(loss[turn])}",
                    locate(schedule, *places[stage][turn]),
                    locate(schedule, *places[last][turn]),
                    help="give both stages their OPTIM_STEPs after the same microbatches",
                )
                break  # the steps behind it differ as a consequence


def _and(numbers: set[int] | tuple[int, ...]) -> str:
    return " ".join(map(str, sorted(numbers))) or "none"
