"""Trains sharded and split stages on 4 ranks, each beside one process: `-m on_gpu.layouts ROW…`.

A ROW is a feature and a layout of `tests/runtime/layouts.py`: "clipping, pp 2 x fsdp 2".
"""

from __future__ import annotations

from time import perf_counter

from on_gpu.rank import arguments, begin, end, left, say
from tests.runtime.layouts import compare


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("rows", nargs="+", metavar="ROW")
    args = parser.parse_args()
    begin(args.device, "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    for row in args.rows:
        begun = perf_counter()
        feature, layout = row.split(", ")
        compare(feature, layout, args.device, timeout=left() / 2)
        say(f"{row}: equals one process, in {perf_counter() - begun:.1f} s")
    say(f"{len(args.rows)} equal one process")
    end()


if __name__ == "__main__":
    main()
