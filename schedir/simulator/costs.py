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


@attrs.frozen(kw_only=True)
class CostModel:
    """The cost of every kind of action, the same for all stages; `communication` is per transfer.

    The defaults are the textbook's: a backward takes twice as long as a forward, half of it for
    the input and half for the weights, and the rest is free.

    Raises TypeError or ValueError for a cost that is no finite number >= 0.
    """

    forward: float = attrs.field(default=1, validator=_is_duration)
    backward: float = attrs.field(default=2, validator=_is_duration)
    backward_input: float = attrs.field(default=1, validator=_is_duration)
    backward_weight: float = attrs.field(default=1, validator=_is_duration)
    communication: float = attrs.field(default=0, validator=_is_duration)
    reduce_grad: float = attrs.field(default=0, validator=_is_duration)
    optim_step: float = attrs.field(default=0, validator=_is_duration)

    def by_kind(self) -> dict[Kind, float]:
        """The cost of every kind of action."""
        costs = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.REDUCE_GRAD: self.reduce_grad,
            Kind.OPTIM_STEP: self.optim_step,
        }
        return costs | dict.fromkeys(COMMUNICATION, self.communication)
