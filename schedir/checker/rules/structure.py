"""S1xx: every stage runs every microbatch once, on a rank that holds it."""

from __future__ import annotations

import attrs

from schedir.checker.diagnostics import Diagnostic
from schedir.checker.rules.example import example


@attrs.frozen(kw_only=True)
class UnknownStage(Diagnostic):
    """An action names a stage that the placement doesn't have."""

    code = "S101"
    name = "unknown-stage"
    why = "No module exists to run it."
    mend = "Correct the stage, or add it to the placement."
    example = example(1, "0", "0F0 0B0 1F0")

    stages: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        stage = self.locations[0].action.stage
        return f"there is no stage {stage}; the placement has {self.stages}"

    @property
    def advice(self) -> str:
        """What to do."""
        return f"stages are numbered 0..{self.stages - 1}"


@attrs.frozen(kw_only=True)
class UnknownMicrobatch(Diagnostic):
    """An action names a microbatch outside 0..M-1."""

    code = "S102"
    name = "unknown-microbatch"
    why = "A step has exactly M microbatches; there is no data for another."
    mend = "Correct the microbatch, or the schedule's number of them."
    example = example(1, "0", "0F0 0B0 0F1 0B1")

    microbatches: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        named = self.locations[0].action.microbatch
        return f"there is no microbatch {named}; the schedule has {self.microbatches}"

    @property
    def advice(self) -> str:
        """What to do."""
        return f"microbatches are numbered 0..{self.microbatches - 1}"


@attrs.frozen(kw_only=True)
class WrongRank(Diagnostic):
    """An action stands in the list of a rank that doesn't hold its stage."""

    code = "S103"
    name = "wrong-rank"
    why = "The rank has neither the module nor its tensors."
    mend = "Move the action to a rank that holds the stage, or change the placement."
    example = example(1, "0 1", "0F0 1B0 0B0", "1F0")

    held: tuple[int, ...]

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        place = self.locations[0]
        return f"rank {place.rank} does not hold stage {place.action.stage}"

    @property
    def advice(self) -> str:
        """What to do."""
        ranks = " and ".join(map(str, self.held))
        return f"stage {self.locations[0].action.stage} lives on rank {ranks}"


@attrs.frozen(kw_only=True)
class DuplicateAction(Diagnostic):
    """The same action stands in the lists more than once."""

    code = "S104"
    name = "duplicate-action"
    why = "Each stage runs each microbatch once; a second backward would add its gradient twice."
    mend = "Remove all but one."
    example = example(1, "0", "0F0 0B0 0B0")
    labels = ("again", "the first time")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        # A forward is the same whatever version it reads.
        action = attrs.evolve(self.locations[0].action, version=None)
        return f"{action} stands in the lists a second time"

    @property
    def advice(self) -> str:
        """What to do."""
        return "remove one of them"


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
    mend = "Add the missing action."
    example = example(2, "0", "0F0 0B0 0F1")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action = self.locations[0].action
        return (
            f"stage {action.stage} never runs {action.kind.name} on microbatch {action.microbatch}"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        place = self.locations[0]
        return f"add {place.action} to rank {place.rank}"


@attrs.frozen(kw_only=True)
class MixedBackward(Diagnostic):
    """A stage has both a full backward B and a split one, I or W, for the same microbatch."""

    code = "S106"
    name = "mixed-backward"
    why = "The gradient would be computed, and added, twice."
    mend = "Keep either the B, or the I and its W."
    example = example(1, "0", "0F0 0B0 0W0")
    labels = ("a part of a split backward", "the full one")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action = self.locations[0].action
        return (
            f"stage {action.stage} has both a BACKWARD and a {action.kind.name} for microbatch "
            f"{action.microbatch}"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        return "keep the B, or the I and its W"


@attrs.frozen(kw_only=True)
class SplitMicrobatch(Diagnostic):
    """The backward of a microbatch stands on another replica of the stage than its forward."""

    code = "S107"
    name = "split-microbatch"
    why = "What the backward needs, the forward left on its own rank."
    mend = "Run both on the same rank."
    example = example(1, "0,1", "0F0 0REDUCE_GRAD 0OPTIM_STEP", "0B0 0REDUCE_GRAD 0OPTIM_STEP")
    labels = ("the backward", "its forward")

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        backward, forward = self.locations[:2]
        return (
            f"stage {forward.action.stage} runs microbatch {forward.action.microbatch} forward on "
            f"rank {forward.rank}, but backward on rank {backward.rank}"
        )

    @property
    def advice(self) -> str:
        """What to do."""
        return "run both on the same rank"
