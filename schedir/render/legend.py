"""What the letters and marks of a drawing mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from schedir.ir import Kind
from schedir.render.cells import Cell, Labels, Row
from schedir.render.palette import PAIR, PAIR_STYLE, SHORT, STEP, STEP_STYLE, WORDS, letter, shade
from schedir.render.styled import Piece, number


def legend(labels: Labels, rows: Sequence[Row], cells: Sequence[Sequence[Cell]]) -> str:
    """The letters and marks that occur, and how a label is read."""
    words = kinds_in_words(rows)
    if any(span.beside is not None for row in rows for span in row.spans):
        words.append("; between two that run as one")
    if any(cell.text == SHORT for row in cells for cell in row):
        words.append(f"{SHORT} too short to be named")
    text = ", ".join(words)
    actions = (span.action for row in rows for span in row.spans)
    example = next((a for a in actions if a.kind in WORDS and a.microbatch is not None), None)
    if example is None:
        return text
    whose = f"stage {example.stage}'s" if labels.several else "the"
    return (
        f"{text}; {labels.of(example)} is {whose} {WORDS[example.kind]} "
        f"of microbatch {example.microbatch}"
    )


def letters_legend(rows: Sequence[Row], cells: Sequence[Sequence[Cell]]) -> str:
    """What coarse cells mean: those of the letters that are drawn."""
    drawn = {cell.text[0] for row in cells for cell in row}
    words = [*kinds_in_words(rows), f"{PAIR} a forward and a backward as one"]
    return ", ".join(word for word in words if word[0] in drawn)


def per_column(scale: float) -> str:
    """How much time a column stands for, to follow a legend of letters."""
    return f"; a column is {number(float(f'{1 / scale:.2g}'))} of time"


def kinds_in_words(rows: Sequence[Row]) -> list[str]:
    """The letter and the meaning of each kind that occurs."""
    spans = [span for row in rows for span in row.spans]
    kinds = {span.action.kind for span in spans}
    kinds |= {span.beside.kind for span in spans if span.beside is not None}
    words = [f"{letter(kind)} {word}" for kind, word in WORDS.items() if kind in kinds]
    return words + ([f"{STEP} step of the optimiser"] if Kind.OPTIM_STEP in kinds else [])


def painted_legend(text: str) -> Iterator[Piece]:
    """A legend, the first of each letter that stands alone as the drawing shows it."""
    styles = {letter(kind): shade(kind) for kind in WORDS} | {STEP: STEP_STYLE, PAIR: PAIR_STYLE}
    letters = "|".join(map(re.escape, styles))
    for part in re.split(rf"((?<!\w)(?:{letters})(?!\w))", text):
        yield Piece(part, styles.pop(part, ""))
    yield Piece("\n")
