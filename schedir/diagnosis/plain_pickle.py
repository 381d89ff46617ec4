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

# By opcode. Those whose number or size takes several bytes have its form.
_NUMBERS = {ord("M"): Struct("<H"), ord("J"): Struct("<i"), ord("G"): Struct(">d")}
_TEXTS = {ord("X"): Struct("<I"), 0x8C: Struct("<B"), 0x8D: Struct("<Q")}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: dict[int, Callable[[], Any]] = {ord("]"): list, ord("}"): dict, ord(")"): tuple}
_SKIPPED = {0x80: 1, 0x95: 8}  # the protocol's number, the size of a frame
_ADDED = {ord("a"), ord("e"), ord("s"), ord("u")}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_GET, _LONG_GET, _PUT, _LONG_PUT, _PUT_NEXT = ord("h"), ord("j"), ord("q"), ord("r"), 0x94
_BYTE, _INTEGER, _MARK, _TUPLE, _STOP = ord("K"), 0x8A, ord("("), ord("t"), ord(".")
_PLACE = Struct("<I")  # in the memo


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
        if code == _GET:
            push(memo[data[at]])
            at += 1
        elif code == _LONG_GET:
            push(memo[_PLACE.unpack_from(data, at)[0]])
            at += 4
        elif code == _LONG_PUT:
            memo[_PLACE.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif code == _BYTE:
            push(data[at])
            at += 1
        elif code == _MARK:
            marks.append(len(stack))
        elif code in _EMPTY:
            containers += 1
            if containers > _MOST_CONTAINERS:
                break
            push(_EMPTY[code]())
        elif code in _ADDED:
            begin = marks.pop() if code in b"eu" else len(stack) - (2 if code in b"s" else 1)
            items = stack[max(0, begin) :]
            del stack[max(0, begin) :]
            _add(stack[-1], items, code in b"su")
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code in _TEXTS:
            form = _TEXTS[code]
            end = at + form.size + form.unpack_from(data, at)[0]
            if end > len(data):
                raise IndexError
            push(data[at + form.size : end].decode("utf-8", "replace"))
            at = end
        elif code in _NUMBERS:
            push(_NUMBERS[code].unpack_from(data, at)[0])
            at += _NUMBERS[code].size
        elif code == _INTEGER:
            push(int.from_bytes(data[at + 1 : at + 1 + data[at]], "little", signed=True))
            at += 1 + data[at]
        elif code == _PUT:
            memo[data[at]] = stack[-1]
            at += 1
        elif code == _PUT_NEXT:
            memo[len(memo)] = stack[-1]
        elif code in _TUPLES or code == _TUPLE:
            containers += 1
            if containers > _MOST_CONTAINERS:
                break
            begin = marks.pop() if code == _TUPLE else max(0, len(stack) - _TUPLES[code])
            stack[begin:] = [tuple(stack[begin:])]
        elif code in _SKIPPED:
            at += _SKIPPED[code]
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
