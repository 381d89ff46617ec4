"""S4xx: weight versions and activations, what exists and how much is alive at once.

S402 is retired: an activation is never released where a backward is missing, which S105 says.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from schedir.checker.diagnostics import Diagnostic, Severity
from schedir.checker.rules.example import example


@attrs.frozen(kw_only=True)
class VersionNotAvailable(Diagnostic):
    """A forward reads a weight version that doesn't exist at its place in the list."""

    code = "S401"
    name = "version-not-available"
    why = "Version v exists once v OPTIM_STEPs of the stage have run."
    mend = "Name an existing version, or move the forward behind the OPTIM_STEP that makes it."
    example = example(1, "0", "0F0@1 0B0 0OPTIM_STEP")

    newest: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action = self.locations[0].action
        return f"stage {action.stage} has version {self.newest} at most here, not {action.version}"

    @property
    def advice(self) -> str:
        """What to do."""
        return (
            f"read version {self.newest}, or list the forward behind the OPTIM_STEP that makes "
            f"version {self.locations[0].action.version}"
        )


@attrs.frozen(kw_only=True)
class DelayAboveLimit(Diagnostic):
    """A gradient is applied more updates after the version that it was computed at than allowed."""

    code = "S403"
    name = "delay-above-limit"
    why = "A gradient that is stale by many updates can keep training from converging."
    mend = "Keep fewer microbatches in flight between updates, or raise --max-delay."
    example = example(
        3,
        "0",
        "0F0 0F1 0F2 0B0 0OPTIM_STEP 0B1 0OPTIM_STEP 0B2 0OPTIM_STEP",
    )
    options = (("max_delay", 1),)
    labels = ("reads the older version", "its gradient")

    delay: int
    limit: int
    above: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        action = self.locations[0].action
        return (
            f"stage {action.stage} applies the gradient of microbatch {action.microbatch} "
            f"{self.delay} updates late; the limit is {self.limit}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many there are."""
        are = "is" if self.above == 1 else "are"
        return (f"{self.above} of the stage's microbatches {are} above the limit",)


@attrs.frozen(kw_only=True)
class VersionsAboveLimit(Diagnostic):
    """More weight versions of a stage are alive at once than allowed."""

    code = "S404"
    name = "versions-above-limit"
    why = "Each version beside the newest is a copy of the stage's weights."
    mend = "Keep fewer microbatches in flight between updates, or raise --max-versions."
    example = example(
        3,
        "0",
        "0F0 0F1 0F2 0B0 0OPTIM_STEP 0B1 0OPTIM_STEP 0B2 0OPTIM_STEP",
    )
    options = (("max_versions", 1),)
    labels = ("makes one too many",)

    alive: int
    limit: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        place = self.locations[0]
        return (
            f"{self.alive} weight versions of stage {place.action.stage} are alive at once on rank "
            f"{place.rank}; the limit is {self.limit}"
        )


@attrs.frozen(kw_only=True)
class ActivationsAboveLimit(Diagnostic):
    """A rank holds more activations at once than allowed."""

    code = "S405"
    name = "activations-above-limit"
    why = "What each forward keeps for its backward may not fit the device's memory."
    mend = "Start backwards earlier, or raise --max-activations."
    example = example(3, "0", "0F0 0F1 0F2 0B0 0B1 0B2")
    options = (("max_activations", 2),)
    labels = ("the peak",)

    peak: int
    limit: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        return (
            f"rank {self.locations[0].rank} holds {self.peak} activations at once; the limit is "
            f"{self.limit}"
        )


@attrs.frozen(kw_only=True)
class VersionsDisagree(Diagnostic):
    """A microbatch runs at different weight versions on different stages."""

    code = "S406"
    name = "versions-disagree"
    severity: ClassVar[Severity] = "note"
    why = (
        "Its gradient is that of no single version of the model. PipeDream works so by design; "
        "its vertical sync gives every stage the same version."
    )
    mend = "Name the version that all stages share: `0F4@1`."
    example = example(
        2,
        "0 0",
        "0F0 1F0 0F1 1B0 1OPTIM_STEP 0B0 0OPTIM_STEP 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP",
    )

    labels = ("reads one version", "reads another")

    versions: tuple[int, int]
    many: int
    microbatches: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        here, there = (place.action for place in self.locations)
        return (
            f"microbatch {here.microbatch} runs at version {self.versions[0]} on stage "
            f"{here.stage}, but at version {self.versions[1]} on stage {there.stage}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many there are."""
        run = "runs" if self.many == 1 else "run"
        return (
            f"{self.many} of the {self.microbatches} microbatches {run} at versions that differ "
            "between stages",
        )


@attrs.frozen(kw_only=True)
class TiedVersionsDisagree(Diagnostic):
    """Stages that share parameters run a microbatch at different versions of them."""

    code = "S407"
    name = "tied-versions-disagree"
    why = (
        "A tied parameter is one parameter: two of its versions in one forward pass are no model, "
        "and the sum of their gradients is the gradient of none."
    )
    mend = (
        "Name the version that the tied stages share (`0F4@1`, as in vertical sync), update after "
        "all microbatches, or leave the parameter untied."
    )
    example = example(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0OPTIM_STEP 0RECV_GRAD1 0B1 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1OPTIM_STEP 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
    )
    options = (("ties", ((0, 1),)),)
    labels = ("reads one version", "reads another")

    versions: tuple[int, int]
    many: int
    microbatches: int

    @property
    def message(self) -> str:
        """What is wrong, in one line."""
        here, there = (place.action for place in self.locations)
        return (
            f"stages {here.stage} and {there.stage} share parameters, but run microbatch "
            f"{here.microbatch} at versions {self.versions[0]} and {self.versions[1]}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many there are."""
        run = "runs" if self.many == 1 else "run"
        return (
            f"{self.many} of the {self.microbatches} microbatches {run} at versions that differ "
            "between the tied stages",
        )

    @property
    def advice(self) -> str:
        """What to do."""
        microbatch = self.locations[0].action.microbatch
        forwards = " and ".join(
            f"{place.action.stage}F{microbatch}@{min(self.versions)}" for place in self.locations
        )
        return f"name one version on both: {forwards}"
