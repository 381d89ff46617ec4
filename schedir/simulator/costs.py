"""What each kind of action costs, in any unit of time that the caller likes."""

from __future__ import annotations

from typing import Any

import attrs

from schedir.ir import COMMUNICATION, Kind

_MOST = 10**11


def _is_duration(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"the cost of {attribute.name} must be a number, not {value!r}")
    # Sums over millions of actions must stay exact, and far from overflow.
    if not 0 <= value <= _MOST:
        raise ValueError(
            f"the cost of {attribute.name} must be finite and >= 0 (at most {_MOST:.0e}), "
            f"not {value}"
        )


def _cost_of(kind: Kind) -> Any:
    """A field for the cost of a kind, by default the textbook's."""
    return attrs.field(default=kind.traits.cost, validator=_is_duration)


@attrs.frozen(kw_only=True)
class CostModel:
    """The cost of every kind of action, the same for all stages; `communication` is per transfer.

    The defaults are the textbook's: a backward takes twice as long as a forward, half of it for
    the input and half for the weights, and the rest is free.

    Raises TypeError or ValueError for a cost that is no finite number >= 0.
    """

    forward: float = _cost_of(Kind.FORWARD)
    backward: float = _cost_of(Kind.BACKWARD)
    backward_input: float = _cost_of(Kind.BACKWARD_INPUT)
    backward_weight: float = _cost_of(Kind.BACKWARD_WEIGHT)
    communication: float = _cost_of(Kind.SEND_ACT)
    reduce_grad: float = _cost_of(Kind.REDUCE_GRAD)
    optim_step: float = _cost_of(Kind.OPTIM_STEP)

    def by_kind(self) -> dict[Kind, float]:
        """The cost of every kind of action: one without a field of its own costs the textbook's."""
        own = {kind: getattr(self, kind.name.lower(), kind.traits.cost) for kind in Kind}
        return own | dict.fromkeys(COMMUNICATION, self.communication)
