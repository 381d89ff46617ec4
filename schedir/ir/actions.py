"""The kinds of action with their traits, and the typed actions that a rank's list is made of."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import attrs


@attrs.frozen(kw_only=True)
class Traits:
    """What the rest of schedir has to know of a kind: all sets and tables of kinds are made of it.

    `word` names the kind for people; `cost` is the textbook's, in forwards. A `stage_wide` action
    names no microbatch. A rank runs what `computes` in list order. What `reads_weights` uses the
    version that its FORWARD reads; what `differentiates` is a backward, or a part of one, and what
    `completes_gradients` ends the microbatch's share of the parameters' gradients. The activation
    of a (stage, microbatch) lives until what `releases_activation`. A send names the receive that
    it `meets`, and how many stages further on that stands; compute names the receive that it
    `consumes`, where its input comes from another rank.
    """

    word: str
    cost: int = 0
    stage_wide: bool = False
    computes: bool = False
    reads_weights: bool = False
    differentiates: bool = False
    completes_gradients: bool = False
    releases_activation: bool = False
    meets: tuple[str, int] | None = None
    consumes: str | None = None


_UNKNOWN = Traits(word="")


class Kind(StrEnum):
    """What an action does; the value is its token in the text form. `traits` says the rest."""

    traits: Traits

    # With a default, as `Kind("F")`, which finds the member of a token, has no traits to give.
    def __new__(cls, token: str, traits: Traits = _UNKNOWN) -> Kind:
        """A row of the table below, or the member that a token names."""
        kind = str.__new__(cls, token)
        kind._value_ = token
        kind.traits = traits
        return kind

    FORWARD = (
        "F",
        Traits(
            word="forward",
            cost=1,
            computes=True,
            reads_weights=True,
            consumes="RECV_ACT",
        ),
    )
    BACKWARD = (
        "B",
        Traits(
            word="backward",
            cost=2,
            computes=True,
            reads_weights=True,
            differentiates=True,
            completes_gradients=True,
            releases_activation=True,
            consumes="RECV_GRAD",
        ),
    )
    BACKWARD_INPUT = (
        "I",
        Traits(
            word="gradient of the input",
            cost=1,
            computes=True,
            reads_weights=True,
            differentiates=True,
            consumes="RECV_GRAD",
        ),
    )
    BACKWARD_WEIGHT = (
        "W",
        Traits(
            word="gradient of the weights",
            cost=1,
            computes=True,
            reads_weights=True,
            differentiates=True,
            completes_gradients=True,
            releases_activation=True,
        ),
    )
    RECOMPUTE = (
        "R",
        Traits(
            word="recomputation",
            cost=1,
            computes=True,
            reads_weights=True,
        ),
    )
    SEND_ACT = "SEND_ACT", Traits(word="send of the output", meets=("RECV_ACT", 1))
    RECV_ACT = "RECV_ACT", Traits(word="receive of the input")
    SEND_GRAD = "SEND_GRAD", Traits(word="send of the input's gradient", meets=("RECV_GRAD", -1))
    RECV_GRAD = "RECV_GRAD", Traits(word="receive of the output's gradient")
    REDUCE_GRAD = "REDUCE_GRAD", Traits(word="sum of the gradients", stage_wide=True)
    OPTIM_STEP = "OPTIM_STEP", Traits(word="update of the weights", stage_wide=True, computes=True)


def _kinds(have: Callable[[Traits], object]) -> frozenset[Kind]:
    return frozenset(kind for kind in Kind if have(kind.traits))


STAGE_WIDE = _kinds(lambda traits: traits.stage_wide)
"""Actions of a whole stage, which name no microbatch."""
COMPUTE = _kinds(lambda traits: traits.computes)
"""What occupies a rank: it runs these in list order."""
READS_WEIGHTS = _kinds(lambda traits: traits.reads_weights)
"""What uses the weight version that the FORWARD of its (stage, microbatch) reads."""
BACKWARDS = _kinds(lambda traits: traits.differentiates)
"""The full backward, and the two parts of a split one."""
NAMES_VERSION = READS_WEIGHTS - BACKWARDS
"""What may say which version that is."""
COMPLETES_GRADIENTS = _kinds(lambda traits: traits.completes_gradients)
"""After these a microbatch's gradients of the stage's parameters are complete."""
RELEASES_ACTIVATION = _kinds(lambda traits: traits.releases_activation)
"""An activation lives until one of these; `activations` says from when."""

_ENDS = [(send, *send.traits.meets) for send in Kind if send.traits.meets]
COUNTERPARTS = {send: (Kind(receive), further) for send, receive, further in _ENDS} | {
    Kind(receive): (send, -further) for send, receive, further in _ENDS
}
"""For each send and receive, the kind of its other end, and how many stages further that is."""
CONSUMES = {kind: Kind(kind.traits.consumes) for kind in Kind if kind.traits.consumes}
"""For compute, the receive of its input where that is made on another rank."""
SENDS = frozenset(send for send, _, _ in _ENDS)
RECEIVES = frozenset(COUNTERPARTS) - SENDS
COMMUNICATION = SENDS | RECEIVES
"""Point-to-point communication, which the pass inserts. REDUCE_GRAD is the author's to place."""


MAX_NUMBER = 999_999_999
"""The largest stage, microbatch, version or rank: nine digits, far beyond any schedule."""


def is_number(value: object) -> bool:
    """True for an int that a token can hold."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


@attrs.frozen
class Action:
    """One entry of a rank's list.

    `stage` is the global stage index. `microbatch` is None exactly for REDUCE_GRAD and OPTIM_STEP,
    which are stage-wide. `version` is the weight version that a FORWARD reads, None for the newest,
    or that a RECOMPUTE reads, which is that of its FORWARD, None to leave it unsaid.

    Raises ValueError for fields that no token can hold.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    version: int | None = None

    def __attrs_post_init__(self) -> None:
        kind, stage, microbatch = self.kind, self.stage, self.microbatch
        # A generator makes millions of these; what most of them are is known at a glance.
        if (
            type(kind) is Kind
            and self.version is None
            and type(stage) is int
            and type(microbatch) is int
            and 0 <= stage <= MAX_NUMBER
            and 0 <= microbatch <= MAX_NUMBER
            and kind not in STAGE_WIDE
        ):
            return
        if type(self.kind) is not Kind:
            raise ValueError(f"kind must be a Kind, such as Kind.FORWARD, not {self.kind!r}")
        if not is_number(self.stage):
            raise ValueError(f"stage must be an int in 0..{MAX_NUMBER}, not {self.stage!r}")
        if (self.microbatch is None) != (self.kind in STAGE_WIDE):
            need = "no microbatch" if self.kind in STAGE_WIDE else "a microbatch"
            raise ValueError(f"{self.kind.name} takes {need}")
        if self.microbatch is not None and not is_number(self.microbatch):
            raise ValueError(
                f"microbatch must be an int in 0..{MAX_NUMBER}, not {self.microbatch!r}"
            )
        if self.version is not None:
            if self.kind not in NAMES_VERSION:
                raise ValueError(
                    f"only FORWARD and RECOMPUTE name a weight version, not {self.kind.name}"
                )
            if not is_number(self.version):
                raise ValueError(f"version must be an int in 0..{MAX_NUMBER}, not {self.version!r}")

    @property
    def counterpart(self) -> Action | None:
        """The receive that a send meets, or the send that a receive meets; None where there is
        none, for other kinds, and for what would cross the first stage."""
        if self.kind not in COUNTERPARTS:
            return None
        kind, further = COUNTERPARTS[self.kind]
        stage = self.stage + further
        return Action(kind, stage, self.microbatch) if stage >= 0 else None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.kind.value}{microbatch}{version}"


# The constructors below are what generators call.


def forward(stage: int, microbatch: int, version: int | None = None) -> Action:
    """Run the stage on the microbatch, reading weight `version` (None: the newest)."""
    return Action(Kind.FORWARD, stage, microbatch, version)


def backward(stage: int, microbatch: int) -> Action:
    """Compute the gradients of the stage's input and parameters."""
    return Action(Kind.BACKWARD, stage, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """Compute the gradient of the stage's input only; a `backward_weight` follows."""
    return Action(Kind.BACKWARD_INPUT, stage, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """Compute the gradient of the stage's parameters, after its `backward_input`."""
    return Action(Kind.BACKWARD_WEIGHT, stage, microbatch)


def recompute_forward(stage: int, microbatch: int, version: int | None = None) -> Action:
    """Run the forward again, before the backward: `forward` then keeps its input alone.

    `version` may say which weight version that reads: the one of its `forward`, and no other.
    """
    return Action(Kind.RECOMPUTE, stage, microbatch, version)


def send_act(stage: int, microbatch: int) -> Action:
    """Send this stage's output to the rank that runs the next stage on the microbatch."""
    return Action(Kind.SEND_ACT, stage, microbatch)


def recv_act(stage: int, microbatch: int) -> Action:
    """Receive this stage's input."""
    return Action(Kind.RECV_ACT, stage, microbatch)


def send_grad(stage: int, microbatch: int) -> Action:
    """Send the gradient of this stage's input."""
    return Action(Kind.SEND_GRAD, stage, microbatch)


def recv_grad(stage: int, microbatch: int) -> Action:
    """Receive the gradient of this stage's output."""
    return Action(Kind.RECV_GRAD, stage, microbatch)


def reduce_grad(stage: int) -> Action:
    """Sum the stage's accumulated gradients over the ranks that hold it."""
    return Action(Kind.REDUCE_GRAD, stage)


def optim_step(stage: int) -> Action:
    """Apply the gradients accumulated since the stage's last `optim_step`."""
    return Action(Kind.OPTIM_STEP, stage)
