"""Writes docs/gallery.md, and the pictures that it shows: every built-in schedule on 4 ranks.

python tools/write_gallery.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import attrs

import schedir
from schedir import CostModel, Generator, SteadyState, Timeline
from schedir.files import write_text
from schedir.library import built_in
from schedir.render.captions import bubble

DOCS = Path(__file__).resolve().parents[1] / "docs"
RANKS, MICROBATCHES = 4, 8
HEAD = f"""# Gallery

Every schedule that comes with schedir, on {RANKS} ranks with {MICROBATCHES} microbatches. All train
the same model: the unit is the forward of a quarter of it; the gradient of the input takes as long,
and so does that of the weights; communication and updates take nothing, and an overlapped pair the
sum of its two. *Bubble* is the part of all ranks' time in which they do not compute; where another
part is named, it is that of the longest span of a rank, which counts where steps follow each other
without a flush. *Peak* is the most activations that a rank holds, of a quarter of the model each.
*Once full* is what a schedule costs that goes on after its updates, for as long as nothing drains
its pipeline: time per microbatch, and bubble.
Written by `tools/write_gallery.py`.
"""


@attrs.frozen
class Exhibit:
    """A schedule with its timeline, whose unit is `share` of the one that all have in common."""

    generator: Generator
    timeline: Timeline
    share: Fraction
    steady: SteadyState | None

    @property
    def source(self) -> str:
        """Whose idea it is and where it is from: what its file begins with."""
        module = sys.modules[self.generator.function.__module__]
        return (module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")

    @property
    def idea(self) -> str:
        """What it does, in the sentence that its docstring begins with."""
        doc = inspect.getdoc(self.generator.function) or ""
        return doc.partition("\n\n")[0].replace("\n", " ")

    @property
    def figures(self) -> tuple[str, str, str]:
        """Makespan, bubble and peak activations."""
        makespan = float(self.timeline.makespan * self.share)
        peak = float(max(rank.peak_activations for rank in self.timeline.ranks) * self.share)
        return f"{makespan:g}", bubble(self.timeline), f"{peak:g}"

    @property
    def once_full(self) -> str:
        """Time per microbatch and bubble once full; nothing of a schedule that is synchronous."""
        if self.steady is None:
            return ""
        each = float(self.steady.time_per_microbatch * self.share)
        return f"{each:g} per microbatch, bubble {self.steady.bubble_fraction:.1%}"


def exhibits() -> list[Exhibit]:
    """All of them, by name."""
    return [_exhibit(generator) for generator in built_in()]


def _exhibit(generator: Generator) -> Exhibit:
    built = schedir.build(generator, ranks=RANKS, microbatches=MICROBATCHES, costs=CostModel())
    share = Fraction(RANKS, built.stages)
    return Exhibit(generator, schedir.simulate(built), share, _steady(generator))


def _steady(generator: Generator, **parameters: bool) -> SteadyState | None:
    return schedir.steady_state(
        generator, CostModel(), ranks=RANKS, microbatches=MICROBATCHES, **parameters
    )


def pages() -> dict[str, str]:
    """The gallery and its pictures, by their paths in docs/."""
    shown = exhibits()
    pictures = {_picture(one): one.timeline.svg() for one in shown}
    return {"gallery.md": "\n".join([HEAD, *_table(shown), *map(_section, shown)]), **pictures}


def _picture(one: Exhibit) -> str:
    return f"gallery/{one.generator.name}.svg"


def _table(shown: list[Exhibit]) -> Iterator[str]:
    yield "| schedule | makespan | bubble | peak | once full |\n| --- | --- | --- | --- | --- |"
    for one in shown:
        name = one.generator.name
        yield f"| [{name}](#{name}) | {' | '.join([*one.figures, one.once_full or '–'])} |"
    yield ""


def _section(one: Exhibit) -> str:
    name, (makespan, idle, peak) = one.generator.name, one.figures
    return (
        f"## {name}\n\n{one.idea} *{one.source}*\n\n![Timeline of {name}]({_picture(one)})\n\n"
        f"Makespan {makespan}, bubble {idle}, peak {peak}.{_full(one)} `schedir show {name}`\n"
    )


def _full(one: Exhibit) -> str:
    """What it costs once full; of one that may leave its flush out, what it costs then."""
    if one.once_full:
        return f" Once full {one.once_full} (`--steady`)."
    if "flush" not in one.generator.parameters:
        return ""
    flushless = attrs.evolve(one, steady=_steady(one.generator, flush=False))
    return f" Once full {flushless.once_full} (`--set flush=false --steady`)."


if __name__ == "__main__":
    (DOCS / "gallery").mkdir(exist_ok=True)
    for path, text in pages().items():
        write_text(DOCS / path, text)
