"""The `.sched` text form: print → parse is the identity, and errors name line and column.

    schedir 1
    name 1f1b
    microbatches 2
    placement 0 1                 # the rank of each stage; 0,3 for a stage on two ranks
    rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP
    rank 1: 1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP

`#` starts a comment; a line that begins with white space continues the one above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import attrs

from schedir.errors import ParseError
from schedir.ir.actions import STAGE_WIDE, Action, Kind
from schedir.ir.schedule import Schedule

FORMAT_VERSION = 1

# Nine digits are far beyond any schedule, and keep a hostile file from costing time or memory.
NUMBER = "(?:0|[1-9][0-9]{0,8})"
_TOKEN = re.compile(rf"({NUMBER})([A-Z][A-Z_]*)({NUMBER})?(?:@({NUMBER}))?", re.ASCII)
_WORD = re.compile(r"\S+")
_RANK_LINE = re.compile(rf"rank[ \t]+({NUMBER})[ \t]*:")
_KINDS = {kind.value: kind for kind in Kind}


def dumps(schedule: Schedule) -> str:
    """The schedule as `.sched` text, which `loads` turns back into an equal schedule."""
    placement = " ".join(",".join(map(str, held)) for held in schedule.placement)
    lines = [
        f"schedir {FORMAT_VERSION}",
        f"name {schedule.name}",
        f"microbatches {schedule.microbatches}",
        f"placement {placement}",
    ]
    for rank, actions in enumerate(schedule.actions):
        lines.append(" ".join([f"rank {rank}:", *map(str, actions)]))
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=1 << 16)
def parse_action(token: str) -> Action:
    """The action that a token such as `0F4@1` names. Raises ValueError with the reason."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(
            f"{clip(token)} is not an action; one reads <stage><KIND>[<microbatch>][@<version>], "
            "such as 0F1 or 0SEND_ACT1"
        )
    stage, name, microbatch, version = match.groups()
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(f"unknown action kind {clip(name)}; known: {' '.join(_KINDS)}")
    if kind in STAGE_WIDE and microbatch is not None:
        raise ValueError(f"{kind.value} names no microbatch: write {stage}{kind.value}")
    if kind not in STAGE_WIDE and microbatch is None:
        raise ValueError(f"{clip(token)} lacks its microbatch: write {stage}{kind.value}0, say")
    return Action(
        kind,
        int(stage),
        None if microbatch is None else int(microbatch),
        None if version is None else int(version),
    )


@attrs.frozen
class _Word:
    """A piece of the text and where it stands, both counted from 1."""

    text: str
    line: int
    column: int


@attrs.frozen
class _Statement:
    """A line and the lines that continue it, comments removed."""

    pieces: list[_Word]

    @property
    def first(self) -> _Word:
        return self.pieces[0]

    def words(self, skip: int) -> Iterator[_Word]:
        """The words after the first `skip` characters of the statement's first line."""
        for piece in self.pieces:
            start = skip if piece is self.first else 0
            for match in _WORD.finditer(piece.text, start):
                yield _Word(match[0], piece.line, piece.column + match.start())


def loads(text: str | bytes, file: str = "<string>") -> Schedule:
    """Parse `.sched` text. `file` is the name that errors show.

    Raises ParseError, with line and column, for anything that is not a whole schedule.
    """
    return _Parser(file).parse(decode(text, file))


def decode(text: str | bytes, file: str) -> str:
    """The text of a file's bytes. Raises ParseError at the first byte that is not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        before = text[: error.start].decode("utf-8")
        line = before.count("\n") + 1
        column = len(before) - (before.rfind("\n") + 1) + 1
        raise ParseError(
            f"byte 0x{text[error.start]:02x} is not UTF-8", file, line, column
        ) from None


class _Parser:
    def __init__(self, file: str) -> None:
        self.file = file
        self.headers: dict[str, _Word] = {}
        self.name = ""
        self.microbatches = 0
        self.placement: list[tuple[int, ...]] = []
        self.placement_words: list[_Word] = []
        self.ranks: dict[int, tuple[Action, ...]] = {}
        self.rank_words: dict[int, _Word] = {}

    def parse(self, text: str) -> Schedule:
        lines = text.split("\n")
        for statement in self._statements(lines):
            match = _RANK_LINE.match(statement.first.text)
            if match:
                self._rank(statement, int(match[1]), match.end())
            else:
                self._header(statement)
        end = _Word("", len(lines), len(lines[-1]) + 1)
        for key in ("schedir", "name", "microbatches", "placement"):
            if key not in self.headers:
                raise self._error(f"the file ends without a '{key}' line", end)
        if not self.ranks:
            raise self._error("the file ends without a 'rank 0:' line", end)
        for rank in sorted(self.ranks):
            if rank >= len(self.ranks):
                missing = next(r for r in range(rank) if r not in self.ranks)
                raise self._error(f"rank {missing} has no line", self.rank_words[rank])
        for word, held in zip(self.placement_words, self.placement, strict=True):
            if max(held) >= len(self.ranks):
                raise self._error(
                    f"placement names rank {max(held)}, but there are {len(self.ranks)} rank lines",
                    word,
                )
        actions = tuple(self.ranks[rank] for rank in range(len(self.ranks)))
        return Schedule(self.name, self.microbatches, tuple(self.placement), actions)

    def _statements(self, lines: list[str]) -> Iterator[_Statement]:
        pieces: list[_Word] = []
        for number, raw in enumerate(lines, 1):
            text = raw.split("#", 1)[0].rstrip()
            if not text:
                continue
            piece = _Word(text, number, 1)
            if text[0].isspace():
                if not pieces:
                    raise self._error("a continuation line with no line above to continue", piece)
                pieces.append(piece)
                continue
            if pieces:
                yield _Statement(pieces)
            pieces = [piece]
        if pieces:
            yield _Statement(pieces)

    def _header(self, statement: _Statement) -> None:
        key, *values = statement.words(0)
        if not self.headers and key.text != "schedir":
            raise self._error(f"the first line must be 'schedir {FORMAT_VERSION}'", key)
        if key.text in self.headers:
            line = self.headers[key.text].line
            raise self._error(f"a second '{key.text}' line; the first is line {line}", key)
        if key.text not in ("schedir", "name", "microbatches", "placement"):
            raise self._error(
                f"unknown header {clip(key.text)}; known: schedir, name, microbatches, placement, "
                "and 'rank N:' lines",
                key,
            )
        self.headers[key.text] = key
        if not values:
            raise self._error(f"'{key.text}' needs a value", _after(key))
        if key.text == "name":
            self._name(statement, values)
        elif key.text == "placement":
            self.placement_words = values
            self.placement = [self._held(word) for word in values]
        else:
            if len(values) > 1:
                raise self._error(f"'{key.text}' takes one value", values[1])
            number = self._number(values[0])
            if key.text == "schedir" and number != FORMAT_VERSION:
                raise self._error(
                    f"format {number} is unknown; this is schedir's format {FORMAT_VERSION}",
                    values[0],
                )
            if key.text == "microbatches":
                if number < 1:
                    raise self._error("a schedule needs at least one microbatch", values[0])
                self.microbatches = number

    def _name(self, statement: _Statement, values: list[_Word]) -> None:
        if len(statement.pieces) > 1:
            raise self._error("a name stands on one line", statement.pieces[1])
        # Inner runs of blanks belong to the name.
        self.name = statement.first.text[values[0].column - 1 :]
        for offset, character in enumerate(self.name):
            if not character.isprintable():
                place = _Word("", values[0].line, values[0].column + offset)
                raise self._error(f"{character!r} can't stand in a name", place)

    def _rank(self, statement: _Statement, rank: int, skip: int) -> None:
        if "schedir" not in self.headers:
            raise self._error(f"the first line must be 'schedir {FORMAT_VERSION}'", statement.first)
        if rank in self.ranks:
            line = self.rank_words[rank].line
            raise self._error(
                f"a second line for rank {rank}; the first is line {line}", statement.first
            )
        actions = []
        for word in statement.words(skip):
            try:
                actions.append(parse_action(word.text))
            except ValueError as error:
                raise self._error(str(error), word) from None
        self.ranks[rank] = tuple(actions)
        self.rank_words[rank] = statement.first

    def _held(self, word: _Word) -> tuple[int, ...]:
        held: list[int] = []
        column = word.column
        for part in word.text.split(","):
            rank = self._number(_Word(part, word.line, column))
            if rank in held:
                raise self._error(f"rank {rank} is named twice", _Word(part, word.line, column))
            held.append(rank)
            column += len(part) + 1
        return tuple(held)

    def _number(self, word: _Word) -> int:
        if not re.fullmatch(NUMBER, word.text):
            raise self._error(f"expected a number of at most 9 digits, not {clip(word.text)}", word)
        return int(word.text)

    def _error(self, message: str, word: _Word) -> ParseError:
        return ParseError(message, self.file, word.line, word.column)


def _after(word: _Word) -> _Word:
    return _Word("", word.line, word.column + len(word.text))


def clip(text: str) -> str:
    """`text` in quotes, cut to a length that fits a message."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
