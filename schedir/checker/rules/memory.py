"""S4xx: weight versions and activations, what exists and how much is alive at once.

S402 is retired: an activation is never released where a backward is missing, which S105 says.
"""

from __future__ import annotations

import attrs

from schedir.checker.diagnostics import Diagnostic
from schedir.checker.rules.example import example
from schedir.ir import HeldUntil


@attrs.frozen(kw_only=True)
class VersionNotAvailable(Diagnostic):
    """A forward reads a weight version that doesn't exist at its place in the list."""

    code = "S401"
    name = "version-not-available"
    why = "Version v exists once v OPTIM_STEPs of the stage have run."
    fix = "Name an existing version, or move the forward after the OPTIM_STEP that makes it."
    example = example(1, "0", "0F0@1 0B0 0OPTIM_STEP")
    message = "stage {action.stage} has version {newest} at most here, not {action.version}"

    alternative = "list the forward after the OPTIM_STEP that makes version {action.version}"

    newest: int


@attrs.frozen(kw_only=True)
class DelayAboveLimit(Diagnostic):
    """A gradient is applied more updates after the version that it was computed at than allowed."""

    code = "S403"
    name = "delay-above-limit"
    why = "A gradient that is stale by many updates can keep training from converging."
    fix = "Keep fewer microbatches in flight between updates, or raise --max-delay."
    example = example(3, "0", "0F0 0F1 0F2 0B0 0OPTIM_STEP 0B1 0OPTIM_STEP 0B2 0OPTIM_STEP")
    options = (("max_delay", 1),)
    message = (
        "stage {action.stage} applies the gradient of microbatch {action.microbatch} {delay} "
        "updates late; the limit is {limit}"
    )
    labels = ("reads the older version", "its gradient")
    notes = ("{above} of the stage's microbatches {above:is|are} above the limit",)

    delay: int
    limit: int
    above: int


@attrs.frozen(kw_only=True)
class VersionsAboveLimit(Diagnostic):
    """More weight versions of a stage are alive at once than allowed."""

    code = "S404"
    name = "versions-above-limit"
    why = "Each version beside the newest is a copy of the stage's weights."
    fix = "Keep fewer microbatches in flight between updates, or raise --max-versions."
    example = example(3, "0", "0F0 0F1 0F2 0B0 0OPTIM_STEP 0B1 0OPTIM_STEP 0B2 0OPTIM_STEP")
    options = (("max_versions", 1),)
    message = (
        "{alive} weight versions of stage {action.stage} are alive at once on rank {rank}; the "
        "limit is {limit}"
    )
    labels = ("makes one too many",)

    alive: int
    limit: int


@attrs.frozen(kw_only=True)
class ActivationsAboveLimit(Diagnostic):
    """A rank holds more activations at once than allowed."""

    code = "S405"
    name = "activations-above-limit"
    why = "What each forward keeps for its backward may not fit the device's memory."
    fix = (
        "Start backwards earlier, run forwards again (`schedir.recompute`), or raise "
        "--max-activations; `--held-until I` counts none between its I and its W."
    )
    example = example(3, "0", "0F0 0F1 0F2 0B0 0B1 0B2")
    options = (("max_activations", 2),)
    message = "rank {rank} holds {peak} activations at once; the limit is {limit}"
    labels = ("the peak",)

    peak: int
    limit: int
    held_until: HeldUntil = "W"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is left of an activation after its I, where that is not counted."""
        return ("an activation counts until its I",) if self.held_until == "I" else ()


@attrs.frozen(kw_only=True)
class VersionsDisagree(Diagnostic):
    """A microbatch runs at different weight versions on different stages."""

    code = "S406"
    name = "versions-disagree"
    severity = "note"
    why = (
        "Its gradient is that of no single version of the model. PipeDream works so by design; "
        "its vertical sync gives every stage the same version."
    )
    fix = "Name the version that all stages share: `0F4@1`."
    example = example(
        2,
        "0 0",
        "0F0 1F0 0F1 1B0 1OPTIM_STEP 0B0 0OPTIM_STEP 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP",
    )
    message = (
        "microbatch {action.microbatch} runs at version {version} on stage {action.stage}, but at "
        "version {other_version} on stage {other.action.stage}"
    )
    labels = ("reads one version", "reads another")
    notes = (
        "{differing} of the {microbatches} microbatches {differing:runs|run} at versions that "
        "differ between stages",
    )

    version: int
    other_version: int
    differing: int
    microbatches: int


@attrs.frozen(kw_only=True)
class TiedVersionsDisagree(Diagnostic):
    """Stages that share parameters run a microbatch at different versions of them."""

    code = "S407"
    name = "tied-versions-disagree"
    why = (
        "A tied parameter is one parameter: two of its versions in one forward pass are no model, "
        "and the sum of their gradients is the gradient of none."
    )
    fix = (
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
    message = (
        "stages {action.stage} and {other.action.stage} share parameters, but run microbatch "
        "{action.microbatch} at versions {version} and {other_version}"
    )
    labels = ("reads one version", "reads another")
    notes = (
        "{differing} of the {microbatches} microbatches {differing:runs|run} at versions that "
        "differ between the tied stages",
    )

    version: int
    other_version: int
    differing: int
    microbatches: int


@attrs.frozen(kw_only=True)
class RecomputeAtAnotherVersion(Diagnostic):
    """An R names another weight version than the one that its forward reads."""

    code = "S408"
    name = "recompute-at-another-version"
    why = (
        "What is run again at other weights is another forward: its gradient belongs to no output "
        "that the stage has handed on."
    )
    fix = "Leave the version out of the R: it reads that of its forward."
    example = example(2, "0", "0F0 0F1 0B0 0OPTIM_STEP 0R1@1 0B1 0OPTIM_STEP")
    message = "{action} reads version {action.version}, but {other.action} reads version {version}"
    labels = ("reads one version", "reads another")

    version: int
