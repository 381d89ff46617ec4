"""How all ranks end when one fails: `python -m on_gpu.failures HOW`.

Starts `on_gpu.failing` and judges what becomes of each rank: whether it ends, how soon, and whether
it names what the runtime promises that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from on_gpu.failing import BEGINS, CULPRIT, HOW, RANKS, TIMEOUT
from on_gpu.launch import DEVICE, Codes, Ended, launch
from on_gpu.rank import arguments, begin, left, say

ENDING = 30.0  # seconds to end in, once a rank knows: communicators may be slow to abort
_OTHERS = [rank for rank in range(RANKS) if rank != CULPRIT]
_ROOT = rf"rank {CULPRIT} #\d+ {CULPRIT}F1: ValueError: no more of this$"
_LINE = "^ExecutionError: "


@frozen
class Promise:
    """What ranks have each a line of, and that they end `within` so many seconds.

    Of the other ranks is said whether they end, for as long as this `lingers`. Some rank says what
    is said `somewhere`.
    """

    words: Mapping[int, str]
    within: float = ENDING
    somewhere: str = ""
    lingers: float = 0.0


PROMISES: Mapping[str, Promise] = {
    "raises": Promise(
        {CULPRIT: _ROOT} | dict.fromkeys(_OTHERS, f"{_LINE}.*the first to fail was {_ROOT}")
    ),
    # A neighbour's wait ends with the connection, or, where nothing tells of that, in time.
    "dies": Promise(
        {CULPRIT: BEGINS}
        | dict.fromkeys(_OTHERS, rf"{_LINE}.*\bwaited .*\b(rank|process) {CULPRIT}\b"),
        TIMEOUT + ENDING,
    ),
    "never-calls": Promise(
        dict.fromkeys(_OTHERS, f"{_LINE}.*(waited {TIMEOUT:g} s in vain|the first to fail was)"),
        TIMEOUT + ENDING,
        somewhere=rf"waited {TIMEOUT:g} s in vain for .*\b(rank|process) {CULPRIT}\b",
    ),
    "leaves": Promise(
        {CULPRIT: BEGINS} | dict.fromkeys(_OTHERS, _LINE),
        TIMEOUT + ENDING,
        somewhere=f"process {CULPRIT} has closed its executor, or ended, after 1 calls",
    ),
    "beside-a-stuck-rank": Promise(
        {CULPRIT: _ROOT, 0: f"{_LINE}.*the first to fail was {_ROOT}"}, lingers=15.0
    ),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("how", choices=HOW)
    args = parser.parse_args()
    begin(args.device)
    promise = PROMISES[args.how]

    def patience(codes: Codes) -> float:
        if all(codes[rank] is not None for rank in promise.words):
            return promise.lingers
        return float("inf")

    command = ["-m", "on_gpu.failing", args.how]
    ended = launch(command, RANKS, left() - 5, {DEVICE: args.device}, patience)
    for rank, process in enumerate(ended):
        print(f"rank {rank}, exit status {process.code}:\n{process.printed}")
    if faults := [*broken(promise, ended)]:
        raise SystemExit("; ".join(faults))
    say("; ".join(described(promise, ended)))


def broken(promise: Promise, ended: Sequence[Ended]) -> Iterator[str]:
    """In what the ranks have not kept it."""
    begun = _begun(ended)
    if begun is None:
        yield f"rank {CULPRIT} has not come to its second step: {ended[CULPRIT].last}"
        return
    for rank, words in promise.words.items():
        process = ended[rank]
        if process.code is None:
            yield f"rank {rank} has not ended"
        elif process.time - begun > promise.within:
            yield f"rank {rank} has ended after {process.time - begun:.0f} s"
        if _line_of(process, words) is None:
            yield f"rank {rank} has not said {words!r}, but last {process.last!r}"
    if not any(_line_of(process, promise.somewhere) is not None for process in ended):
        yield f"no rank has said {promise.somewhere!r}"


def described(promise: Promise, ended: Sequence[Ended]) -> Iterator[str]:
    """When each rank has ended, counted from when rank 1 began, and with which words."""
    begun = _begun(ended) or 0.0
    for rank, process in enumerate(ended):
        words = _line_of(process, promise.words.get(rank, "")) or process.last
        when = "stayed" if process.code is None else f"ended after {process.time - begun:.1f} s"
        yield f"rank {rank} {when}: {words}"


def _begun(ended: Sequence[Ended]) -> float | None:
    line = _line_of(ended[CULPRIT], f"^{BEGINS}")
    return None if line is None else float(line.removeprefix(BEGINS))


def _line_of(process: Ended, words: str) -> str | None:
    """Its last line with these words."""
    lines = process.printed.splitlines()
    return next((line for line in reversed(lines) if re.search(words, line)), None)


if __name__ == "__main__":
    main()
