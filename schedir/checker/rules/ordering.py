"""S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once."""

from __future__ import annotations

import attrs

from schedir.checker.diagnostics import Diagnostic
from schedir.checker.rules.example import example
from schedir.checker.templates import ranges


@attrs.frozen(kw_only=True)
class ListedEarly(Diagnostic):
    """An action is listed before another one of its rank, whose result it uses."""

    message = "{action} is listed before {other.action}, whose result it uses"
    labels = ("needs what comes later", "listed here")


@attrs.frozen(kw_only=True)
class BackwardBeforeForward(ListedEarly):
    """A backward is listed before the forward of the same stage and microbatch."""

    code = "S201"
    name = "backward-before-forward"
    why = "There is nothing yet to differentiate."
    fix = "Move the backward after its forward."
    example = example(1, "0", "0B0 0F0")


@attrs.frozen(kw_only=True)
class WeightBeforeInput(ListedEarly):
    """A W is listed before the I of the same stage and microbatch."""

    code = "S202"
    name = "weight-before-input"
    why = "W uses what I has computed."
    fix = "Move W after its I."
    example = example(2, "0", "0F0 0W0 0I0 0F1 0I1 0W1")


@attrs.frozen(kw_only=True)
class InputNotReady(ListedEarly):
    """An action is listed before the neighbouring stage on the same rank has made its input."""

    code = "S203"
    name = "input-not-ready"
    why = "A rank runs its list in order, so the input can't be there."
    fix = "Run the stages forward in ascending order, and backward in descending order."
    example = example(1, "0 0", "1F0 0F0 1B0 0B0")


@attrs.frozen(kw_only=True)
class StepBeforeGradients(Diagnostic):
    """The last OPTIM_STEP of a stage is listed before some of its gradients are computed."""

    code = "S204"
    name = "step-before-gradients"
    why = "Those gradients are never applied: the step trains on a part of the batch."
    fix = "Move the OPTIM_STEP after the stage's last backward, or add another one there."
    example = example(2, "0", "0F0 0B0 0F1 0OPTIM_STEP 0B1")
    message = (
        "{late} of stage {action.stage}'s gradients {late:is|are} computed after its last "
        "OPTIM_STEP"
    )
    labels = ("the last step", "never applied")

    @property
    def late(self) -> int:
        """How many gradients come after the step: the other locations."""
        return len(self.locations) - 1


@attrs.frozen(kw_only=True)
class GradientNeverApplied(Diagnostic):
    """A stage has no OPTIM_STEP although other stages have."""

    code = "S205"
    name = "gradient-never-applied"
    why = "It would never learn. A schedule without any OPTIM_STEP leaves the update to the caller."
    fix = "Give every stage its OPTIM_STEP, on each rank that holds it, or none."
    example = example(1, "0 0", "0F0 1F0 1B0 0B0 1OPTIM_STEP")
    message = "stage {action.stage} has no OPTIM_STEP on rank {rank}, though other stages have"


@attrs.frozen(kw_only=True)
class EmptyStep(Diagnostic):
    """An OPTIM_STEP is listed where no gradient has been accumulated since the one before."""

    code = "S206"
    name = "empty-step"
    why = "There is nothing to apply: most likely it is a duplicate, or stands in the wrong place."
    fix = "Remove it, or move it after the backwards that it belongs to."
    example = example(1, "0", "0F0 0B0 0OPTIM_STEP 0OPTIM_STEP")
    message = "stage {action.stage} has accumulated no gradient since its last OPTIM_STEP"


@attrs.frozen(kw_only=True)
class UnevenSteps(Diagnostic):
    """Two stages that share parameters group the microbatches differently into their
    OPTIM_STEPs."""

    code = "S207"
    name = "uneven-steps"
    why = (
        "A tied parameter gets one gradient in each step, the sum over its stages; of different "
        "microbatches that is the gradient of no loss."
    )
    fix = "Give the tied stages their OPTIM_STEPs after the same sets of microbatches."
    example = example(
        3,
        "0 0",
        "0F0 1F0 0F1 1F1 0F2 1F2 1B0 1B1 0B0 0OPTIM_STEP 1OPTIM_STEP "
        "1B2 0B1 0B2 0OPTIM_STEP 1OPTIM_STEP",
    )
    options = (("ties", ((0, 1),)),)
    message = (
        "OPTIM_STEP {step} of stage {action.stage} applies microbatches {applied:ranges}; that of "
        "stage {other.action.stage}, which shares parameters with it, {expected:ranges}"
    )
    advice = "give both stages their OPTIM_STEPs after the same microbatches"

    step: int  # which OPTIM_STEP of each stage, from 0
    applied: tuple[int, ...]  # its microbatches
    expected: tuple[int, ...]  # those of the other stage


@attrs.frozen(kw_only=True)
class ReduceBeforeGradients(Diagnostic):
    """A REDUCE_GRAD is listed before the gradients of its step are complete."""

    code = "S208"
    name = "reduce-before-gradients"
    why = "What is computed after it is not summed over the replicas: they drift apart."
    fix = "Move the REDUCE_GRAD after the last backward before the OPTIM_STEP."
    example = example(2, "0", "0F0 0F1 0B0 0REDUCE_GRAD 0B1 0OPTIM_STEP")
    message = "{late} of stage {action.stage}'s gradients {late:comes|come} after its REDUCE_GRAD"
    labels = ("sums what is there so far", "the last gradient")

    late: int


@attrs.frozen(kw_only=True)
class StepWithoutReduce(Diagnostic):
    """Gradients of a stage on several ranks are not summed by a REDUCE_GRAD; or those of a stage
    on one rank are not, though other such stages' are, over a group that the schedule hides."""

    code = "S209"
    name = "step-without-reduce"
    why = "Each replica would apply its own gradients only: they drift apart."
    fix = "Put the stage's REDUCE_GRAD between its last backward and its OPTIM_STEP, on every rank."
    example = example(2, "0,1", "0F0 0B0 0OPTIM_STEP", "0F1 0B1 0OPTIM_STEP")
    message = "no REDUCE_GRAD sums stage {action.stage}'s gradients, though {reason}"

    held: tuple[int, ...]  # the ranks of the stage

    @property
    def reason(self) -> str:
        """Why they need a sum."""
        if len(self.held) > 1:
            return f"the stage lives on ranks {ranges(self.held)}"
        return "those of other stages on one rank are summed"


@attrs.frozen(kw_only=True)
class EmptyReduce(Diagnostic):
    """A REDUCE_GRAD is listed where no replica has a gradient that is not summed yet."""

    code = "S210"
    name = "empty-reduce"
    why = "Gradients that are summed already would be summed once more, or none at all."
    fix = "Remove it, or move it after the backwards that it belongs to."
    example = example(
        2,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    )
    message = "no replica of stage {action.stage} has a gradient that is not summed yet"


@attrs.frozen(kw_only=True)
class UnevenReplicas(Diagnostic):
    """The replicas of a stage have different numbers of OPTIM_STEPs."""

    code = "S211"
    name = "uneven-replicas"
    why = "From the first step that one of them lacks, their weights differ."
    fix = "Give every replica the same OPTIM_STEPs."
    example = example(
        2,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP",
        "0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    )
    message = (
        "stage {action.stage} has {steps} OPTIM_STEPs on rank {rank}, but {fewest} on rank {least}"
    )

    steps: int
    least: int  # the rank that has the fewest
    fewest: int


@attrs.frozen(kw_only=True)
class ReduceAcrossSteps(Diagnostic):
    """REDUCE_GRADs that meet belong to different OPTIM_STEPs of their replicas."""

    code = "S212"
    name = "reduce-across-steps"
    why = "The sum mixes the gradients of two steps, and the replicas apply different ones."
    fix = "Give every replica as many REDUCE_GRADs between two OPTIM_STEPs."
    example = example(
        4,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP 0F3 0B3 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    )
    steps: tuple[int, ...]  # by location, the OPTIM_STEP that it belongs to, from 0

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        step, *others = self.steps
        differing = next(other for other in others if other != step)
        location = self.locations[self.steps.index(differing)]
        return (
            f"a sum of stage {self.action.stage} belongs to OPTIM_STEP {step} on rank "
            f"{self.rank}, but to OPTIM_STEP {differing} on rank {location.rank}"
        )


@attrs.frozen(kw_only=True)
class NoStep(Diagnostic):
    """No stage has an OPTIM_STEP, so the schedule updates nothing itself."""

    code = "S213"
    name = "no-step"
    severity = "note"
    strict = False
    why = (
        "The gradients only accumulate: whoever runs the schedule is to apply them, and to clear "
        "them. That is a choice, and the only one in torch's format, so `--strict` allows it."
    )
    fix = (
        "End each list with the OPTIM_STEPs of its stages, as the option `--add-steps` and "
        "`schedir.append_steps` do, or step the optimizer yourself."
    )
    example = example(1, "0", "0F0 0B0")
    message = "there is no OPTIM_STEP: the update is left to the caller"
    advice = (
        "end each list with the OPTIM_STEPs of its stages (--add-steps lists them), or step the "
        "optimizer yourself"
    )


@attrs.frozen(kw_only=True)
class RecomputeBeforeForward(ListedEarly):
    """An R is listed before the forward of the same stage and microbatch."""

    code = "S214"
    name = "recompute-before-forward"
    why = "R runs the forward again, on the input that F keeps."
    fix = "Move the R after its forward, or leave it out: F then keeps its activation."
    example = example(1, "0", "0R0 0F0 0B0")


@attrs.frozen(kw_only=True)
class BackwardBeforeRecompute(ListedEarly):
    """A backward is listed before the recomputation of the same stage and microbatch."""

    code = "S215"
    name = "backward-before-recompute"
    why = "Where there is an R, its forward keeps the input alone: R makes what the backward needs."
    fix = "Move the R before its B or I, or leave it out: F then keeps its activation."
    example = example(1, "0", "0F0 0B0 0R0")


@attrs.frozen(kw_only=True)
class DifferentRates(Diagnostic):
    """Stages step after different sets of microbatches: one of them oftener than another, say."""

    code = "S216"
    name = "different-rates"
    severity = "note"
    strict = False
    why = (
        "A step takes the mean over its own microbatches, so each stage trains; but no update is "
        "one of the whole model. PipeDream's replicated stages work so by design, which is why "
        "`--strict` allows it: they step once in a round of their replicas, the others after every "
        "minibatch. Where it is not meant, an OPTIM_STEP is in the wrong place."
    )
    fix = "Give every stage its OPTIM_STEPs after the same sets of microbatches."
    example = example(
        2, "0 0", "0F0 1F0 1B0 1OPTIM_STEP 0B0 0F1 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP"
    )
    message = (
        "OPTIM_STEP {step} of stage {action.stage} applies microbatches {applied:ranges}; that of "
        "the loss stage {expected:ranges}"
    )
    labels = ("the mean over its own", "the loss stage's")
    notes = (
        "{differing} of the {stages} stages {differing:groups|group} the microbatches otherwise "
        "than the loss stage",
    )
    advice = "give both stages their OPTIM_STEPs after the same microbatches, unless it is meant"

    step: int  # which OPTIM_STEP of each stage, from 0
    applied: tuple[int, ...]  # its microbatches
    expected: tuple[int, ...]  # those of the loss stage
    differing: int
    stages: int
