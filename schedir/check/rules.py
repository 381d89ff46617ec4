"""The catalogue of rules: codes, names and the texts of `schedir explain`.

Codes are stable and never reused. S1xx structure, S2xx ordering, S3xx communication, S4xx memory
and weights. Each example is a whole `.sched` text that the rule rejects.
"""

from __future__ import annotations

import attrs

from schedir.check.diagnostics import Diagnostic, Location, Severity


@attrs.frozen
class Rule:
    """A rule's identity and its explanation."""

    code: str
    name: str
    meaning: str
    why: str
    mend: str
    example: str
    severity: Severity = "error"

    def found(
        self,
        message: str,
        *locations: Location,
        notes: tuple[str, ...] = (),
        help: str | None = None,
        trace: tuple[tuple[str, str, str], ...] = (),
    ) -> Diagnostic:
        """A finding of this rule; the first location is the primary one."""
        return Diagnostic(
            self.code, self.name, self.severity, message, locations, notes, help, trace
        )


def _text(microbatches: int, placement: str, *lists: str) -> str:
    """An example as `.sched` text."""
    head = f"schedir 1\nname example\nmicrobatches {microbatches}\nplacement {placement}\n"
    return head + "".join(f"rank {rank}: {actions}\n" for rank, actions in enumerate(lists))


UNKNOWN_STAGE = Rule(
    "S101",
    "unknown-stage",
    "An action names a stage that the placement doesn't have.",
    "No module exists to run it.",
    "Correct the stage, or add it to the placement.",
    _text(1, "0", "0F0 0B0 1F0"),
)
UNKNOWN_MICROBATCH = Rule(
    "S102",
    "unknown-microbatch",
    "An action names a microbatch outside 0..M-1.",
    "A step has exactly M microbatches; there is no data for another.",
    "Correct the microbatch, or the schedule's number of them.",
    _text(1, "0", "0F0 0B0 0F1 0B1"),
)
WRONG_RANK = Rule(
    "S103",
    "wrong-rank",
    "An action stands in the list of a rank that doesn't hold its stage.",
    "The rank has neither the module nor its tensors.",
    "Move the action to a rank that holds the stage, or change the placement.",
    _text(1, "0 1", "0F0 1B0 0B0", "1F0"),
)
DUPLICATE_ACTION = Rule(
    "S104",
    "duplicate-action",
    "The same action stands in the lists more than once.",
    "Each stage runs each microbatch once; a second backward would add its gradient twice.",
    "Remove all but one.",
    _text(1, "0", "0F0 0B0 0B0"),
)
MISSING_ACTION = Rule(
    "S105",
    "missing-action",
    "A stage never runs the forward, or the backward, of a microbatch.",
    "Its gradient would silently lack that microbatch. A backward is one B, or an I and its W.",
    "Add the missing action.",
    _text(2, "0", "0F0 0B0 0F1"),
)
MIXED_BACKWARD = Rule(
    "S106",
    "mixed-backward",
    "A stage has both a full backward B and a split one, I or W, for the same microbatch.",
    "The gradient would be computed, and added, twice.",
    "Keep either the B, or the I and its W.",
    _text(1, "0", "0F0 0B0 0W0"),
)
SPLIT_MICROBATCH = Rule(
    "S107",
    "split-microbatch",
    "The backward of a microbatch stands on another replica of the stage than its forward.",
    "What the backward needs, the forward left on its own rank.",
    "Run both on the same rank.",
    _text(1, "0,1", "0F0 0REDUCE_GRAD 0OPTIM_STEP", "0B0 0REDUCE_GRAD 0OPTIM_STEP"),
)
BACKWARD_BEFORE_FORWARD = Rule(
    "S201",
    "backward-before-forward",
    "A backward is listed before the forward of the same stage and microbatch.",
    "There is nothing yet to differentiate.",
    "Move the backward behind its forward.",
    _text(1, "0", "0B0 0F0"),
)
WEIGHT_BEFORE_INPUT = Rule(
    "S202",
    "weight-before-input",
    "A W is listed before the I of the same stage and microbatch.",
    "W uses what I has computed.",
    "Move W behind its I.",
    _text(1, "0", "0F0 0W0 0I0"),
)
INPUT_NOT_READY = Rule(
    "S203",
    "input-not-ready",
    "An action is listed before the neighbouring stage on the same rank has made its input.",
    "A rank runs its list in order, so the input can't be there.",
    "Run the stages forward in ascending order, and backward in descending order.",
    _text(1, "0 0", "1F0 0F0 1B0 0B0"),
)
STEP_BEFORE_GRADIENTS = Rule(
    "S204",
    "step-before-gradients",
    "The last OPTIM_STEP of a stage is listed before some of its gradients are computed.",
    "Those gradients are never applied: the step trains on a part of the batch.",
    "Move the OPTIM_STEP behind the stage's last backward, or add another one there.",
    _text(2, "0", "0F0 0B0 0F1 0OPTIM_STEP 0B1"),
)
GRADIENT_NEVER_APPLIED = Rule(
    "S205",
    "gradient-never-applied",
    "A stage has no OPTIM_STEP although other stages have.",
    "It would never learn. A schedule without any OPTIM_STEP leaves the update to the caller.",
    "Give every stage its OPTIM_STEP, on each rank that holds it, or none.",
    _text(1, "0 0", "0F0 1F0 1B0 0B0 1OPTIM_STEP"),
)
EMPTY_STEP = Rule(
    "S206",
    "empty-step",
    "An OPTIM_STEP is listed where no gradient has been accumulated since the one before.",
    "There is nothing to apply: most likely it is a duplicate, or stands in the wrong place.",
    "Remove it, or move it behind the backwards that it belongs to.",
    _text(1, "0", "0F0 0B0 0OPTIM_STEP 0OPTIM_STEP"),
)
UNEVEN_STEPS = Rule(
    "S207",
    "uneven-steps",
    "Two stages group the microbatches differently into their OPTIM_STEPs, or replicas of a stage "
    "have different numbers of them.",
    "A gradient is scaled by the microbatches of its step on the loss stage; elsewhere that scale "
    "would be wrong.",
    "Give every stage its OPTIM_STEPs after the same sets of microbatches.",
    _text(
        2,
        "0 0",
        "0F0 1F0 1B0 1OPTIM_STEP 0B0 0F1 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP",
    ),
)
REDUCE_BEFORE_GRADIENTS = Rule(
    "S208",
    "reduce-before-gradients",
    "A REDUCE_GRAD is listed before the gradients of its step are complete.",
    "What is computed after it is not summed over the replicas: they drift apart.",
    "Move the REDUCE_GRAD behind the last backward before the OPTIM_STEP.",
    _text(2, "0", "0F0 0F1 0B0 0REDUCE_GRAD 0B1 0OPTIM_STEP"),
)
STEP_WITHOUT_REDUCE = Rule(
    "S209",
    "step-without-reduce",
    "Gradients of a stage on several ranks are not summed by a REDUCE_GRAD; or those of a stage on "
    "one rank are not, though other such stages' are, over a group that the schedule hides.",
    "Each replica would apply its own gradients only: they drift apart.",
    "Put the stage's REDUCE_GRAD between its last backward and its OPTIM_STEP, on every rank.",
    _text(2, "0,1", "0F0 0B0 0OPTIM_STEP", "0F1 0B1 0OPTIM_STEP"),
)
EMPTY_REDUCE = Rule(
    "S210",
    "empty-reduce",
    "A REDUCE_GRAD is listed where no replica has a gradient that is not summed yet.",
    "Gradients that are summed already would be summed once more, or none at all.",
    "Remove it, or move it behind the backwards that it belongs to.",
    _text(
        2,
        "0,1",
        "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP",
    ),
)
WAIT_CYCLE = Rule(
    "S301",
    "wait-cycle",
    "Some actions wait for each other in a circle: a deadlock.",
    "None of them can ever run. A transfer needs both ends posted, and a transport keeps a part "
    "of each list's order (`--channel`), so an action can be stuck behind another one.",
    "Post one of the actions of the cycle earlier, or use a transport that keeps less order.",
    _text(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0 0F1 0SEND_ACT1 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1F0 1RECV_ACT1 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1",
    ),
)
UNMATCHED = Rule(
    "S302",
    "unmatched",
    "A send has no receive, a receive no send, or a REDUCE_GRAD lacks its turn on some replica.",
    "It waits for ever, or the transport matches it with something else.",
    "Add the other end, or remove this one.",
    _text(1, "0 1", "0F0 0SEND_ACT0 0RECV_GRAD0 0B0", "1RECV_ACT0 1F0 1B0"),
)
MIS_PAIRED = Rule(
    "S303",
    "mis-paired",
    "The j-th send of a channel and its j-th receive name different boundaries or microbatches.",
    "There are no tags: the receiver would get another tensor than it expects, without a word.",
    "Post sends and receives of a channel in the same order.",
    _text(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT1 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1",
    ),
)
MISSING_RECEIVE = Rule(
    "S304",
    "missing-receive",
    "A compute action runs before, or without, the receive of its input.",
    "It would work on whatever the buffer holds.",
    "List the receive before the action.",
    _text(
        1,
        "0 1",
        "0F0 0SEND_ACT0 0RECV_GRAD0 0B0",
        "1F0 1RECV_ACT0 1B0 1SEND_GRAD0",
    ),
)
SEND_BEFORE_COMPUTE = Rule(
    "S305",
    "send-before-compute",
    "A send is listed before, or without, the compute action that makes its payload.",
    "There is nothing to send yet.",
    "Move the send behind the compute action.",
    _text(
        1,
        "0 1",
        "0SEND_ACT0 0F0 0RECV_GRAD0 0B0",
        "1RECV_ACT0 1F0 1B0 1SEND_GRAD0",
    ),
)
NO_PEER = Rule(
    "S306",
    "no-peer",
    "A send or receive has no other rank at its other end.",
    "Neighbouring stages on one rank hand their tensors over directly, and the pipeline ends with "
    "its first and last stage.",
    "Remove it.",
    _text(1, "0", "0F0 0SEND_ACT0 0B0"),
)
VERSION_NOT_AVAILABLE = Rule(
    "S401",
    "version-not-available",
    "A forward reads a weight version that doesn't exist at its place in the list.",
    "Version v exists once v OPTIM_STEPs of the stage have run.",
    "Name an existing version, or move the forward behind the OPTIM_STEP that makes it.",
    _text(1, "0", "0F0@1 0B0 0OPTIM_STEP"),
)

RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        UNKNOWN_STAGE,
        UNKNOWN_MICROBATCH,
        WRONG_RANK,
        DUPLICATE_ACTION,
        MISSING_ACTION,
        MIXED_BACKWARD,
        SPLIT_MICROBATCH,
        BACKWARD_BEFORE_FORWARD,
        WEIGHT_BEFORE_INPUT,
        INPUT_NOT_READY,
        STEP_BEFORE_GRADIENTS,
        GRADIENT_NEVER_APPLIED,
        EMPTY_STEP,
        UNEVEN_STEPS,
        REDUCE_BEFORE_GRADIENTS,
        STEP_WITHOUT_REDUCE,
        EMPTY_REDUCE,
        WAIT_CYCLE,
        UNMATCHED,
        MIS_PAIRED,
        MISSING_RECEIVE,
        SEND_BEFORE_COMPUTE,
        NO_PEER,
        VERSION_NOT_AVAILABLE,
    )
}
