"""Read a pickle that holds plain values, from a machine that one does not trust.

Python's own unpickler runs what a pickle names, and one that allows no class still lets a few bytes
take gigabytes (the number of a memo) or end the process (a tuple in a tuple, a million deep, as the
key of a dict). So this one knows only what the pickles of torch's flight recorder are made of:
numbers, text, lists, tuples and dicts with keys of text or numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error
from typing import Any

_MOST_STEPS = 8_000_000
"""Of one pickle; 20,000 entries, which is ten times torch's default, take about 3 million."""
_MOST_CONTAINERS = 2_000_000

_FORMS = {
    code: Struct(form)
    for form, codes in {
        "<B": b"Khq\x80\x8a\x8c",
        "<H": b"M",
        "<i": b"J",
        "<I": b"Xjr",
        "<Q": b"\x8d\x95",
        ">d": b"G",
    }.items()
    for code in codes
}
"""The form of the number that follows an opcode."""
_GET, _PUT, _PUT_NEXT = b"hj", b"qr", 0x94
_INTEGER, _SIZED, _SKIPPED = 0x8A, b"X\x8a\x8c\x8d", b"\x80\x95"
_EMPTY: dict[int, Callable[[], Any]] = {ord("]"): list, ord("}"): dict, ord(")"): tuple}
_MARK, _TUPLE, _TUPLES, _STOP = ord("("), ord("t"), b"t\x85\x86\x87", ord(".")
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}


def read_plain_pickle(data: bytes) -> object:
    """The value that a pickle holds. Raises ValueError with what is wrong."""
    try:
        return _read(data)
    except (IndexError, error):
        raise ValueError("the file ends too early, or is no pickle") from None
    except KeyError:
        raise ValueError("it is a damaged pickle") from None


def _read(data: bytes) -> object:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push = stack.append
    containers = at = 0
    for _ in range(_MOST_STEPS):
        code = data[at]
        at += 1
        if code in _FORMS:
            form = _FORMS[code]
            (number,) = form.unpack_from(data, at)
            at += form.size
            if code in _GET:
                push(memo[number])
            elif code in _PUT:
                memo[number] = stack[-1]
            elif code in _SIZED:
                content = data[at : at + number]
                if len(content) < number:
                    raise IndexError
                at += number
                if code == _INTEGER:
                    push(int.from_bytes(content, "little", signed=True))
                else:
                    push(content.decode("utf-8", "replace"))
            elif code not in _SKIPPED:  # the protocol's number, the size of a frame
                push(number)
        elif code == _MARK:
            marks.append(len(stack))
        elif code in _EMPTY or code in _TUPLES:
            containers += 1
            if containers > _MOST_CONTAINERS:
                break
            if code in _EMPTY:
                push(_EMPTY[code]())
            else:  # of what follows the mark, or of one, two or three values
                begin = marks.pop() if code == _TUPLE else max(0, len(stack) + 0x84 - code)
                stack[begin:] = [tuple(stack[begin:])]
        elif code in b"aesu":
            begin = marks.pop() if code in b"eu" else len(stack) - (2 if code in b"s" else 1)
            items = stack[max(0, begin) :]
            del stack[max(0, begin) :]
            _add(stack[-1], items, code in b"su")
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code == _PUT_NEXT:
            memo[len(memo)] = stack[-1]
        elif code == _STOP:
            return stack[-1]
        else:
            raise ValueError(f"its byte {at - 1}, {code:#04x}, stands for no plain value")
    raise ValueError("it holds more than can be read")


def _add(container: object, items: list[Any], pairs: bool) -> None:
    if not pairs and type(container) is list:
        container.extend(items)
    elif pairs and type(container) is dict and len(items) % 2 == 0:
        for key in items[::2]:
            if type(key) is not str and type(key) is not int:
                raise ValueError("a key of a dict is neither text nor a number")
        container.update(zip(items[::2], items[1::2], strict=True))
    else:
        raise ValueError("it is a damaged pickle")
