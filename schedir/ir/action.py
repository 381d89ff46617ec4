"""The typed actions that a rank's list is made of, and the constructors that generators call."""

from __future__ import annotations

import attrs

from schedir.ir.kinds import COUNTERPARTS, NAMES_VERSION, STAGE_WIDE, Kind

MAX_NUMBER = 999_999_999
"""The largest stage, microbatch, version or rank: nine digits, far beyond any schedule."""


def is_number(value: object) -> bool:
    """True for an int that a token can hold."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


# With an __init__ of its own, as generators make millions: that of attrs takes half as long again.
@attrs.frozen(init=False)
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

    def __init__(
        self, kind: Kind, stage: int, microbatch: int | None = None, version: int | None = None
    ) -> None:
        """An action with these fields."""
        # What most actions are is known at a glance.
        if not (
            version is None
            and type(stage) is type(microbatch) is int
            and 0 <= stage <= MAX_NUMBER
            and 0 <= microbatch <= MAX_NUMBER
            and type(kind) is Kind
            and kind not in STAGE_WIDE
        ):
            _check(kind, stage, microbatch, version)
        _set_kind(self, kind)
        _set_stage(self, stage)
        _set_microbatch(self, microbatch)
        _set_version(self, version)

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


# The slots, which __init__ fills past the `__setattr__` that refuses it.
_set_kind, _set_stage, _set_microbatch, _set_version = (
    getattr(Action, field.name).__set__ for field in attrs.fields(Action)
)


def _check(kind: Kind, stage: int, microbatch: int | None, version: int | None) -> None:
    """Raise ValueError for fields that no token can hold."""
    if type(kind) is not Kind:
        raise ValueError(f"kind must be a Kind, such as Kind.FORWARD, not {kind!r}")
    if not is_number(stage):
        raise ValueError(f"stage must be an int in 0..{MAX_NUMBER}, not {stage!r}")
    if (microbatch is None) != (kind in STAGE_WIDE):
        need = "no microbatch" if kind in STAGE_WIDE else "a microbatch"
        raise ValueError(f"{kind.name} takes {need}")
    if microbatch is not None and not is_number(microbatch):
        raise ValueError(f"microbatch must be an int in 0..{MAX_NUMBER}, not {microbatch!r}")
    if version is not None and kind not in NAMES_VERSION:
        raise ValueError(f"only FORWARD and RECOMPUTE name a weight version, not {kind.name}")
    if version is not None and not is_number(version):
        raise ValueError(f"version must be an int in 0..{MAX_NUMBER}, not {version!r}")


# The constructors below are what generators call. Kinds that they name often are looked up once.
_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
_BACKWARD_INPUT, _BACKWARD_WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def forward(stage: int, microbatch: int, version: int | None = None) -> Action:
    """Run the stage on the microbatch, reading weight `version` (None: the newest)."""
    return Action(_FORWARD, stage, microbatch, version)


def backward(stage: int, microbatch: int) -> Action:
    """Compute the gradients of the stage's input and parameters."""
    return Action(_BACKWARD, stage, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """Compute the gradient of the stage's input only; a `backward_weight` follows."""
    return Action(_BACKWARD_INPUT, stage, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """Compute the gradient of the stage's parameters, after its `backward_input`."""
    return Action(_BACKWARD_WEIGHT, stage, microbatch)


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


def offload_activation(stage: int, microbatch: int) -> Action:
    """Copy what the stage's backward of the microbatch needs to the host, and free it."""
    return Action(Kind.OFFLOAD, stage, microbatch)


def reload_activation(stage: int, microbatch: int) -> Action:
    """Copy what `offload_activation` has taken away back to the device."""
    return Action(Kind.RELOAD, stage, microbatch)
