"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

from typing import ClassVar

import attrs

from schedir.checker.diagnostics import Diagnostic, Severity
from schedir.checker.rules.example import example


@attrs.frozen(kw_only=True)
class ListedEarly(Diagnostic):
    """An action is listed before another one of its rank, whose result it uses."""

    labels = ("needs what comes later", "listed here")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action, used = (place.action for place in self.locations)
        return f"{action} is listed before {used}, whose result it uses"

    @property
    def advice(self) -> str:
        """What to do."""
        action, used = (place.action for place in self.locations)
        return f"list {action} behind {used}"


@attrs.frozen(kw_only=True)
class BackwardBeforeForward(ListedEarly):
    """A backward is listed before the forward of the same stage and microbatch."""

    code = "S201"
    name = "backward-before-forward"
    why = "There is nothing yet to differentiate."
    mend = "Move the backward behind its forward."
    example = example(1, "0", "0B0 0F0")


@attrs.frozen(kw_only=True)
class WeightBeforeInput(ListedEarly):
    """A W is listed before the I of the same stage and microbatch."""

    code = "S202"
    name = "weight-before-input"
    why = "W uses what I has computed."
    mend = "Move W behind its I."
    example = example(2, "0", "0F0 0W0 0I0 0F1 0I1 0W1")


@attrs.frozen(kw_only=True)
class InputNotReady(ListedEarly):
    """An action is listed before the neighbouring stage on the same rank has made its input."""

    code = "S203"
    name = "input-not-ready"
    why = "A rank runs its list in order, so the input can't be there."
    mend = "Run the stages forward in ascending order, and backward in descending order."
    example = example(1, "0 0", "1F0 0F0 1B0 0B0")


@attrs.frozen(kw_only=True)
class StepBeforeGradients(Diagnostic):
    """The last OPTIM_STEP of a stage is listed before some of its gradients are computed."""

    code = "S204"
    name = "step-before-gradients"
    why = "Those gradients are never applied: the step trains on a part of the batch."
    mend = "Move the OPTIM_STEP behind the stage's last backward, or add another one there."
    example = example(2, "0", "0F0 0B0 0F1 0OPTIM_STEP 0B1")
    labels = ("the last step", "never applied")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        late = len(self.locations) - 1
        are = "is" if late == 1 else "are"
        stage = self.locations[0].action.stage
        return f"{late} of stage {stage}'s gradients {are} computed after its last OPTIM_STEP"

    @property
    def advice(self) -> str:
        """What to do."""
        return f"list an OPTIM_STEP behind {self.locations[-1]}"


@attrs.frozen(kw_only=True)
class GradientNeverApplied(Diagnostic):
    """A stage has no OPTIM_STEP although other stages have."""

    code = "S205"
    name = "gradient-never-applied"
    why = "It would never learn. A schedule without any OPTIM_STEP leaves the update to the caller."
    mend = "Give every stage its OPTIM_STEP, on each rank that holds it, or none."
    example = example(1, "0 0", "0F0 1F0 1B0 0B0 1OPTIM_STEP")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        place = self.locations[0]
        return (
            f"stage {place.action.stage} has no OPTIM_STEP on rank {place.rank}, though other "
            "stages have"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        last = self.locations[-1]
        return f"add {last.action.stage}OPTIM_STEP behind rank {last.rank} #{last.index}"


@attrs.frozen(kw_only=True)
class EmptyStep(Diagnostic):
    """An OPTIM_STEP is listed where no gradient has been accumulated since the one before."""

    code = "S206"
    name = "empty-step"
    why = "There is nothing to apply: most likely it is a duplicate, or stands in the wrong place."
    mend = "Remove it, or move it behind the backwards that it belongs to."
    example = example(1, "0", "0F0 0B0 0OPTIM_STEP 0OPTIM_STEP")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        stage = self.locations[0].action.stage
        return f"stage {stage} has accumulated no gradient since its last OPTIM_STEP"

    @property
    def advice(self) -> str:
        """What to do."""
        return "remove it, or move it behind the backwards that it belongs to"


@attrs.frozen(kw_only=True)
class UnevenSteps(Diagnostic):
    """Two stages group the microbatches differently into their OPTIM_STEPs."""

    code = "S207"
    name = "uneven-steps"
    why = (
        "A gradient is scaled by the microbatches of its step on the loss stage; elsewhere that "
        "scale would be wrong."
    )
    mend = "Give every stage its OPTIM_STEPs after the same sets of microbatches."
    example = example(
        2, "0 0", "0F0 1F0 1B0 1OPTIM_STEP 0B0 0F1 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP"
    )

    turn: int
    here: tuple[int, ...]
    loss: tuple[int, ...]

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        return (
            f"OPTIM_STEP {self.turn} of stage {self.locations[0].action.stage} applies "
            f"microbatches {_listed(self.here)}; that of the loss stage {_listed(self.loss)}"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        return "give both stages their OPTIM_STEPs after the same microbatches"


@attrs.frozen(kw_only=True)
class ReduceBeforeGradients(Diagnostic):
    """A REDUCE_GRAD is listed before the gradients of its step are complete."""

    code = "S208"
    name = "reduce-before-gradients"
    why = "What is computed after it is not summed over the replicas: they drift apart."
    mend = "Move the REDUCE_GRAD behind the last backward before the OPTIM_STEP."
    example = example(2, "0", "0F0 0F1 0B0 0REDUCE_GRAD 0B1 0OPTIM_STEP")
    labels = ("sums what is there so far", "the last gradient")

    late: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        stage = self.locations[0].action.stage
        come = "comes" if self.late == 1 else "come"
        return f"{self.late} of stage {stage}'s gradients {come} after its REDUCE_GRAD"

    @property
    def advice(self) -> str:
        """What to do."""
        return f"list the REDUCE_GRAD behind {self.locations[-1]}"


@attrs.frozen(kw_only=True)
class StepWithoutReduce(Diagnostic):
    """Gradients of a stage on several ranks are not summed by a REDUCE_GRAD; or those of a stage
    on one rank are not, though other such stages' are, over a group that the schedule hides."""

    code = "S209"
    name = "step-without-reduce"
    why = "Each replica would apply its own gradients only: they drift apart."
    mend = (
        "Put the stage's REDUCE_GRAD between its last backward and its OPTIM_STEP, on every rank."
    )
    example = example(2, "0,1", "0F0 0B0 0OPTIM_STEP", "0F1 0B1 0OPTIM_STEP")

    held: tuple[int, ...]
    before: bool  # whether the REDUCE_GRAD belongs before the location, or behind it

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        why = (
            f"it lives on ranks {_listed(self.held)}"
            if len(self.held) > 1
            else "those of other stages on one rank are"
        )
        return f"no REDUCE_GRAD sums stage {self.locations[0].action.stage}'s gradients, but {why}"

    @property
    def advice(self) -> str:
        """What to do."""
        place = self.locations[0]
        side = "before" if self.before else "behind"
        return f"put {place.action.stage}REDUCE_GRAD {side} rank {place.rank} #{place.index}"


@attrs.frozen(kw_only=True)
class EmptyReduce(Diagnostic):
    """A REDUCE_GRAD is listed where no replica has a gradient that is not summed yet."""

    code = "S210"
    name = "empty-reduce"
    why = "Gradients that are summed already would be summed once more, or none at all."
    mend = "Remove it, or move it behind the backwards that it belongs to."
    example = example(
        2,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    )

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        stage = self.locations[0].action.stage
        return f"no replica of stage {stage} has a gradient that is not summed yet"

    @property
    def advice(self) -> str:
        """What to do."""
        return "remove it on every rank of the stage"


@attrs.frozen(kw_only=True)
class UnevenReplicas(Diagnostic):
    """The replicas of a stage have different numbers of OPTIM_STEPs."""

    code = "S211"
    name = "uneven-replicas"
    why = "From the first step that one of them lacks, their weights differ."
    mend = "Give every replica the same OPTIM_STEPs."
    example = example(
        2,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP",
        "0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    )

    has: int
    least: int
    fewest: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        place = self.locations[0]
        return (
            f"stage {place.action.stage} has {self.has} OPTIM_STEPs on rank {place.rank}, but "
            f"{self.fewest} on rank {self.least}"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        return f"give every rank of stage {self.locations[0].action.stage} the same OPTIM_STEPs"


@attrs.frozen(kw_only=True)
class ReduceAcrossSteps(Diagnostic):
    """REDUCE_GRADs that meet belong to different OPTIM_STEPs of their replicas."""

    code = "S212"
    name = "reduce-across-steps"
    why = "The sum mixes the gradients of two steps, and the replicas apply different ones."
    mend = "Give every replica as many REDUCE_GRADs between two OPTIM_STEPs."
    example = example(
        4,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP 0F3 0B3 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    )

    turns: tuple[int, ...]  # how many OPTIM_STEPs stand before each

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        here, there = self.turns[0], next(turn for turn in self.turns if turn != self.turns[0])
        other = self.locations[self.turns.index(there)]
        return (
            f"a sum of stage {other.action.stage} belongs to OPTIM_STEP {here} on rank "
            f"{self.locations[0].rank}, but to OPTIM_STEP {there} on rank {other.rank}"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        stage = self.locations[0].action.stage
        return f"give every rank of stage {stage} as many REDUCE_GRADs between two OPTIM_STEPs"


@attrs.frozen(kw_only=True)
class NoStep(Diagnostic):
    """No stage has an OPTIM_STEP, so the schedule updates nothing itself."""

    code = "S213"
    name = "no-step"
    severity: ClassVar[Severity] = "note"
    strict: ClassVar[bool] = False
    why = (
        "The gradients only accumulate: whoever runs the schedule is to apply them, and to clear "
        "them. That is a choice, and the only one in torch's format, so `--strict` allows it."
    )
    mend = "End each list with the OPTIM_STEPs of its stages, or step the optimizer yourself."
    example = example(1, "0", "0F0 0B0")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        return "there is no OPTIM_STEP: the update is left to the caller"

    @property
    def advice(self) -> str:
        """What to do."""
        return "end each list with the OPTIM_STEPs of its stages, or step the optimizer yourself"


# Ranges of numbers; more of them explain nothing.
_MOST_LISTED = 8


def _listed(numbers: tuple[int, ...]) -> str:
    """Numbers as ranges: `0-3, 5`, and how many more there are."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    said = [
        f"{own[0]}-{own[-1]}" if len(own) > 2 else ", ".join(map(str, own))
        for own in ranges[:_MOST_LISTED]
    ]
    more = sum(map(len, ranges[_MOST_LISTED:]))
    return (", ".join(said) or "none") + (f", … and {more} more" if more else "")
