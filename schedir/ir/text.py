"""The `.sched` text form. Printing and parsing gives an equal schedule; errors name line and
column.

    schedir 1
    name 1f1b
    microbatches 2
    placement 0 1                 # the rank of each stage; 0,3 for a stage on two ranks
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
from itertools import chain, islice

from schedir.errors import ParseError
from schedir.ir.action import Entry
from schedir.ir.schedule import FORMAT_VERSION, Schedule, expect_schedule, sched_text
from schedir.ir.tokens import NUMBER, Reader, clip, parse_action, parse_entry, parse_parts

# A word or a comment. A lone CR is a word, and none that is allowed anywhere.
_PIECE = re.compile(r"#[^\n]*|[^ \t\r\n#]+|\r(?!\n|\Z)")
_NEXT_STATEMENT = re.compile(r"\n(?=[^ \t\r\n#])")
_RANK_LINE = re.compile(rf"rank[ \t]+({NUMBER})[ \t]*:")
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
    return sched_text(schedule)


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
        self.headers: dict[str, int] = {}
        self.name = ""
        self.microbatches = 0
        self.placement: list[tuple[int, ...]] = []
        self.ranks: dict[int, tuple[Entry, ...]] = {}

    def parse(self) -> Schedule:
        for start, end in self._statements():
            match = _RANK_LINE.match(self.text, start, end)
            if match:
                self._rank(match, end)
            else:
                self._header(start, end)
        for key in ("schedir", "name", "microbatches", "placement"):
            if key not in self.headers:
                raise self.error(f"the file ends without a '{key}' line", len(self.text))
        count = len(self.ranks)
        if not count:
            raise self.error("the file ends without a 'rank 0:' line", len(self.text))
        if max(self.ranks) >= count:
            missing = next(rank for rank in range(count) if rank not in self.ranks)
            beyond = min(rank for rank in self.ranks if rank >= count)
            raise self.error(f"rank {missing} has no line", self._start_of(beyond))
        for stage, held in enumerate(self.placement):
            if held[-1] >= count:
                words = self._words(self.headers["placement"], len(self.text))
                raise self.error(
                    f"placement names rank {held[-1]}, but there are {count} rank lines",
                    next(islice(words, stage + 1, None)).start(),
                )
        actions = tuple(self.ranks[rank] for rank in range(count))
        return Schedule(self.name, self.microbatches, tuple(self.placement), actions)

    def _statements(self) -> Iterator[tuple[int, int]]:
        """Where each line starts, and where the lines that continue it end."""
        start = 0
        for match in _NEXT_STATEMENT.finditer(self.text):
            yield start, match.end()
            start = match.end()
        yield start, len(self.text)

    def _words(self, start: int, end: int) -> Iterator[re.Match[str]]:
        for match in _PIECE.finditer(self.text, start, end):
            if self.text[match.start()] != "#":
                yield match

    def _header(self, start: int, end: int) -> None:
        words = self._words(start, end)
        first = next(words, None)
        if first is None:  # blank lines and comments at the top of the file
            return
        if first.start() > start:
            place = self.text.rfind("\n", 0, first.start()) + 1
            raise self.error("a continuation line with no line above to continue", place)
        key = first[0]
        if not self.headers and key != "schedir":
            raise self._no_version(key, start)
        if key in self.headers:
            line = self.line(self.headers[key])
            raise self.error(f"a second '{key}' line; the first is line {line}", start)
        if key not in ("schedir", "name", "microbatches", "placement"):
            raise self.error(
                f"unknown header {clip(key)}; known: schedir, name, microbatches, placement, "
                "and 'rank N:' lines",
                start,
            )
        self.headers[key] = start
        value = next(words, None)
        if value is None:
            raise self.error(f"'{key}' needs a value", first.end())
        if key == "name":
            self._name(start, value.start(), end)
        elif key == "placement":
            # Shared, as a tuple for each of millions of stages takes far more memory than its word.
            held = lru_cache(_MOST_SHARED)(_ranks_of)
            for word in chain([value], words):
                self.placement.append(self.read(held, word[0], word.start()))
        else:
            for extra in words:
                raise self.error(f"'{key}' takes one value", extra.start())
            number, offset = self.read(_number, value[0], value.start()), value.start()
            if key == "microbatches":
                self.microbatches = number
                if number < 1:
                    raise self.error("a schedule needs at least one microbatch", offset)
            elif number != FORMAT_VERSION:
                known = f"this is schedir's format {FORMAT_VERSION}"
                raise self.error(f"format {number} is unknown; {known}", offset)

    def _name(self, line: int, start: int, end: int) -> None:
        stop = self.text.find("\n", line, end)
        if stop < 0:
            stop = end
        for more in self._words(stop, end):
            raise self.error("a name stands on one line", more.start())
        # Inner runs of blanks belong to the name.
        self.name = self.text[start:stop].partition("#")[0].rstrip(" \t\r")
        if not self.name.isprintable():
            offset, wrong = next((i, c) for i, c in enumerate(self.name) if not c.isprintable())
            raise self.error(f"{wrong!r} can't stand in a name", start + offset)

    def _rank(self, match: re.Match[str], end: int) -> None:
        rank = int(match[1])
        if "schedir" not in self.headers:
            raise self._no_version("rank", match.start())
        if rank in self.ranks:
            line = self.line(self._start_of(rank))
            raise self.error(
                f"a second line for rank {rank}; the first is line {line}", match.start()
            )
        self.ranks[rank] = tuple(self._entries(match.end(), end))

    def _entries(self, start: int, end: int) -> Iterator[Entry]:
        word = None
        try:  # once for all, as there may be millions
            for word in self._words(start, end):
                token = word[0]
                yield parse_entry(token) if token[0] == "(" else parse_action(token)
        except ValueError as error:
            raise self.fault(error, word.start() if word else start) from None

    def _start_of(self, rank: int) -> int:
        """Where the line of a rank starts."""
        lines = (_RANK_LINE.match(self.text, *statement) for statement in self._statements())
        return next(line.start() for line in lines if line and int(line[1]) == rank)

    def _no_version(self, word: str, offset: int) -> ParseError:
        return self.error(
            f"the first line must be 'schedir {FORMAT_VERSION}', not {clip(word)}", offset
        )


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
