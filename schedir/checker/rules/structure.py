"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

import attrs

from schedir.checker.diagnostics import Diagnostic
from schedir.checker.rules.example import example
from schedir.ir import Action, Kind


@attrs.frozen(kw_only=True)
class UnknownStage(Diagnostic):
    """An action names a stage that the placement doesn't have."""

    code = "S101"
    name = "unknown-stage"
    why = "No module exists to run it."
    fix = "Correct the stage, or add it to the placement."
    example = example(1, "0", "0F0 0B0 1F0")
    message = "there is no stage {action.stage}; the placement has {stages}"
    alternative = "add the stage to the placement"

    stages: int


@attrs.frozen(kw_only=True)
class UnknownMicrobatch(Diagnostic):
    """An action names a microbatch outside 0..M-1."""

    code = "S102"
    name = "unknown-microbatch"
    why = "A step has exactly M microbatches; there is no data for another."
    fix = "Correct the microbatch, or the schedule's number of them."
    example = example(1, "0", "0F0 0B0 0F1 0B1")
    message = "there is no microbatch {action.microbatch}; the schedule has {microbatches}"
    alternative = "say that the schedule has more microbatches"

    microbatches: int


@attrs.frozen(kw_only=True)
class WrongRank(Diagnostic):
    """An action stands in the list of a rank that doesn't hold its stage."""

    code = "S103"
    name = "wrong-rank"
    why = "The rank has neither the module nor its tensors."
    fix = "Move the action to a rank that holds the stage, or change the placement."
    example = example(1, "0 1", "0F0 1B0 0B0", "1F0")
    message = "rank {rank} does not hold stage {action.stage}"
    notes = ("stage {action.stage} lives on rank {held:and}",)

    held: tuple[int, ...]


@attrs.frozen(kw_only=True)
class DuplicateAction(Diagnostic):
    """The same action stands in the lists more than once."""

    code = "S104"
    name = "duplicate-action"
    why = "Each stage runs each microbatch once; a second backward would add its gradient twice."
    fix = "Remove all but one."
    example = example(1, "0", "0F0 0B0 0B0")
    message = "{versionless} stands in the lists a second time"
    labels = ("again", "the first time")

    @property
    def versionless(self) -> Action:
        """The action; a forward is the same whatever version it reads."""
        return attrs.evolve(self.action, version=None)


@attrs.frozen(kw_only=True)
class MissingAction(Diagnostic):
    """A stage never runs the forward, or the backward, of a microbatch."""

    code = "S105"
    name = "missing-action"
    why = (
        "Its gradient would silently lack that microbatch, and what a forward keeps for its "
        "backward would stay in memory to the end of the step. A backward is one B, or an I and "
        "its W."
    )
    fix = "Add the missing action."
    example = example(2, "0", "0F0 0B0 0F1")
    message = "stage {action.stage} never runs {action.kind.name} on microbatch {action.microbatch}"


@attrs.frozen(kw_only=True)
class MixedBackward(Diagnostic):
    """A stage has both a full backward B and a split one, I or W, for the same microbatch."""

    code = "S106"
    name = "mixed-backward"
    why = "The gradient would be computed, and added, twice."
    fix = "Keep either the B, or the I and its W."
    example = example(1, "0", "0F0 0B0 0W0")
    message = (
        "stage {action.stage} has both a BACKWARD and a {action.kind.name} for microbatch "
        "{action.microbatch}"
    )
    labels = ("a part of a split backward", "the full one")


@attrs.frozen(kw_only=True)
class SplitMicrobatch(Diagnostic):
    """The backward, or the recomputation, of a microbatch stands on another replica of the stage
    than its forward."""

    code = "S107"
    name = "split-microbatch"
    why = "What the backward needs, the forward left on its own rank."
    fix = "Run both on the same rank."
    example = example(1, "0,1", "0F0 0REDUCE_GRAD 0OPTIM_STEP", "0B0 0REDUCE_GRAD 0OPTIM_STEP")
    message = (
        "stage {action.stage} runs microbatch {action.microbatch} forward on rank {other.rank}, "
        "but {how} on rank {rank}"
    )
    labels = ("the {what}", "its forward")

    @property
    def how(self) -> str:
        """How it is run elsewhere."""
        return "once more" if self.action.kind is Kind.RECOMPUTE else "backward"

    @property
    def what(self) -> str:
        """What stands elsewhere."""
        return "recomputation" if self.action.kind is Kind.RECOMPUTE else "backward"
