"""The entries of a rank's list: typed actions, alone or several together.

Generators call the functions that make them.

An entry of several is an overlapped pair, or a batch of communication:

(0F4;7B3)                   a forward and a backward as one piece of compute: it starts when the
                            inputs of both are there, and hands on both outputs when it ends
(0SEND_ACT1;0RECV_GRAD0)    sends and receives posted as one, so that no order among them can
                            block; each still meets its own partner on its channel
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from schedir.ir.kinds import (
    COMMUNICATION,
    CONSUMES,
    COUNTERPARTS,
    HOMES,
    NAMES_VERSION,
    STAGE_WIDE,
    Kind,
)

MAX_NUMBER = 999_999_999
"""The largest stage, microbatch, version or rank: nine digits, far beyond any schedule."""


def is_number(value: object) -> bool:
    """True for an int that a token can hold."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


# With an __init__ of its own, as generators make millions: that of attrs takes half as long again.
@attrs.frozen(init=False)
class Action:
    """One action in a rank's list.

    `stage` is the global stage index. `microbatch` is None for UNSHARD, RESHARD, REDUCE_GRAD and
    OPTIM_STEP, which concern a whole stage, and an int for every other kind. `version` is the
    weight version that a FORWARD reads; None stands for the newest. A RECOMPUTE reads the version
    of its FORWARD, and may name it.

    Raises ValueError for fields that no token can hold.

    >>> import schedir
    >>> action = schedir.Action(schedir.Kind.FORWARD, stage=0, microbatch=4, version=1)
    >>> str(action)
    '0F4@1'
    >>> action == schedir.forward(0, 4, version=1)
    True
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
        """The receive that this send meets, or the send that this receive meets.

        None for other kinds, and at the first stage, which has no stage before it.
        """
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
    if (microbatch is None) != (kind in STAGE_WIDE):
        need = "no microbatch" if kind in STAGE_WIDE else "a microbatch"
        raise ValueError(f"{kind.name} takes {need}")
    if version is not None and kind not in NAMES_VERSION:
        named = " and ".join(each.name for each in Kind if each in NAMES_VERSION)
        raise ValueError(f"only {named} name a weight version, not {kind.name}")
    for name, number in (("stage", stage), ("microbatch", microbatch), ("version", version)):
        if not is_number(number) and (number is not None or name == "stage"):
            raise ValueError(f"{name} must be an int in 0..{MAX_NUMBER}, not {number!r}")


# The constructors below are what generators call. Kinds that they name often are looked up once.
_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
_BACKWARD_INPUT, _BACKWARD_WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def forward(stage: int, microbatch: int, version: int | None = None) -> Action:
    """Run the stage on the microbatch, with the weights of `version` (None: the newest).

    >>> import schedir
    >>> print(schedir.forward(0, 4), schedir.forward(0, 4, version=1))
    0F4 0F4@1
    """
    return Action(_FORWARD, stage, microbatch, version)


def backward(stage: int, microbatch: int) -> Action:
    """Compute the gradients of the stage's input and of its parameters.

    >>> import schedir
    >>> print(schedir.backward(0, 4))
    0B4
    """
    return Action(_BACKWARD, stage, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """Compute only the gradient of the stage's input; a `backward_weight` follows later.

    >>> import schedir
    >>> print(schedir.backward_input(0, 4))
    0I4
    """
    return Action(_BACKWARD_INPUT, stage, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """Compute the gradient of the stage's parameters, after its `backward_input`.

    >>> import schedir
    >>> print(schedir.backward_weight(0, 4))
    0W4
    """
    return Action(_BACKWARD_WEIGHT, stage, microbatch)


def recompute_forward(stage: int, microbatch: int, version: int | None = None) -> Action:
    """Run the forward again before the backward. The first `forward` then keeps only its input.

    `version` may name the weight version, which must be the version of its `forward`.

    >>> import schedir
    >>> print(schedir.recompute_forward(0, 4))
    0R4
    """
    return Action(Kind.RECOMPUTE, stage, microbatch, version)


def send_act(stage: int, microbatch: int) -> Action:
    """Send this stage's output to the rank that runs the next stage on the microbatch.

    >>> import schedir
    >>> send = schedir.send_act(0, 4)
    >>> print(send, send.counterpart)
    0SEND_ACT4 1RECV_ACT4
    """
    return Action(Kind.SEND_ACT, stage, microbatch)


def recv_act(stage: int, microbatch: int) -> Action:
    """Receive this stage's input.

    >>> import schedir
    >>> print(schedir.recv_act(1, 4))
    1RECV_ACT4
    """
    return Action(Kind.RECV_ACT, stage, microbatch)


def send_grad(stage: int, microbatch: int) -> Action:
    """Send the gradient of this stage's input to the rank that runs the stage before.

    >>> import schedir
    >>> send = schedir.send_grad(1, 4)
    >>> print(send, send.counterpart)
    1SEND_GRAD4 0RECV_GRAD4
    """
    return Action(Kind.SEND_GRAD, stage, microbatch)


def recv_grad(stage: int, microbatch: int) -> Action:
    """Receive the gradient of this stage's output.

    >>> import schedir
    >>> print(schedir.recv_grad(0, 4))
    0RECV_GRAD4
    """
    return Action(Kind.RECV_GRAD, stage, microbatch)


def reduce_grad(stage: int) -> Action:
    """Sum the stage's accumulated gradients over the ranks that hold it.

    >>> import schedir
    >>> print(schedir.reduce_grad(0))
    0REDUCE_GRAD
    """
    return Action(Kind.REDUCE_GRAD, stage)


def optim_step(stage: int) -> Action:
    """Apply the gradients accumulated since the stage's last `optim_step`.

    >>> import schedir
    >>> print(schedir.optim_step(0))
    0OPTIM_STEP
    """
    return Action(Kind.OPTIM_STEP, stage)


def unshard(stage: int) -> Action:
    """Gather the full weights of a sharded stage from the ranks that share them.

    >>> import schedir
    >>> print(schedir.unshard(0))
    0UNSHARD
    """
    return Action(Kind.UNSHARD, stage)


def reshard(stage: int) -> Action:
    """Give up the full weights of a sharded stage, and keep this rank's shard.

    >>> import schedir
    >>> print(schedir.reshard(0))
    0RESHARD
    """
    return Action(Kind.RESHARD, stage)


def offload_activation(stage: int, microbatch: int) -> Action:
    """Copy the activation that the stage keeps for its backward to the host, and free it.

    >>> import schedir
    >>> print(schedir.offload_activation(0, 4))
    0OFFLOAD4
    """
    return Action(Kind.OFFLOAD, stage, microbatch)


def reload_activation(stage: int, microbatch: int) -> Action:
    """Copy the activation that `offload_activation` moved to the host back to the device.

    >>> import schedir
    >>> print(schedir.reload_activation(0, 4))
    0RELOAD4
    """
    return Action(Kind.RELOAD, stage, microbatch)


_OVERLAPS = HOMES | frozenset(CONSUMES)
"""The kinds that may be part of an overlapped pair: compute that uses another stage's result."""


@attrs.frozen
class Together:
    """Several actions as one entry, in list order.

    The entry is an overlapped pair (one FORWARD, and one BACKWARD or BACKWARD_INPUT of another
    stage or microbatch), or a batch of sends and receives. Raises ValueError for any other group,
    and TypeError for anything that is not an Action.

    >>> import schedir
    >>> pair = schedir.Together([schedir.forward(0, 4), schedir.backward(7, 3)])
    >>> print(pair, len(pair.actions))
    (0F4;7B3) 2
    """

    actions: tuple[Action, ...] = attrs.field(converter=tuple[Action, ...])

    def __attrs_post_init__(self) -> None:
        actions = self.actions
        for action in actions:
            if isinstance(action, Together):
                raise ValueError(f"{action} can't stand in another entry: list its actions there")
            if not isinstance(action, Action):
                raise TypeError(f"{action!r} is not an Action")
        if len(actions) < 2:
            raise ValueError("two or more actions run together; one is an entry by itself")
        communicates = [action for action in actions if action.kind in COMMUNICATION]
        computes = [action for action in actions if action.kind not in COMMUNICATION]
        for action in computes:
            if action.kind not in _OVERLAPS:
                raise ValueError(
                    f"{action} runs alone: a forward (F) runs together with a backward (B or I), "
                    "and sends and receives with each other"
                )
        if computes and communicates:
            both = f"{computes[0]} computes and {communicates[0]} communicates"
            raise ValueError(f"{both}: these don't run together")
        if communicates:
            action, times = Counter(actions).most_common(1)[0]
            if times > 1:
                raise ValueError(f"{action} is in the entry {times} times")
            return
        if len(actions) > 2 or sum(action.kind in HOMES for action in actions) != 1:
            raise ValueError("an overlapped pair has one forward (F) and one backward (B or I)")
        one, other = sorted(actions, key=lambda action: action.kind not in HOMES)
        if (one.stage, one.microbatch) == (other.stage, other.microbatch):
            raise ValueError(f"{other} needs {one}, so the two can't start together")

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})"


Entry: TypeAlias = Action | Together
"""What stands at one index of a rank's list."""


def together(*actions: Action) -> Together:
    """Run the actions as one entry: a forward and a backward, or a batch of sends and receives.

    Raises what `Together` raises.

    >>> import schedir
    >>> print(schedir.together(schedir.send_act(0, 1), schedir.recv_grad(0, 0)))
    (0SEND_ACT1;0RECV_GRAD0)
    """
    return Together(actions)


def flat(entries: Iterable[Entry]) -> Iterator[Action]:
    """The actions of the entries, one after the other."""
    for entry in entries:
        if isinstance(entry, Together):
            yield from entry.actions
        else:
            yield entry
