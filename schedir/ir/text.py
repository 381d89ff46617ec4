"""The `.sched` text form. Printing and parsing gives an equal schedule; errors name line and
column.

    schedir 1
    name 1f1b
    microbatches 2
    placement 0 1                 # the rank of each stage; 0,3 for a stage on two ranks
    boundaries 5                  # may be left out: the first layer of stage 1, and so on
    rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP
    rank 1: 1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP

An entry of several actions is one word, such as (0F4;7B3) or (0SEND_ACT1;0RECV_GRAD0). `#` starts a
comment. A line that begins with a blank continues the line above. Blanks are spaces and tabs, and a
line ends in LF or CR LF. Any other white space, such as a lone CR, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, islice, pairwise

import attrs

from schedir.errors import ParseError
from schedir.ir.action import Entry
from schedir.ir.schedule import FORMAT_VERSION, Schedule, expect_schedule, sched_text
from schedir.ir.tokens import NUMBER, Reader, clip, parse_action, parse_entry, parse_parts

# A word or a comment. A lone CR is a word, and none that is allowed anywhere.
_PIECE = re.compile(r"#[^\n]*|[^ \t\r\n#]+|\r(?!\n|\Z)")
_STATEMENT_END = re.compile(r"\n(?=[^ \t\r\n#])|\Z")
_RANK_LINE = re.compile(rf"rank[ \t]+({NUMBER})[ \t]*:")
_NEEDED = ("schedir", "name", "microbatches", "placement")
_HEADERS = (*_NEEDED, "boundaries")
_MOST_SHARED = 1000


def dumps(schedule: Schedule) -> str:
    """The schedule as `.sched` text, which `loads` turns back into an equal schedule.

    Raises TypeError for anything that is not a Schedule.

    >>> import schedir
    >>> print(schedir.dumps(schedir.build("1f1b", ranks=1, microbatches=2)), end="")
    schedir 1
    name 1f1b
    microbatches 2
    placement 0
    rank 0: 0F0 0B0 0F1 0B1 0OPTIM_STEP
    """
    expect_schedule(schedule)
    return sched_text(schedule, schedule.boundaries)


def loads(text: str | bytes, file: str = "<string>") -> Schedule:
    """Parse `.sched` text. `file` is the name that errors show.

    Raises ParseError, with line and column, for anything that is not a whole schedule. Raises
    TypeError for anything but text; to read a file, pass its name to `schedir.build`.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> schedir.loads(schedir.dumps(schedule)) == schedule
    True
    """
    if not isinstance(text, (str, bytes)):
        raise TypeError(
            f"text must be a str or bytes, not {type(text).__name__}; schedir.build reads files"
        )
    return _Parser(text, file).parse()


class _Parser(Reader):
    def __init__(self, text: str | bytes, file: str) -> None:
        super().__init__(text, file)
        self.starts: dict[str, int] = {}  # where the line of each header starts
        self.name = ""
        self.microbatches = 0
        self.placement: list[tuple[int, ...]] = []
        self.boundaries: tuple[int, ...] | None = None
        self.ranks: dict[int, tuple[Entry, ...]] = {}

    def parse(self) -> Schedule:
        ends = (match.end() for match in _STATEMENT_END.finditer(self.text))
        for start, end in pairwise(chain([0], ends)):
            self._statement(start, end)
        count, last = max(1, len(self.ranks)), len(self.text)
        without = (key for key in _NEEDED if key not in self.starts)
        ranks = (f"rank {rank}:" for rank in range(count) if rank not in self.ranks)
        for key in chain(without, ranks):
            raise self.error(f"the file ends without a '{key}' line", last)
        for stage, held in enumerate(self.placement):
            if held[-1] >= count:
                words = self._words(self.starts["placement"], last)
                raise self.error(
                    f"placement names rank {held[-1]}, but there are {count} rank lines",
                    next(islice(words, stage + 1, None)).start(),
                )
        actions = map(self.ranks.__getitem__, range(count))
        found = Schedule(self.name, self.microbatches, self.placement, actions)
        try:
            return attrs.evolve(found, boundaries=self.boundaries)
        except ValueError as error:
            raise self.error(str(error), self.starts["boundaries"]) from None

    def _words(self, start: int, end: int) -> Iterator[re.Match[str]]:
        return (
            each
            for each in _PIECE.finditer(self.text, start, end)
            if self.text[each.start()] != "#"
        )

    def _statement(self, start: int, end: int) -> None:
        """Read a line, with the lines that continue it."""
        words = self._words(start, end)
        first = next(words, None)
        if first is None:  # blank lines and comments at the top of the file
            return
        if first.start() > start:
            place = self.text.rfind("\n", 0, first.start()) + 1
            raise self.error("a continuation line with no line above to continue", place)
        key, rank = first[0], _RANK_LINE.match(self.text, start, end)
        if not self.starts and key != "schedir":
            wanted = f"'schedir {FORMAT_VERSION}', not {clip(first[0])}"
            raise self.error(f"the first line must be {wanted}", start)
        if not rank and key not in _HEADERS:
            raise self.error(
                f"unknown header {clip(key)}; known: {', '.join(_HEADERS)}, and 'rank N:' lines",
                start,
            )
        if key in self.starts:
            raise self._second(key, self.starts[key], start)
        if rank:
            number = int(rank[1])
            if number in self.ranks:
                known = re.search(rf"(?m)^rank[ \t]+{number}[ \t]*:", self.text)
                raise self._second(f"rank {number}:", known.start() if known else 0, start)
            self.ranks[number] = tuple(self._entries(rank.end(), end))
            return
        self.starts[key] = start
        value = next(words, None)
        if value is None:
            raise self.error(f"'{key}' needs a value", first.end())
        offset = value.start()
        if key == "name":
            self._name(first.end(), offset, end)
        elif key == "placement":
            # Shared, as a tuple for each of millions of stages takes far more memory than its word.
            held = lru_cache(_MOST_SHARED)(_ranks_of)
            for word in chain([value], words):
                self.placement.append(self.read(held, word[0], word.start()))
        elif key == "boundaries":
            self.boundaries = tuple(
                self.read(_number, word[0], word.start()) for word in chain([value], words)
            )
        else:
            for extra in words:
                raise self.error(f"'{key}' takes one value", extra.start())
            number = self.read(_number, value[0], offset)
            if key == "microbatches":
                self.microbatches = number
                if number < 1:
                    raise self.error("a schedule needs at least one microbatch", offset)
            elif number != FORMAT_VERSION:
                ours = f"this is schedir's format {FORMAT_VERSION}"
                raise self.error(f"format {number} is unknown; {ours}", offset)

    def _second(self, line: str, known: int, start: int) -> ParseError:
        return self.error(f"a second '{line}' line; the first is line {self.line(known)}", start)

    def _name(self, after: int, start: int, end: int) -> None:
        # Inner runs of blanks belong to the name.
        line = self.text[after:end].partition("\n")[0].partition("#")[0]
        for more in self._words(after + len(line), end):
            raise self.error("a name stands on one line", more.start())
        self.name = line.strip(" \t\r")
        for offset, wrong in enumerate(self.name, start):
            if not wrong.isprintable():
                raise self.error(f"{wrong!r} can't stand in a name", offset)

    def _entries(self, start: int, end: int) -> Iterator[Entry]:
        word = None
        try:  # once for all, as there may be millions
            for word in self._words(start, end):
                token = word[0]
                yield parse_entry(token) if token[0] == "(" else parse_action(token)
        except ValueError as error:
            raise self.fault(error, word.start() if word else start) from None


def _number(word: str) -> int:
    """The number that a word names. Raises ValueError."""
    if not re.fullmatch(NUMBER, word):
        raise ValueError(f"expected a number of at most 9 digits, not {clip(word)}")
    return int(word)


def _ranks_of(word: str) -> tuple[int, ...]:
    """The ranks that a word of the placement names, ascending. Raises TokenError."""
    held: set[int] = set()

    def rank(part: str) -> int:
        number = _number(part)
        if number in held:
            raise ValueError(f"rank {number} is named twice")
        held.add(number)
        return number

    return tuple(sorted(parse_parts(word, ",", rank)))
