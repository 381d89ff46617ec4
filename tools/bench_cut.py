"""Compares the cut that `schedir search --cut` finds with the cut that balances the time.

    python tools/bench_cut.py                   # 8, 16, 32 stages, vocabularies of 32k to 256k
    python tools/bench_cut.py --seconds 5       # longer searches

Each row is a transformer of 2 layers a stage, with its embedding and head as layers of their own:
a step of 2 microbatches for each rank, in multiples of the ideal, all work divided evenly. It
says how many layers the first and the last stage have then.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

from schedir import CostModel
from schedir.finder import find

STAGES = (8, 16, 32)
VOCABULARIES = (32_768, 65_536, 131_072, 262_144)
LAYERS, MICROBATCHES = 2, 2  # for each stage
HIDDEN, HEADS, SEQUENCE = 4096, 32, 4096


def layers_of(blocks: int, vocabulary: int) -> CostModel:
    """The costs of the embedding, so many transformer layers, and the head."""
    return CostModel.of_transformer(
        layers=(0, *[1] * blocks, 0),
        hidden=HIDDEN,
        heads=HEADS,
        vocabulary=vocabulary,
        sequence=SEQUENCE,
        microbatch=1,
        flops=312e12,
        utilisation=0.5,
        latency=20e-6,
        bandwidth=50e9,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of work of each search")
    args = parser.parse_args()
    print("stages  vocabulary  balanced   found    gain   bound  first and last  seconds")
    for stages, vocabulary in product(STAGES, VOCABULARIES):
        layers, many = layers_of(LAYERS * stages, vocabulary), MICROBATCHES * stages
        each = (layers.by_stage(name, LAYERS * stages + 2) for name in ("forward", "backward"))
        ideal = many * sum(map(sum, each)) / stages
        begun = time.perf_counter()
        balanced, found = (
            find(stages, many, layers=layers, cut=cut, seconds=args.seconds)
            for cut in (False, True)
        )
        first, *_, last = found.boundaries or ()
        print(
            f"{stages:6}  {vocabulary:10}  {balanced.value / ideal:8.4f}  "
            f"{found.value / ideal:6.4f}  {1 - found.value / balanced.value:6.2%}  "
            f"{found.lower_bound / ideal:6.4f}  {first:5} {LAYERS * stages + 2 - last:8}  "
            f"{time.perf_counter() - begun:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
