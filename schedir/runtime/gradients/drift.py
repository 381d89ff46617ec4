"""Copies of parameters that must stay equal, compared now and then.

They start equal and get equal gradients. What parts them is done from outside: a checkpoint loaded
into one of them, another learning rate. Each process sends the others a fingerprint after some of
its steps, and looks at what they have sent after the next one, when it has long arrived; where it
comes from a device that queues its work, before it sends the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.batch import fingerprint
from schedir.runtime.late import Late
from schedir.runtime.processes.control import DRIFT_TAG, Control

_INTERVAL = 16  # steps, from the first on

_Found: TypeAlias = Mapping[str, Sequence[int]]
"""By what copies are called, the fingerprint of each that is here."""
_Exchanged: TypeAlias = tuple[_Found, Sequence[Tensor]]
"""Those here, and those of each peer."""


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
        accelerator: Accelerator,
    ) -> None:
        self._copies = {label: copies[label] for label in sorted(copies)}
        self._holders, self._own, self._control = holders, own, control
        self._accelerator = accelerator
        self._peers = sorted({n for label in copies for n in holders[label]} - {own})
        self._steps = 0
        self._pending: tuple[int, Callable[[], _Exchanged]] | None = None

    def step(self) -> None:
        """A step is over. Raises ExecutionError where copies have come to differ."""
        sends = self._steps % _INTERVAL == 0
        if sends or not self._accelerator.queues:
            self.compare()
        if self._copies and sends:
            self._send()
        self._steps += 1

    def _shared_with(self, peer: int) -> list[str]:
        return [label for label in self._copies if peer in self._holders[label]]

    def _send(self) -> None:
        sizes = {peer: len(self._shared_with(peer)) for peer in self._peers}
        exchange = self._control.expect(sizes, DRIFT_TAG, late=self._accelerator.queues)
        found = self._fingerprints()

        def told() -> _Found:
            own = found()
            for peer in self._peers:
                shared = [own[label][0] for label in self._shared_with(peer)]
                self._control.tell(
                    torch.tensor(shared, dtype=torch.float64, device="cpu"), [peer], DRIFT_TAG
                )
            return own

        if not self._accelerator.queues:
            own = told()
            self._pending = self._steps, lambda: (own, exchange.result())
        elif self._peers:
            sent = self._control.courier.send(lambda: (told(), exchange.result()))
            self._pending = self._steps, lambda: sent.result()
        else:
            self._pending = self._steps, lambda: (found(), [])

    def _fingerprints(self) -> Callable[[], _Found]:
        """How to get those of the copies as they are now."""
        samples = {
            label: [fingerprint.sample_of_weights(held) for held in copies]
            for label, copies in self._copies.items()
        }
        if not self._accelerator.queues:
            found = {label: [*map(fingerprint.of_sample, own)] for label, own in samples.items()}
            return lambda: found
        # By one copy.
        sizes = [len(sample) for own in samples.values() for sample in own]

        def read(copied: Tensor) -> _Found:
            pieces = iter(copied.split(sizes))
            return {
                label: [fingerprint.of_sample(next(pieces)) for _ in own]
                for label, own in samples.items()
            }

        everything = [sample for own in samples.values() for sample in own if len(sample)]
        empty = torch.empty(0, dtype=torch.uint8, device=self._accelerator.device)
        return Late(self._accelerator, torch.cat([empty, *everything]), read)

    def compare(self) -> None:
        """Compare with what others have sent last, if that has not been done."""
        if self._pending is None:
            return
        step, exchanged = self._pending
        self._pending = None
        own, others = exchanged()
        for label, fingerprints in own.items():
            if len(set(fingerprints)) > 1:
                raise _differ(label, f"on process {self._own}", step)
        for peer, received in zip(self._peers, others, strict=True):
            for label, theirs in zip(self._shared_with(peer), received.tolist(), strict=True):
                if own[label][0] != theirs:
                    raise _differ(label, f"between processes {self._own} and {peer}", step)


def _differ(label: str, where: str, step: int) -> ExecutionError:
    return ExecutionError(
        f"{label} differs {where}, at the end of this executor's step {step}: one copy was loaded, "
        "frozen or stepped apart from the others (with another learning rate, say); treat all "
        "alike, and go on from a checkpoint"
    )
