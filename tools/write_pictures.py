"""Writes docs/pictures, the pictures of the documentation.

    python tools/write_pictures.py
    python tools/write_pictures.py --measure

What is predicted above what is measured comes from `docs/pictures/measured.json`, which `--measure`
makes anew, in half a minute on four processes: stages that sleep for fixed, unequal times, with
costs from a run of 1F1B, foretell and then run interleaved 1F1B. The losses of PipeDream and 1F1B
come from `docs/pictures/pipedream.json`, which `examples/compare_pipedream.py` writes beside its
picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import schedir
from schedir import CostModel, Timeline
from schedir.files import write_text
from schedir.simulator import load_timelines, save_timelines

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))

import curves  # noqa: E402

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
MEASURED = PICTURES / "measured.json"
LOSSES = PICTURES / "pipedream.json"

# Hundreds of millions of multiplications in a forward of AlexNet's two stages, image by image: cut
# behind the first of the large linear layers, and behind the third convolution.
BY_PARAMETERS = 6.93, 0.21
BY_COST = 4.06, 3.08


def pictures() -> dict[str, str]:
    """Each picture by the name of its file."""
    one_f_one_b = _simulated("1f1b")
    predicted, measured = load_timelines(MEASURED)
    return {
        "1f1b.svg": one_f_one_b.svg(),
        "interleaved-1f1b.svg": _simulated("interleaved-1f1b", chunks=2).svg(),
        "zb-h1.svg": _simulated("zb-h1").svg(),
        "memory.svg": _simulated("fill-drain").svg(against=one_f_one_b, memory=True),
        "predicted-and-measured.svg": predicted.svg(against=measured),
        "1f1b-rr.svg": _round_robin().svg(),
        "train-images.svg": _on_two("interleaved-1f1b", 1, 1, 1, 1).svg(
            against=_on_two("1f1b", 2, 2)
        ),
        "train-alexnet.svg": _on_two("1f1b", *BY_PARAMETERS).svg(against=_on_two("1f1b", *BY_COST)),
        "train-masked.svg": _on_two("1f1b", 1, 1).svg(),
        "pipedream.svg": curves.picture(*curves.load(LOSSES)),
    }


def _on_two(target: str, *forward: float) -> Timeline:
    """As the examples run it; `forward` is what each stage takes, and backwards take twice that."""
    chunks = len(forward) // 2 if len(forward) > 2 else None
    built = schedir.build(target, ranks=2, microbatches=4, chunks=chunks)
    costs = CostModel(forward=forward, backward=tuple(2 * cost for cost in forward))
    return schedir.simulate(built, costs)


def _round_robin() -> Timeline:
    built = schedir.build("1f1b-rr", ranks=3, microbatches=8)
    return schedir.simulate(built, CostModel(forward=(2, 1), backward=(4, 2)))


def _simulated(target: str, chunks: int | None = None) -> Timeline:
    return schedir.simulate(schedir.build(target, ranks=4, microbatches=8, chunks=chunks))


def measure() -> None:
    """Run what is predicted, and save both timelines; of the steps, the one in the middle."""
    from bench_predict import launch, source_of  # with torch, which pictures need not
    from predicted_run import Run

    target = Run("sleep", "interleaved-1f1b", ranks=4, microbatches=8, chunks=2, steps=9)
    costs = CostModel.fit(launch(source_of(target, microbatches=4)).lines)
    steps = sorted(launch(target).lines, key=lambda line: line.makespan)
    measured = steps[len(steps) // 2]
    predicted = schedir.simulate(measured.schedule, costs, channel="gloo")
    save_timelines([predicted, measured], MEASURED)


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="make the measured run anew first")
    if parser.parse_args().measure:
        measure()
    for name, picture in pictures().items():
        write_text(PICTURES / name, picture)


if __name__ == "__main__":
    main()
