"""Writes docs/gallery.md, and the pictures that it shows: every built-in schedule on 4 ranks.

python tools/write_gallery.py
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs

import schedir
from schedir import CostModel, Generator, Kind, SchedirError, SteadyState, Timeline
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

- **Stages** is how many stages a rank holds, and *shared* if several ranks hold the same stage.
- **Backwards** are [whole or split](glossary.md#backward) into I and W.
- **Bubble** is the share of the ranks' time in which they do not compute. Some schedules also give
  the bubble of the longest [span](glossary.md#span) of a rank. That is the one that counts if steps
  follow each other without a flush.
- **Peak** is the most [activations](glossary.md#activation) that a rank holds. One activation is
  that of one microbatch in a quarter of the model. (`compare` counts those of stages: for two
  stages on a rank, `6 × 1/2` is a peak of 3.)
- **Once full** is what an [asynchronous](glossary.md#asynchronous) schedule costs as long as
  nothing drains its pipeline: the time per microbatch, and the bubble.

The formulas are Python. `P` is the number of ranks, `M` the number of microbatches, and `V` the
number of chunks on a rank. Memory counts activations of one P-th of the model. The formulas assume
the costs above, F = I = W = 1 and B = 2. A test compares each one with the simulation at many
shapes. A formula with `if` holds for the shapes that it names. At your own costs, ask
[`schedir compare`](how-to/choose-a-schedule.md).

`tools/write_gallery.py` writes this page from the docstrings in `schedules/`.
"""

COLUMNS = ("schedule", "stages", "backwards", "makespan", "bubble", "peak", "once full")
FORMULAS = ("Bubble", "Bubble of the longest span", "Bubble once full", "Memory")
"""The formulas that the docstring of a schedule may state, each on a line of its own."""
_INTRODUCTION = re.compile(r"(?:^|(?<=[.)] ))(?:[^.]|\.(?! ))*:$")  # "… 4 microbatches on 4 ranks:"
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
    def paragraphs(self) -> list[str]:
        """What its docstring says of it: the idea, and more, without drawings and what introduces
        them."""
        doc = (inspect.getdoc(self.generator.function) or "").partition("\nBubble: ")[0]
        prose = (each for each in doc.split("\n\n") if not each.startswith("    "))
        found = (_INTRODUCTION.sub("", each.replace("\n", " ")).strip() for each in prose)
        return [each for each in found if each]

    @property
    def choice(self) -> str:
        """When to choose it: the end of its docstring."""
        doc = inspect.getdoc(self.generator.function) or ""
        return "Choose it" + doc.partition("\nChoose it")[2].replace("\n", " ")

    @property
    def backwards(self) -> str:
        """Whether its backwards are whole, split, or both."""
        kinds = {a.kind for actions in self.timeline.schedule.flat for a in actions}
        whole, split = Kind.BACKWARD in kinds, Kind.BACKWARD_INPUT in kinds
        return "both" if whole and split else "split" if split else "whole"

    @property
    def held(self) -> str:
        """How many stages a rank holds, and that it shares them, if it does."""
        most = max(len(self.timeline.schedule.stages_of(rank)) for rank in range(RANKS))
        shared = any(len(ranks) > 1 for ranks in self.timeline.schedule.placement)
        return f"{most}, shared" if shared else str(most)

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


def _steady(generator: Generator, **parameters: Any) -> SteadyState | None:
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
    yield f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
    for one in shown:
        name = one.generator.name
        cells = [f"[{name}](#{name})", one.held, one.backwards, *one.figures, one.once_full or "–"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _section(one: Exhibit) -> str:
    name = one.generator.name
    lines = [
        f"## {name}",
        "",
        one.paragraphs[0],
        "",
        f"![Timeline of {name}]({_picture(one)})",
        "",
        *(f"{_filled(each)}\n" for each in one.paragraphs[1:]),
        *_stated(one),
        *_full(one),
        _filled(one.choice, "- "),
        _filled(f"Source: {one.source}", "- "),
        f"- See it: `schedir show {name}`{_settings(one.generator)}",
        "",
    ]
    return "\n".join(lines)


def _filled(text: str, bullet: str = "") -> str:
    """Prose in lines of 110 letters, none of which begins with a sign that would start a list."""
    joined = re.sub(r" ([-*+]) ", "\N{NO-BREAK SPACE}\\1 ", text)
    lines = textwrap.fill(
        joined,
        110,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _stated(one: Exhibit) -> Iterator[str]:
    """The formulas, and what they come to here."""
    formulas = formulas_of(one.generator)
    makespan, idle, peak = one.figures
    here = {"Bubble": f", here {idle}", "Memory": f", here {peak}"}
    for name, formula in formulas.items():
        what = "Memory (peak activations)" if name == "Memory" else name
        yield f"- {what}: {formula}{here.get(name, '')}"
    yield f"- Makespan here: {makespan}"


def _settings(generator: Generator) -> str:
    """What can be set of it, and what else it is called."""
    named = [f"`--set {name}=…`" for name in generator.parameters]
    if generator.chunks > 1 and _takes(generator, chunks=2 * generator.chunks):
        named.insert(0, "`--chunks N`")
    settings = f". Settings: {', '.join(named)}" if named else ""
    others = ", ".join(f"`{alias}`" for alias in generator.aliases)
    return f"{settings}. Other names: {others}" if others else settings


def _takes(generator: Generator, chunks: int) -> bool:
    try:
        schedir.build(generator, ranks=RANKS, microbatches=MICROBATCHES, chunks=chunks)
    except SchedirError:
        return False
    return True


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
