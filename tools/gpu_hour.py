"""Tries schedir on a GPU, in parts of nine minutes.

    python tools/gpu_hour.py --list                   # the parts, their rows and what each shows
    python tools/gpu_hour.py --part A -o gpu_hour.md  # on one GPU, which all ranks share; B to G
    python tools/gpu_hour.py --only transformer       # rows whose names contain this, again
    python tools/gpu_hour.py --part A --device cpu    # over gloo, to try the script itself

Each row runs in separate processes with a time limit. If a row fails or hangs, the table shows
where each of its ranks was, and the next row runs. If a row of several features fails, the features
that did not run are tried one by one. The files are written after every row: `gpu_hour.md` is the
table, `gpu_hour.log` has everything that was printed, and `gpu_hour.jsonl` lets the same call
continue where it stopped or was killed.

NCCL refuses two ranks on one GPU unless each claims to be a different host (NCCL_HOSTID). Their
traffic then goes over sockets: good for correctness, worthless for timing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import torch

# Of schedir and the tests, and of plain training.
sys.path += [str(Path(__file__).resolve().parents[1] / part) for part in ("", "examples")]
from on_gpu.checks import PART, PARTS, listing, named
from on_gpu.launch import run
from on_gpu.results import Results, line_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print all rows, and run none")
    what.add_argument("--part", choices=PARTS)
    what.add_argument("--only", nargs="+", metavar="TEXT", help="rows of any part, again")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_hour.md"), metavar="FILE")
    args = parser.parse_args(arguments)
    if args.list:
        print(listing())
        return 0
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error("no GPU is visible; --device cpu tries all that it can over gloo")
    results = Results(args.output, args.device)
    again = named(args.only) if args.only else []
    for check in again:
        results.outcomes.pop(check.name, None)
    try:
        results.write({})
    except OSError as error:
        parser.error(f"-o: {error}")
    until, missed = monotonic() + PART, dict[str, str]()
    while left := [
        check
        for check in again or results.of_part(args.part)
        if check.name not in results.outcomes and check.name not in missed
    ]:
        check = left[0]
        if check.limit > until - monotonic():
            missed[check.name] = f"it may take {check.limit:.0f} s"
        else:
            if results.begin(check):
                results.add(run(check, args.device))
            print(line_of(results.outcomes[check.name]), flush=True)
        results.write(missed)
    rows = again or results.of_part(args.part)
    return int(any(c.name in missed or results.outcomes[c.name].bad for c in rows))


if __name__ == "__main__":
    sys.exit(main())
