"""Trains with features, each compared with plain training: `python -m on_gpu.train NAME…`.

As one rank of several, over gloo or NCCL, or with all ranks in one process.
"""

from __future__ import annotations

from time import perf_counter

from on_gpu.models import MODELS
from on_gpu.rank import arguments, begin, end, left, rank, say
from tests.runtime.features import FEATURES, Setting, compare

SIZES = {"small": (2, 64), "4MiB": (1024, 1024), "64MiB": (16384, 1024)}
"""Rows of a microbatch, and the width of its boundaries; on the CPU a sixteenth of the rows."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("features", nargs="+")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--no-host-read", action="store_true")
    args = parser.parse_args()
    begin(args.device)
    rows, width = SIZES[args.size]
    if args.device == "cpu":
        rows = max(rows // 16, 2)
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
        compare({**FEATURES, **MODELS}[name](), setting)
        say(f"{name}: equals plain training, in {perf_counter() - begun:.1f} s")
    if len(args.features) > 1:
        say(f"{len(args.features)} equal plain training")
    end()


if __name__ == "__main__":
    main()
