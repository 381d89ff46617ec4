"""The rules: what a check rejects, its texts, and what `schedir explain` says about it.

Codes are stable and never reused. S1xx structure, S2xx ordering, S3xx communication, S4xx memory
and weights, S5xx performance. A rule's texts are templates, or functions if something is computed;
each example is a `.sched` text that the rule rejects.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import attrs

from schedir.checker.diagnostics import Diagnostic, Rule, fill, joined
from schedir.ir import (
    CHANNELS_IN_WORDS,
    CONSUMES,
    DEFAULT_CHANNEL,
    Kind,
)

# S1xx: every stage runs every microbatch once, on a rank that holds it.

UNKNOWN_STAGE = Rule(
    "S101",
    "unknown-stage",
    meaning="An action names a stage that the placement doesn't have.",
    why="No module exists to run it.",
    fix="Correct the stage, or add it to the placement.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 1F0
    """,
    message="there is no stage {action.stage}; the placement has {stages}",
    after_change=", or add the stage to the placement",
)

UNKNOWN_MICROBATCH = Rule(
    "S102",
    "unknown-microbatch",
    meaning="An action names a microbatch outside 0..M-1.",
    why="A step has exactly M microbatches, so no other microbatch has data.",
    fix="Correct the microbatch, or the schedule's number of microbatches.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 0F1 0B1
    """,
    message="there is no microbatch {action.microbatch}; the schedule has {microbatches}",
    after_change=", or say that the schedule has more microbatches",
)


WRONG_RANK = Rule(
    "S103",
    "wrong-rank",
    meaning="An action is listed on a rank that doesn't hold its stage.",
    why="The rank has neither the module nor its tensors.",
    fix="Move the action to a rank that holds the stage, or change the placement.",
    example="""
        microbatches 1
        placement 0 1
        rank 0: 0F0 1B0 0B0
        rank 1: 1F0
    """,
    message={
        "action": "rank {rank} does not hold stage {action.stage}",
        "lists": "the lists have stage{misplaced:|s} {elsewhere:and} on other ranks than the "
        "placement",
    },
    notes=({"action": "stage {action.stage} lives on rank {held:and}", "lists": ""},),
    advice={
        "action": "move {action} to rank {held:and}",
        "lists": "write the placement {placed}, or list the stages on the ranks that it names now",
    },
)


def _duplicate(finding: Diagnostic) -> str:
    # A forward is the same whatever version it reads.
    return f"{attrs.evolve(finding.action, version=None)} is listed twice"


DUPLICATE_ACTION = Rule(
    "S104",
    "duplicate-action",
    meaning="The same action is listed more than once.",
    why="Each stage runs each microbatch once; a second backward would add its gradient twice.",
    fix="Remove all but one.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 0B0
    """,
    message=_duplicate,
    labels=("again", "the first time"),
)

MISSING_ACTION = Rule(
    "S105",
    "missing-action",
    meaning="A stage never runs the forward, or the backward, of a microbatch.",
    why="The gradient would silently lack that microbatch, and the forward's activation would stay "
    "in memory to the end of the step. A backward is one B, or an I and its W.",
    fix="Add the missing action.",
    example="""
        microbatches 2
        placement 0
        rank 0: 0F0 0B0 0F1
    """,
    message="stage {action.stage} never runs {action.kind.name} on microbatch {action.microbatch}",
)

MIXED_BACKWARD = Rule(
    "S106",
    "mixed-backward",
    meaning="A stage has both a full backward B and a split one, I or W, for the same microbatch.",
    why="The gradient would be computed, and added, twice.",
    fix="Keep either the B, or the I and its W.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 0W0
    """,
    message="stage {action.stage} has both a BACKWARD and a {action.kind.name} for microbatch "
    "{action.microbatch}",
    labels=("a part of a split backward", "the full one"),
)


SPLIT_MICROBATCH = Rule(
    "S107",
    "split-microbatch",
    meaning="The forward of a microbatch runs on one replica of the stage, its backward, "
    "recomputation or copy on another.",
    why="The backward needs the activation, which stays on the rank that ran the forward.",
    fix="Run both on the same rank.",
    example="""
        microbatches 1
        placement 0,1
        rank 0: 0F0 0REDUCE_GRAD 0OPTIM_STEP
        rank 1: 0B0 0REDUCE_GRAD 0OPTIM_STEP
    """,
    message="stage {action.stage} runs microbatch {action.microbatch} forward on rank "
    "{other.rank}, but {action} is on rank {rank}",
    labels=("needs what the forward leaves", "its forward"),
)

# S2xx: each rank's compute is in an order that makes sense, and each gradient is applied once.

_listed_early = partial(
    Rule,
    message="{action} is listed before {other.action}, whose result it uses",
    labels=("uses a later result", "listed here"),
)

BACKWARD_BEFORE_FORWARD = _listed_early(
    "S201",
    "backward-before-forward",
    meaning="A backward is listed before the forward of the same stage and microbatch.",
    why="There is nothing yet to differentiate.",
    fix="Move the backward after its forward.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0B0 0F0
    """,
)

WEIGHT_BEFORE_INPUT = _listed_early(
    "S202",
    "weight-before-input",
    meaning="A W is listed before the I of the same stage and microbatch.",
    why="W uses the result of I.",
    fix="Move W after its I.",
    example="""
        microbatches 2
        placement 0
        rank 0: 0F0 0W0 0I0 0F1 0I1 0W1
    """,
)

INPUT_NOT_READY = _listed_early(
    "S203",
    "input-not-ready",
    meaning="An action is listed before the neighbouring stage on the same rank has made its "
    "input.",
    why="A rank runs its list in order, so the input does not exist yet.",
    fix="Run the stages forward in ascending order, and backward in descending order.",
    example="""
        microbatches 1
        placement 0 0
        rank 0: 1F0 0F0 1B0 0B0
    """,
)


STEP_BEFORE_GRADIENTS = Rule(
    "S204",
    "step-before-gradients",
    meaning="The last OPTIM_STEP of a stage is listed before some of its gradients are computed.",
    why="Those gradients are never applied: the step trains on a part of the batch.",
    fix="Move the OPTIM_STEP after the stage's last backward, or add another one there.",
    example="""
        microbatches 2
        placement 0
        rank 0: 0F0 0B0 0F1 0OPTIM_STEP 0B1
    """,
    message="{late} of stage {action.stage}'s gradients {late:is|are} computed after its last "
    "OPTIM_STEP",
    labels=("the last step", "never applied"),
)

GRADIENT_NEVER_APPLIED = Rule(
    "S205",
    "gradient-never-applied",
    meaning="A stage has no OPTIM_STEP although other stages have.",
    why="The stage would never learn. A schedule may leave the update to the caller, but then it "
    "has no OPTIM_STEP for any stage.",
    fix="List an OPTIM_STEP for every stage, on each rank that holds it, or none for any stage.",
    example="""
        microbatches 1
        placement 0 0
        rank 0: 0F0 1F0 1B0 0B0 1OPTIM_STEP
    """,
    message="stage {action.stage} has no OPTIM_STEP on rank {rank}, though other stages have",
)

EMPTY_STEP = Rule(
    "S206",
    "empty-step",
    meaning="An OPTIM_STEP has no gradient to apply: none was accumulated since the one before.",
    why="Most likely it is a duplicate, or in the wrong place.",
    fix="Remove it, or move it after the backwards whose gradients it applies.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 0OPTIM_STEP 0OPTIM_STEP
    """,
    message="stage {action.stage} has accumulated no gradient since its last OPTIM_STEP",
)

UNEVEN_STEPS = Rule(
    "S207",
    "uneven-steps",
    meaning="Two stages share parameters, but their OPTIM_STEPs apply different microbatches.",
    why="A tied parameter gets one gradient in each step, the sum over its stages. If the stages "
    "apply different microbatches, that sum is not the gradient of any loss.",
    fix="List the OPTIM_STEPs of tied stages after the same microbatches.",
    example="""
        microbatches 3
        placement 0 0
        rank 0: 0F0 1F0 0F1 1F1 0F2 1F2 1B0 1B1 0B0 0OPTIM_STEP 1OPTIM_STEP 1B2 0B1 0B2 \
            0OPTIM_STEP 1OPTIM_STEP
    """,
    options=(("ties", ((0, 1),)),),
    message="OPTIM_STEP {step} of stage {action.stage} applies microbatches {applied:ranges}, but "
    "that of the tied stage {other.action.stage} applies {expected:ranges}",
    advice="list the OPTIM_STEPs of both stages after the same microbatches",
)

REDUCE_BEFORE_GRADIENTS = Rule(
    "S208",
    "reduce-before-gradients",
    meaning="A REDUCE_GRAD is listed before the gradients of its step are complete.",
    why="Gradients computed after it are not summed over the replicas, so their weights drift "
    "apart.",
    fix="Move the REDUCE_GRAD after the last backward before the OPTIM_STEP.",
    example="""
        microbatches 2
        placement 0
        rank 0: 0F0 0F1 0B0 0REDUCE_GRAD 0B1 0OPTIM_STEP
    """,
    message="{late} of stage {action.stage}'s gradients {late:comes|come} after its REDUCE_GRAD",
    labels=("sums the gradients so far", "the last gradient"),
)


_UNSUMMED = "no REDUCE_GRAD sums stage {action.stage}'s gradients, though "

STEP_WITHOUT_REDUCE = Rule(
    "S209",
    "step-without-reduce",
    meaning="No REDUCE_GRAD sums the gradients of a stage that lives on several ranks, or whose "
    "weights are sharded. Or a stage on one rank has no REDUCE_GRAD although other stages on one "
    "rank have one, which sums over replicas outside the schedule.",
    why="Each replica would apply only the gradients that it computed, so the weights drift apart.",
    fix="Put the stage's REDUCE_GRAD between its last backward and its OPTIM_STEP, on every rank.",
    example="""
        microbatches 2
        placement 0,1
        rank 0: 0F0 0B0 0OPTIM_STEP
        rank 1: 0F1 0B1 0OPTIM_STEP
    """,
    message={
        "replicated": _UNSUMMED + "the stage lives on ranks {held:ranges}",
        "sharded": _UNSUMMED + "its weights are sharded",
        "alone": _UNSUMMED + "other stages on one rank have one",
    },
)

EMPTY_REDUCE = Rule(
    "S210",
    "empty-reduce",
    meaning="A REDUCE_GRAD has nothing to sum: no replica has a gradient that is not summed yet.",
    why="It would sum the same gradients a second time, or none.",
    fix="Remove it, or move it after the backwards whose gradients it sums.",
    example="""
        microbatches 2
        placement 0,1
        rank 0: 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP
        rank 1: 0F1 0B1 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP
    """,
    message="no replica of stage {action.stage} has a new gradient to sum",
)

UNEVEN_REPLICAS = Rule(
    "S211",
    "uneven-replicas",
    meaning="The replicas of a stage have different numbers of OPTIM_STEPs.",
    why="Their weights differ from the first missing step on.",
    fix="List the same OPTIM_STEPs on every replica.",
    example="""
        microbatches 2
        placement 0,1
        rank 0: 0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP
        rank 1: 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP
    """,
    message="stage {action.stage} has {steps} OPTIM_STEPs on rank {rank}, but {fewest} on rank "
    "{least}",
)


def _across(finding: Diagnostic) -> str:
    steps = finding.facts["steps"]
    at = next(at for at, step in enumerate(steps) if step != steps[0])
    return (
        f"a sum of stage {finding.action.stage} belongs to OPTIM_STEP {steps[0]} on rank "
        f"{finding.rank}, but to OPTIM_STEP {steps[at]} on rank {finding.locations[at].rank}"
    )


REDUCE_ACROSS_STEPS = Rule(
    "S212",
    "reduce-across-steps",
    meaning="REDUCE_GRADs that meet belong to different OPTIM_STEPs on different replicas.",
    why="The sum mixes the gradients of two steps, and the replicas apply different sums.",
    fix="List the same number of REDUCE_GRADs between two OPTIM_STEPs on every replica.",
    example="""
        microbatches 4
        placement 0,1
        rank 0: 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP
        rank 1: 0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP 0F3 0B3 0REDUCE_GRAD 0REDUCE_GRAD 0OPTIM_STEP
    """,
    message=_across,
)

NO_STEP = Rule(
    "S213",
    "no-step",
    severity="note",
    strict=False,
    meaning="No stage has an OPTIM_STEP, so the schedule updates nothing itself.",
    why="The gradients only accumulate: the caller must apply them, and clear them. Schedules in "
    "torch's format always work this way, so `--strict` allows it.",
    fix="End each list with the OPTIM_STEPs of its stages, as the option `--add-steps` and "
    "`schedir.append_steps` do, or step the optimizer yourself.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0
    """,
    message="there is no OPTIM_STEP: the update is left to the caller",
    advice="end each list with the OPTIM_STEPs of its stages (--add-steps lists them), or step the "
    "optimizer yourself",
)

RECOMPUTE_BEFORE_FORWARD = _listed_early(
    "S214",
    "recompute-before-forward",
    meaning="An R is listed before the forward of the same stage and microbatch.",
    why="R runs the forward again, on the input that F keeps.",
    fix="Move the R after its forward, or remove it: F then keeps its activation.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0R0 0F0 0B0
    """,
)

BACKWARD_BEFORE_RECOMPUTE = _listed_early(
    "S215",
    "backward-before-recompute",
    meaning="A backward is listed before the recomputation of the same stage and microbatch.",
    why="A forward with an R keeps only its input, and R makes the activation that the backward "
    "needs.",
    fix="Move the R before its B or I, or remove it: F then keeps its activation.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 0R0
    """,
)

DIFFERENT_RATES = Rule(
    "S216",
    "different-rates",
    severity="note",
    strict=False,
    meaning="Stages step after different sets of microbatches; for example, one steps more often.",
    why="Each step applies the mean over its microbatches, so every stage trains. But no update "
    "covers the whole model with the same microbatches. PipeDream's replicated stages work this "
    "way, so `--strict` allows it: they step once per round of their replicas, the other stages "
    "after every minibatch. If you did not intend this, an OPTIM_STEP is in the wrong place.",
    fix="List the OPTIM_STEPs of every stage after the same sets of microbatches.",
    example="""
        microbatches 2
        placement 0 0
        rank 0: 0F0 1F0 1B0 1OPTIM_STEP 0B0 0F1 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP
    """,
    message="OPTIM_STEP {step} of stage {action.stage} applies microbatches {applied:ranges}, but "
    "that of the loss stage applies {expected:ranges}",
    labels=("the mean over these", "the loss stage's"),
    notes=(
        "{differing} of the {stages} stages {differing:groups|group} the microbatches differently "
        "from the loss stage",
    ),
    advice="list the OPTIM_STEPs of both stages after the same microbatches, unless you intend "
    "this",
)

USED_TOO_EARLY = _listed_early(
    "S217",
    "used-too-early",
    meaning="An action uses a value that a later action of its rank makes.",
    why="A rank runs its list in order, so the value does not exist yet.",
    fix="Move the action after the one that makes the value.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0OFFLOAD0 0B0 0RELOAD0
    """,
    message="{action} is listed before {other.action}, which makes its {word}",
)


USED_AFTER_ITS_END = Rule(
    "S218",
    "used-after-its-end",
    meaning="An action uses a value that does not exist: another action has ended it, or no action "
    "makes it. Or the action makes a value that already exists.",
    why="There is nothing to use, or one of two values is lost.",
    fix="List the action while the value exists, or add the action that makes it.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0B0 0OFFLOAD0
    """,
    message={
        "twice": "{action} makes the {word} while there is one",
        "gone": "{action} uses the {word} after {other.action} has ended it",
        "missing": "{action} uses the {word} that no action makes",
    },
    advice="list {action} where the {word} exists",
)

# S3xx: each send meets its receive, compute has its input, and nobody waits forever.

MEETS = "waits for"


def _deadlock(finding: Diagnostic) -> str:
    ranks = sorted({place.rank for place in finding.locations})
    if len(ranks) == 1:
        return f"deadlock: rank {ranks[0]} waits on itself"
    each_other = "each other" if len(ranks) == 2 else "one another"
    return f"deadlock: ranks {joined(ranks)} wait on {each_other}"


def _cycle(finding: Diagnostic) -> Iterator[tuple[str, ...]]:
    """Each action of the cycle, why it waits, and the action that it waits for."""
    places, reasons = finding.locations, finding.facts["reasons"]
    following = [*map(str, places[1:]), f"{places[0]}   (cycle)"]
    for place, why, awaited in zip(places, reasons, following, strict=True):
        yield str(place), why, awaited


def _clean_under(finding: Diagnostic) -> Iterator[str]:
    """The channel models under which the schedule is clean."""
    channel, clean = finding.facts["channel"], finding.facts["clean"]
    if finding.facts["complete"]:
        yield f"under --channel {channel}; clean under {joined(clean or ('no other',))}"
        # Not where a model was asked for that no transport can be relied on for.
        if clean and channel == DEFAULT_CHANNEL:
            yield "it runs on gloo (async), but it can hang on NCCL (rank)"
    else:
        yield "under every channel model"
    if finding.facts["inserted"]:
        yield "in the list with the communication that schedir inserts: `schedir export` prints it"


def _no_move(finding: Diagnostic) -> str:
    if any(
        why == MEETS and place.action.kind is Kind.OPTIM_STEP
        for place, why in zip(finding.locations, finding.facts["reasons"], strict=True)
    ):
        return "list the OPTIM_STEPs of tied stages after the last backward of all of them"
    return "none of the moves tried fixes it"


WAIT_CYCLE = Rule(
    "S301",
    "wait-cycle",
    meaning="Some actions wait for each other in a circle: a deadlock.",
    why="None of them can ever run. A transfer needs both ends posted. Stages that share "
    "parameters (`--tie`) step together. And a transport keeps a part of each list's order, so an "
    "action may have to wait for one that is listed before it. The channel models (`--channel`) "
    "say how much order a transport keeps: "
    + "; ".join(f"`{model}`, {words}" for model, words in CHANNELS_IN_WORDS.items())
    + ". A list that is clean under `rank` runs on NCCL and on gloo. A list that is clean only "
    "under `async` runs on gloo. `pair`, `edge` and `direction` need more than CUDA promises.",
    fix="Post one of the actions of the cycle earlier. Or post a rank's sends and receives that "
    "block each other as one batch, `(0SEND_ACT1;0RECV_GRAD0)`. Or use a transport that keeps less "
    "order.",
    example="""
        microbatches 2
        placement 0 1
        rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
        rank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1
    """,
    message=_deadlock,
    notes=_clean_under,
    advice=_no_move,
    after_change="{inserted:, in the list as it was given|}",
    listed=1,
    trace=_cycle,
)


UNMATCHED = Rule(
    "S302",
    "unmatched",
    meaning="A send has no receive, a receive no send, or a REDUCE_GRAD no counterpart on some "
    "replica.",
    why="It waits forever, or the transport matches it with another transfer.",
    fix="Add the other end, or remove this one.",
    example="""
        microbatches 1
        placement 0 1
        rank 0: 0F0 0SEND_ACT0 0RECV_GRAD0 0B0
        rank 1: 1RECV_ACT0 1F0 1B0
    """,
    message={
        "send": "{action} is never received",
        "receive": "{action} is never sent",
        "collective": "{action} has no counterpart on rank {peer}",
    },
)


def _pairs(finding: Diagnostic) -> Iterator[tuple[str, ...]]:
    """The transfers around the first wrong pair of the channel, in order."""
    yield "", f"rank {finding.other.rank} sends", f"rank {finding.rank} receives", ""
    for turn, send, receive in finding.facts["pairs"]:
        action = send.action
        what = "output" if action.kind is Kind.SEND_ACT else "input gradient"
        payload = f"the {what} of stage {action.stage} for microbatch {action.microbatch}"
        yield (
            f"{turn}",
            f"#{send.index} {action}",
            f"#{receive.index} {receive.action}",
            "" if receive.action == action.counterpart else f"gets {payload}",
        )


MIS_PAIRED = Rule(
    "S303",
    "mis-paired",
    meaning="The j-th send and the j-th receive of a channel name different boundaries or "
    "microbatches.",
    why="Transfers have no tags, so the receiver would silently get the wrong tensor.",
    fix="List the sends and the receives of a channel in the same order.",
    example="""
        microbatches 2
        placement 0 1
        rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
        rank 1: 1RECV_ACT1 1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1
    """,
    message="{action} would get the payload of {other.action}",
    labels=("the receive", "the send that it meets", "the send that it should meet"),
    notes=(
        "{wrong} of the channel's {transfers} transfers from rank {other.rank} to rank {rank} "
        "{wrong:is|are} mis-paired",
    ),
    trace=_pairs,
)


def _unreceived(finding: Diagnostic) -> str:
    action, relation = finding.action, "before" if finding.facts["case"] == "late" else "without"
    receive = attrs.evolve(action, kind=CONSUMES[action.kind], version=None)
    return f"{action} runs {relation} {receive}, the receive of its input"


MISSING_RECEIVE = Rule(
    "S304",
    "missing-receive",
    meaning="A compute action runs before, or without, the receive of its input.",
    why="It would compute on whatever the buffer holds.",
    fix="List the receive before the action.",
    example="""
        microbatches 1
        placement 0 1
        rank 0: 0F0 0SEND_ACT0 0RECV_GRAD0 0B0
        rank 1: 1F0 1RECV_ACT0 1B0 1SEND_GRAD0
    """,
    message=_unreceived,
    labels=("uses the received tensor", "the receive, listed later"),
)

SEND_BEFORE_COMPUTE = Rule(
    "S305",
    "send-before-compute",
    meaning="A send is listed before, or without, the compute action that makes its payload.",
    why="There is nothing to send yet.",
    fix="Move the send after the compute action.",
    example="""
        microbatches 1
        placement 0 1
        rank 0: 0SEND_ACT0 0F0 0RECV_GRAD0 0B0
        rank 1: 1RECV_ACT0 1F0 1B0 1SEND_GRAD0
    """,
    message="{action} is listed before {other.action}, which makes its payload",
    labels=("nothing to send yet", "makes the payload"),
)


_NO_OTHER_RANK = "{action} has no other rank at its other end: "

NO_PEER = Rule(
    "S306",
    "no-peer",
    meaning="A send or receive has no other rank at its other end.",
    why="Neighbouring stages on one rank hand their tensors over directly, and the pipeline ends "
    "with its first and last stage.",
    fix="Remove it.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0SEND_ACT0 0B0
    """,
    message={
        "end": _NO_OTHER_RANK + "the pipeline ends here",
        "local": _NO_OTHER_RANK + "its neighbour is on the same rank",
        "elsewhere": "rank {rank} does not run stage {action.stage} on microbatch "
        "{action.microbatch}, so {action} has nothing to work on",
    },
)

GROUP_ORDER = Rule(
    "S307",
    "group-order",
    meaning="The ranks that hold a stage list its UNSHARDs and REDUCE_GRADs in different orders.",
    why="The k-th of them on one rank meets the k-th on the others. Ranks that make different "
    "calls wait for ever, or mix up what they send.",
    fix="List the UNSHARDs and REDUCE_GRADs of a stage in the same order on all of its ranks.",
    example="""
        microbatches 2
        placement 0,1
        rank 0: 0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP
        rank 1: 0UNSHARD 0F1 0B1 0REDUCE_GRAD 0RESHARD 0UNSHARD 0RESHARD 0OPTIM_STEP
    """,
    message="{action} on rank {rank} meets {other.action} on rank {other.rank}",
    labels=("a call of stage {action.stage}'s group", "the same call on another rank"),
)

# S4xx: weight versions and activations, what exists and how much is alive at once. S402 is retired:
# an activation is never released where a backward is missing, which S105 says.

VERSION_NOT_AVAILABLE = Rule(
    "S401",
    "version-not-available",
    meaning="A forward reads a weight version that doesn't exist at its place in the list.",
    why="Version v exists once v OPTIM_STEPs of the stage have run.",
    fix="Name an existing version, or move the forward after the OPTIM_STEP that makes it.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0@1 0B0 0OPTIM_STEP
    """,
    message="stage {action.stage} has no version {action.version} here; its newest is {newest}",
    after_change=", or list the forward after the OPTIM_STEP that makes version {action.version}",
)

DELAY_ABOVE_LIMIT = Rule(
    "S403",
    "delay-above-limit",
    meaning="A gradient is applied too many updates after the weight version that it was computed "
    "at.",
    why="A gradient that is stale by many updates can keep training from converging.",
    fix="Keep fewer microbatches in flight between updates, or raise --max-delay.",
    example="""
        microbatches 3
        placement 0
        rank 0: 0F0 0F1 0F2 0B0 0OPTIM_STEP 0B1 0OPTIM_STEP 0B2 0OPTIM_STEP
    """,
    options=(("max_delay", 1),),
    message="stage {action.stage} applies the gradient of microbatch {action.microbatch} {delay} "
    "updates late; the limit is {limit}",
    labels=("reads the older version", "its gradient"),
    notes=("{above} of the stage's microbatches {above:is|are} above the limit",),
)

VERSIONS_ABOVE_LIMIT = Rule(
    "S404",
    "versions-above-limit",
    meaning="More weight versions of a stage are alive at once than allowed.",
    why="Each version besides the newest is a copy of the stage's weights.",
    fix="Keep fewer microbatches in flight between updates, or raise --max-versions.",
    example="""
        microbatches 3
        placement 0
        rank 0: 0F0 0F1 0F2 0B0 0OPTIM_STEP 0B1 0OPTIM_STEP 0B2 0OPTIM_STEP
    """,
    options=(("max_versions", 1),),
    message="{alive} weight versions of stage {action.stage} are alive at once on rank {rank}; the "
    "limit is {limit}",
    labels=("makes one too many",),
)


ACTIVATIONS_ABOVE_LIMIT = Rule(
    "S405",
    "activations-above-limit",
    meaning="A rank holds more activations at once than allowed.",
    why="The activations may not fit in the device's memory.",
    fix="Start backwards earlier, run forwards again (`schedir.recompute`), or raise "
    "--max-activations. With `--held-until I` an activation doesn't count between its I and its W.",
    example="""
        microbatches 3
        placement 0
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
    """,
    options=(("max_activations", 2),),
    message="rank {rank} holds {peak} activations at once; the limit is {limit}",
    labels=("the peak",),
    notes=("{until_input:an activation counts until its I|}",),
)

VERSIONS_DISAGREE = Rule(
    "S406",
    "versions-disagree",
    severity="note",
    meaning="A microbatch runs at different weight versions on different stages.",
    why="Its gradient does not belong to any single version of the model. PipeDream works this way "
    "by design; its vertical sync gives every stage the same version.",
    fix="Name one version for all stages, as in `0F4@1`.",
    example="""
        microbatches 2
        placement 0 0
        rank 0: 0F0 1F0 0F1 1B0 1OPTIM_STEP 0B0 0OPTIM_STEP 1F1 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP
    """,
    message="microbatch {action.microbatch} runs at version {version} on stage {action.stage}, but "
    "at version {other_version} on stage {other.action.stage}",
    labels=("reads one version", "reads another"),
    notes=(
        "{differing} of the {microbatches} microbatches {differing:runs|run} at versions that "
        "differ between stages",
    ),
)

TIED_VERSIONS_DISAGREE = Rule(
    "S407",
    "tied-versions-disagree",
    meaning="Stages that share parameters run a microbatch at different versions of them.",
    why="A tied parameter is one parameter. One forward pass would use two versions of it, and the "
    "sum of their gradients is not the gradient of any model.",
    fix="Name one version for the tied stages (`0F4@1`, as in vertical sync), update after "
    "all microbatches, or leave the parameter untied.",
    example="""
        microbatches 2
        placement 0 1
        rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0OPTIM_STEP 0RECV_GRAD1 0B1 \
            0OPTIM_STEP
        rank 1: 1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1OPTIM_STEP 1F1 1B1 1SEND_GRAD1 \
            1OPTIM_STEP
    """,
    options=(("ties", ((0, 1),)),),
    message="stages {action.stage} and {other.action.stage} share parameters, but run microbatch "
    "{action.microbatch} at versions {version} and {other_version}",
    labels=("reads one version", "reads another"),
    notes=(
        "{differing} of the {microbatches} microbatches {differing:runs|run} at versions that "
        "differ between the tied stages",
    ),
)

RECOMPUTE_AT_ANOTHER_VERSION = Rule(
    "S408",
    "recompute-at-another-version",
    meaning="An R names a different weight version from the one that its forward reads.",
    why="At other weights the R computes another output than the one that the stage sent on, so "
    "the gradient would be wrong.",
    fix="Leave the version out of the R: it then reads the version of its forward.",
    example="""
        microbatches 2
        placement 0
        rank 0: 0F0 0F1 0B0 0OPTIM_STEP 0R1@1 0B1 0OPTIM_STEP
    """,
    message="{action} reads version {action.version}, but {other.action} reads version {version}",
    labels=("reads one version", "reads another"),
)

NEVER_ENDED = Rule(
    "S409",
    "never-ended",
    meaning="An action makes a value that no other action ends.",
    why="The value would stay in memory to the end of the step.",
    fix="Add the action that ends the value, or remove the one that makes it.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0OFFLOAD0 0B0
    """,
    message="no action ends the {word} that {action} makes",
    advice="add the action that ends it, or remove {action}",
)

VERSION_OF_SHARDED = Rule(
    "S410",
    "version-of-sharded-stage",
    meaning="An action names a weight version of a stage whose weights are sharded.",
    why="UNSHARD gathers the newest weights. Older versions are not kept: a rank has only its "
    "shard of them.",
    fix="Leave the version out, or do not shard the stage.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0UNSHARD 0F0@0 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP
    """,
    message="{action} names a version, but the weights of stage {action.stage} are sharded",
)

SHARDED_ON_SEVERAL = Rule(
    "S411",
    "sharded-on-several-ranks",
    meaning="A stage whose weights are sharded is on several ranks of the list.",
    why="A gathering waits for everybody who has a shard, and these ranks would gather at "
    "different times. The ranks over which a stage is sharded all run the same rank's list.",
    fix="List the stage on one rank, or leave out its UNSHARDs and RESHARDs.",
    example="""
        microbatches 2
        placement 0,1
        rank 0: 0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP
        rank 1: 0UNSHARD 0F1 0B1 0RESHARD 0REDUCE_GRAD 0OPTIM_STEP
    """,
    message="stage {action.stage} is sharded, but ranks {held:ranges} of the list run it",
    labels=("gathers its weights",),
    advice="list stage {action.stage} on one rank, or leave out its UNSHARDs and RESHARDs",
)

# S5xx: correct, but slower than necessary.


NEEDLESS_SPLIT = Rule(
    "S503",
    "needless-split",
    severity="note",
    meaning="An I is directly followed by its W, so splitting that backward gains nothing.",
    why="A split backward goes through the autograd graph twice, one B only once.",
    fix="Write one B, or put other work between the two.",
    example="""
        microbatches 1
        placement 0
        rank 0: 0F0 0I0 0W0
    """,
    message={
        "one": "{action} and {other.action} could be one B",
        "several": "{pairs} pairs of an I and its W could be one B each",
    },
    advice="write {action.stage}B{action.microbatch} in place of {action} and {other.action}",
)

GROUP_SIZE = Rule(
    "S504",
    "group-size",
    severity="note",
    meaning="An interleaved schedule runs the microbatches in groups whose size is not the number "
    "of ranks, which makes the step longer.",
    why="If a group has as many microbatches as there are ranks, each chunk's last microbatch "
    "leaves just when the next chunk's first one is due (arXiv 2104.04473, section 2.2).",
    fix="Make the group size the number of ranks: `--set group_size=P`.",
    example="""
        microbatches 2
        placement 0 1 0 1
        rank 0: 0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1
        rank 1: 1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1
    """,
    message="groups of {group} {group:microbatch|microbatches} on {ranks} ranks make the step "
    "longer",
    notes=(
        "the step takes {makespan:g}; interleaved 1F1B in groups of {ranks} takes {possible:g}",
        "{times}",
    ),
    advice="make the group size {ranks}",
)


def _exposed_notes(finding: Diagnostic) -> Iterator[str]:
    yield finding.facts["times"]
    if finding.facts["possible"] < finding.facts["shortest"]:
        yield fill("with every send posted promptly, the step would take {possible:g}", finding)


EXPOSED_COMMUNICATION = Rule(
    "S506",
    "exposed-communication",
    severity="warning",
    meaning="A send or receive is listed where it makes the step longer under the channel model "
    "than if every send were posted as soon as its payload is made.",
    why="The payload is ready, but it is not sent while other stages wait for it; or the transport "
    "keeps an order in which other communication waits behind this.",
    fix="List each send right after the compute that makes its payload, and each receive after "
    "what it would hold up, or let schedir insert the communication.",
    example="""
        microbatches 2
        placement 0 1
        rank 0: 0F0 0F1 0SEND_ACT0 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
        rank 1: 1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1
    """,
    message="{action} {posted}: the step takes {makespan:g} rather than {shortest:g}",
    labels=("makes the step longer", "could stand beside this"),
    notes=_exposed_notes,
)

RULES: dict[str, Rule] = {
    value.code: value for value in list(globals().values()) if isinstance(value, Rule)
}

RETIRED = {"S402": "S105", "S501": "S506", "S502": "S506", "S505": "S506"}
"""Codes that are not reported any more, each with the code that now covers its fault."""
