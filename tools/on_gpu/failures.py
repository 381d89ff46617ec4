"""How all ranks end when one fails: `python -m on_gpu.failures HOW`.

Starts `on_gpu.failing` and judges what becomes of each rank: whether it ends, how soon, and whether
it names what the runtime promises that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from attrs import frozen

from on_gpu.failing import BEGINS, CULPRIT, HOW, RANKS, TIMEOUT
from on_gpu.launch import DEVICE, Codes, Ended, launch
from on_gpu.rank import arguments, begin, left, say

ENDING = 30.0  # seconds to end in, once a rank knows: communicators may be slow to abort
_OTHERS = [rank for rank in range(RANKS) if rank != CULPRIT]
_ROOT = rf"rank {CULPRIT} #\d+ {CULPRIT}F1: ValueError: no more of this$"
_ENDED = rf"^schedir: rank \d ended: root is rank {CULPRIT}$"


def _told(cause: str) -> str:
    """The line of a rank that is not to blame, or of the one that says who is, and why."""
    return rf"{_ENDED}|^schedir: root: rank {CULPRIT}\b.*: {cause}"


@frozen
class Promise:
    """What ranks have each a line of, and that they end `within` so many seconds."""

    words: Mapping[int, str]
    within: float = ENDING


PROMISES: Mapping[str, Promise] = {
    "raises": Promise({CULPRIT: _ROOT} | dict.fromkeys(_OTHERS, _ENDED)),
    "dies": Promise({CULPRIT: BEGINS} | dict.fromkeys(_OTHERS, _told("killed by SIGKILL"))),
    "never-calls": Promise(
        dict.fromkeys(_OTHERS, _told(f"no progress for {TIMEOUT:.1f} s")), TIMEOUT + ENDING
    ),
    "leaves": Promise(
        {CULPRIT: BEGINS} | dict.fromkeys(_OTHERS, _told("(has closed its|exited with code 0)")),
        TIMEOUT + ENDING,
    ),
    "beside-a-stuck-rank": Promise({CULPRIT: _ROOT} | dict.fromkeys(_OTHERS, _ENDED)),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("how", choices=HOW)
    args = parser.parse_args()
    begin(args.device)
    promise = PROMISES[args.how]
    command = ["-m", "on_gpu.failing", args.how]
    ended = launch(command, RANKS, left() - 5, {DEVICE: args.device}, _until_others_end)
    for rank, process in enumerate(ended):
        print(f"rank {rank}, exit status {process.code}:\n{process.printed}")
    if faults := [*broken(promise, ended)]:
        raise SystemExit("; ".join(faults))
    say("; ".join(described(promise, ended)))


def _until_others_end(codes: Codes) -> float:
    """Until all others have ended; rank 1 may stay, and has some seconds more."""
    return inf if None in [codes[rank] for rank in _OTHERS] else 5.0


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
