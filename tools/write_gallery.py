"""Writes docs/gallery.md, and the pictures that it shows: every built-in schedule on 4 ranks.

python tools/write_gallery.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
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

All schedules that come with schedir, on {RANKS} ranks with {MICROBATCHES} microbatches. They train
the same model. One unit of time is the forward of a quarter of it. The gradient of the input (I)
and the gradient of the weights (W) take one unit each, and a whole backward (B) takes two.
Transfers and updates take no time. An [overlapped pair](glossary.md#overlapped-pair) takes the sum
of its two parts.

- **Bubble** is the share of the ranks' time in which they do not compute. Some schedules also give
  the bubble of the longest [span](glossary.md#span) of a rank. That is the one that counts if steps
  follow each other without a flush.
- **Peak** is the most [activations](glossary.md#activation) that a rank holds. One activation is
  that of one microbatch in a quarter of the model.
- **Once full** is what an [asynchronous](glossary.md#asynchronous) schedule costs as long as
  nothing drains its pipeline: the time per microbatch, and the bubble.

The formulas are Python. `P` is the number of ranks, `M` the number of microbatches, and `V` the
number of chunks on a rank. Memory counts activations of one P-th of the model. The formulas assume
the costs above, F = I = W = 1 and B = 2. A test compares each one with the simulation at many
shapes. A formula with `if` holds for the shapes that it names. At your own costs, ask
[`schedir compare`](how-to/choose-a-schedule.md).

`tools/write_gallery.py` writes this page from the docstrings in `schedules/`.
"""

FORMULAS = ("Bubble", "Bubble of the longest span", "Bubble once full", "Memory")
"""The formulas that the docstring of a schedule may state, each on a line of its own."""
_STATED = re.compile(
    r"(?P<bound>at most )?(?P<value>.+?)(?: if (?P<condition>.+))?", flags=re.DOTALL
)


@attrs.frozen
class Formula:
    """A figure of a schedule as its docstring states it: `at most 3 * P if M >= P`."""

    text: str

    def of(self, ranks: int, microbatches: int, chunks: int) -> Fraction | None:
        """The figure for a shape; None for a shape that the formula does not speak of."""
        found = _STATED.fullmatch(self.text)
        assert found
        names = {"P": Fraction(ranks), "M": Fraction(microbatches), "V": Fraction(chunks)}
        if found["condition"] and not _evaluated(found["condition"], names):
            return None
        return Fraction(_evaluated(found["value"], names))

    @property
    def is_bound(self) -> bool:
        """Whether the figure is only known to be no more than that."""
        return self.text.startswith("at most ")

    def __str__(self) -> str:
        found = _STATED.fullmatch(self.text)
        assert found
        condition = f" if `{found['condition']}`" if found["condition"] else ""
        return f"{found['bound'] or ''}`{found['value']}`{condition}"


def _evaluated(code: str, names: Mapping[str, Fraction]) -> Fraction:
    found: Fraction = eval(code, {"__builtins__": {"min": min}}, dict(names))
    return found


def formulas_of(generator: Generator) -> dict[str, Formula]:
    """The formulas in the docstring of a schedule."""
    doc = inspect.getdoc(generator.function) or ""
    lines = (line.partition(": ") for line in doc.splitlines())
    return {name: Formula(text) for name, colon, text in lines if colon and name in FORMULAS}


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
    def choice(self) -> str:
        """When to choose it: the paragraph of its docstring that begins with these words."""
        doc = inspect.getdoc(self.generator.function) or ""
        return "Choose it" + doc.partition("\nChoose it")[2].partition("\n\n")[0].replace("\n", " ")

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
    name = one.generator.name
    lines = [
        f"## {name}",
        "",
        one.idea,
        "",
        f"![Timeline of {name}]({_picture(one)})",
        "",
        *_stated(one),
        *_full(one),
        f"- {one.choice}",
        f"- Source: {one.source}",
        f"- See it: `schedir show {name}`",
        "",
    ]
    return "\n".join(lines)


def _stated(one: Exhibit) -> Iterator[str]:
    """The formulas, and what they come to here."""
    formulas = formulas_of(one.generator)
    makespan, idle, peak = one.figures
    here = {"Bubble": f", here {idle}", "Memory": f", here {peak}"}
    for name, formula in formulas.items():
        what = "Memory (peak activations)" if name == "Memory" else name
        yield f"- {what}: {formula}{here.get(name, '')}"
    yield f"- Makespan here: {makespan}"


def _full(one: Exhibit) -> Iterator[str]:
    """What it costs once full; of one that may leave its flush out, what it costs then."""
    if one.once_full:
        yield f"- Once full: {one.once_full} (`--steady`)"
    elif "flush" in one.generator.parameters:
        flushless = attrs.evolve(one, steady=_steady(one.generator, flush=False))
        yield f"- Once full, without flush: {flushless.once_full} (`--set flush=false --steady`)"


if __name__ == "__main__":
    (DOCS / "gallery").mkdir(exist_ok=True)
    for path, text in pages().items():
        write_text(DOCS / path, text)
