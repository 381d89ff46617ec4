"""What the readers of text share: tokens, numbers, and positions in a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from schedir.errors import ParseError
from schedir.ir.action import Action, Entry, Together
from schedir.ir.kinds import STAGE_WIDE, Kind

# Nine digits are far beyond any schedule, and keep a hostile file from costing time or memory.
NUMBER = "(?:0|[1-9][0-9]{0,8})"
_TOKEN = re.compile(rf"({NUMBER})([A-Z][A-Z_]*)({NUMBER})?(?:@({NUMBER}))?", re.ASCII)
_NESTED = re.compile(r"[(;](?=\()")  # up to the bracket that opens the inner entry
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_COMMAND = re.compile(r"\s*(?:::|##\[)")  # a line that GitHub's runner obeys
T = TypeVar("T")
_KINDS = {kind.value: kind for kind in Kind}


def read_action(token: str, form: re.Pattern[str], kinds: Mapping[str, Kind], such: str) -> Action:
    """The action of a token of some `form`: its stage, the name of its kind among `kinds`, and its
    other numbers. `such` says in an error what a token reads. Raises ValueError with the reason."""
    match = form.fullmatch(token)
    if match is None:
        raise ValueError(f"{clip(token)} is not an action{such}")
    stage, name, *numbers = match.groups()
    kind = kinds.get(name)
    if kind is None:
        raise ValueError(f"unknown action kind {clip(name)}; known: {' '.join(kinds)}")
    if numbers[0] is not None and kind in STAGE_WIDE:
        raise ValueError(f"{name} names no microbatch: write {stage}{name}")
    if numbers[0] is None and kind not in STAGE_WIDE:
        raise ValueError(f"{clip(token)} lacks its microbatch: write {stage}{name}0, say")
    return Action(kind, int(stage), *(None if each is None else int(each) for each in numbers))


@lru_cache(maxsize=1 << 16)
def parse_action(token: str) -> Action:
    """The action that a token such as `0F4@1` names. Raises ValueError with the reason."""
    such = "; one reads <stage><KIND>[<microbatch>][@<version>], such as 0F1 or 0SEND_ACT1"
    return read_action(token, _TOKEN, _KINDS, such)


class TokenError(ValueError):
    """A token of several actions that names no entry; `offset` is where the fault is in it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def parse_entry(token: str) -> Entry:
    """The entry that a token names: an action, or several such as `(0F4;7B3)`.

    Raises ValueError with the reason, a TokenError if the fault is not at the token's beginning.
    """
    if not token.startswith("("):
        return parse_action(token)
    end = token.find(")")
    if end < 0:
        raise ValueError(
            f"{clip(token)} lacks its ')': actions that run together are one word without blanks, "
            "such as (0F4;7B3)"
        )
    # The first ')' of nested ones ends the inner one, so that what follows it is not to blame.
    nested = _NESTED.search(token, 0, end)
    if nested:
        raise TokenError("entries of several actions can't be nested", nested.end())
    if token[end + 1 :]:
        raise TokenError(f"{clip(token[end + 1 :])} can't follow the ')' of an entry", end + 1)
    return Together(parse_parts(token[1:end], ";", parse_action, 1))


def parse_parts(
    text: str, separator: str, parse: Callable[[str], T], offset: int = 0
) -> Iterator[T]:
    """What `parse` makes of each part of `text`, which stands at `offset` in its token.

    Raises TokenError for an empty part, and for what `parse` raises.
    """
    for part in re.finditer(rf"(?:^|{separator})([^{separator}]*)", text):
        token = part[1].strip(" \t")
        try:
            if not token:
                raise ValueError(f"an empty part; parts stand between '{separator}'")
            yield parse(token)
        except ValueError as error:
            raise TokenError(str(error), offset + part.start(1) + part[1].find(token)) from None


def decode(text: str | bytes, file: str) -> str:
    """The text of a file's bytes, without a byte order mark.

    Raises ParseError at the first byte that is 0 or not UTF-8.
    """
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        found = text.decode("utf-8-sig")
        place = text.find(b"\0")
        if place < 0:
            return found
    except UnicodeDecodeError as error:
        # Its places are those behind the mark.
        place = error.start + len(text) - len(error.object)
    is_binary = _CONTROL.search(text) is not None
    raise ParseError(
        f"{'no text, but binary: ' * is_binary}byte 0x{text[place]:02x} is "
        f"{'not UTF-8' if text[place] else 'of no text'}",
        file,
        text.count(b"\n", 0, place) + 1,
        len(text[text.rfind(b"\n", 0, place) + 1 : place].decode("utf-8-sig")) + 1,
        is_binary,
    )


class Reader:
    """A text and the name of its file, for errors that name the line and the column.

    Readers store only offsets, so that a hostile file costs no memory. Lines and columns are
    computed only for an error.

    Raises ParseError for bytes that are no text.
    """

    def __init__(self, text: str | bytes, file: str) -> None:
        self.text, self.file = decode(text, file), file

    def line(self, offset: int) -> int:
        """The line of a character, counted from 1."""
        return self.text.count("\n", 0, offset) + 1

    def error(self, message: str, offset: int) -> ParseError:
        """The error to raise for what is wrong at a character."""
        column = offset - self.text.rfind("\n", 0, offset)
        return ParseError(message, self.file, self.line(offset), column)

    def fault(self, error: ValueError, offset: int) -> ParseError:
        """The error to raise for a token that names nothing, such as a TokenError."""
        return self.error(str(error), offset + getattr(error, "offset", 0))

    def read(self, parse: Callable[[str], T], token: str, offset: int) -> T:
        """What `parse` makes of a token. Raises ParseError for its ValueError."""
        try:
            return parse(token)
        except ValueError as error:
            raise self.fault(error, offset) from None


def printable(text: str) -> str:
    r"""Text from anyone, such as a file name, on one line that no terminal and no CI obeys.

    Characters that can't be printed are escaped, as in `a\x1b[31m.sched` and `two\nlines`. So is
    the first character of a command on GitHub: `\x3a:error::`.
    """
    if _COMMAND.match(text):
        blanks = len(text) - len(text.lstrip())
        return f"{printable(text[:blanks])}\\x{ord(text[blanks]):x}{printable(text[blanks + 1 :])}"
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def clip(value: object) -> str:
    """The value as Python writes it, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= 42 else f"{text[:38]}...{text[-1]}"
