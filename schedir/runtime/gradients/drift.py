"""Copies of parameters that must stay equal, compared now and then.

They start equal and get equal gradients. What parts them is done from outside: a checkpoint loaded
into one of them, another learning rate. Each process sends the others a fingerprint after some of
its steps, and looks at what they have sent after the next one, when it has long arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.runtime.batch import fingerprint
from schedir.runtime.processes.control import DRIFT_TAG, Control, Exchange

_INTERVAL = 16  # steps, from the first on


class Drift:
    """The copies of one process, each a list of parameters; `holders` are the numbers of the
    processes that have any.

    Both go by what the copies are called in messages.
    """

    def __init__(
        self,
        copies: Mapping[str, Sequence[Sequence[nn.Parameter]]],
        holders: Mapping[str, Sequence[int]],
        own: int,
        control: Control,
    ) -> None:
        self._copies = {label: copies[label] for label in sorted(copies)}
        self._holders, self._own, self._control = holders, own, control
        self._peers = sorted({n for label in copies for n in holders[label]} - {own})
        self._steps = 0
        self._pending: tuple[int, Mapping[str, int], Exchange] | None = None

    def step(self) -> None:
        """A step is over. Raises ExecutionError where copies have come to differ."""
        self.compare()
        if self._copies and self._steps % _INTERVAL == 0:
            self._send()
        self._steps += 1

    def _shared_with(self, peer: int) -> list[str]:
        return [label for label in self._copies if peer in self._holders[label]]

    def _send(self) -> None:
        own = {}
        for label, held in self._copies.items():
            found = list(map(fingerprint.of_weights, held))
            own[label] = found[0]
            if len(set(found)) > 1:
                raise _differ(label, f"on process {self._own}", self._steps)
        sizes = {peer: len(self._shared_with(peer)) for peer in self._peers}
        exchange = self._control.expect(sizes, DRIFT_TAG)
        for peer in self._peers:
            shared = [own[label] for label in self._shared_with(peer)]
            self._control.tell(torch.tensor(shared, dtype=torch.float64), [peer], DRIFT_TAG)
        self._pending = self._steps, own, exchange

    def compare(self) -> None:
        """Compare with what others have sent last, if that has not been done."""
        if self._pending is None:
            return
        step, own, exchange = self._pending
        self._pending = None
        for peer, received in zip(self._peers, exchange.result(), strict=True):
            for label, theirs in zip(self._shared_with(peer), received.tolist(), strict=True):
                if own[label] != theirs:
                    raise _differ(label, f"between processes {self._own} and {peer}", step)


def _differ(label: str, where: str, step: int) -> ExecutionError:
    return ExecutionError(
        f"{label} differs {where}, at the end of this executor's step {step}: one copy was loaded, "
        "frozen or stepped apart from the others (with another learning rate, say); treat all "
        "alike, and go on from a checkpoint"
    )
