"""The first hour on a GPU: everything that no machine without one can show, as one table.

    python tools/gpu_hour.py -o gpu_hour.md        # on one GPU, which all ranks share
    python tools/gpu_hour.py --device cpu          # the same over gloo, to try the script itself
    python tools/gpu_hour.py --only ties batches   # rows whose names contain one of these
    python tools/gpu_hour.py --minutes 9 --skip 20 # as far as that goes, after the first 20 rows

It stops at nothing: each row runs in processes of its own with a time limit, one that fails or
hangs is shown with where each of its ranks was, and the next one goes on. The file is written anew
after every row. NCCL refuses two ranks on one GPU unless each claims to be a host of its own
(NCCL_HOSTID); their traffic then goes over sockets, which is good for correctness and worthless for
timing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from on_gpu.launch import Check, Outcome, run

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of the tests
from on_gpu.checks import checks

from schedir.files import write_text

HEAD = "| check | result | seconds | |\n| --- | --- | --- | --- |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--skip", type=int, default=0, metavar="ROWS")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file, too")
    args = parser.parse_args(arguments)
    until = monotonic() + 60 * args.minutes
    wanted = [c for c in checks(args.device) if any(text in c.name for text in args.only)]
    outcomes: list[Outcome] = []
    print(HEAD, flush=True)
    for check in wanted[args.skip :]:
        outcomes.append(_outcome(check, args.device, until - monotonic()))
        print(row(outcomes[-1]), flush=True)
        if args.output:
            write_text(args.output, table(outcomes))
    print(failures(outcomes))
    return int(any(outcome.printed for outcome in outcomes))


def _outcome(check: Check, device: str, left: float) -> Outcome:
    if device == "cpu" and check.cpu:
        return Outcome(check, "makes no sense here", note=check.cpu)
    if check.limit > left:
        return Outcome(check, "not reached", note=f"it may take {check.limit:.0f} s")
    return run(check)


def table(outcomes: Sequence[Outcome]) -> str:
    """All that was found, as Markdown."""
    return "\n".join((HEAD, *map(row, outcomes), failures(outcomes)))


def row(outcome: Outcome) -> str:
    """A line of the table."""
    note = outcome.note.replace("|", "\\|")[:300]
    return f"| {outcome.check.name} | {outcome.state} | {outcome.seconds:.0f} | {note} |"


def failures(outcomes: Sequence[Outcome]) -> str:
    """What the ranks of all that failed have printed last."""
    lines = [""]
    for outcome in outcomes:
        for rank, text in enumerate(outcome.printed):
            lines += [f"### {outcome.check.name}: {outcome.state}, rank {rank}", ""]
            lines += ["```", text.strip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
