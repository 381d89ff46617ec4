"""Trains with features, each compared with plain training: `python -m on_gpu.train NAME…`.

As one rank of several, over gloo or NCCL, or with all ranks in one process.
"""

from __future__ import annotations

import argparse
from time import perf_counter

from on_gpu.rank import begin, end, left, rank, say
from tests.runtime.features import Setting, check

SIZES = {"small": (2, 64), "64 MiB": (16384, 1024), "1 MiB": (256, 1024)}
"""Rows of a microbatch, and the width of its boundaries."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("features", nargs="+")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--no-host-read", action="store_true")
    args = parser.parse_args()
    begin(args.device)
    rows, width = SIZES[args.size]
    for name in args.features:
        begun = perf_counter()
        setting = Setting(
            rank=rank(),
            device=args.device,
            rows=rows,
            width=width,
            timeout=left() / 2,
            reads=not args.no_host_read,
        )
        check(name, setting)
        say(f"{name} equals plain training, in {perf_counter() - begun:.1f} s")
    if len(args.features) > 1:
        say(f"{len(args.features)} features equal plain training")
    end()


if __name__ == "__main__":
    main()
