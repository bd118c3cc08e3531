"""Protobuf text, read line by line without protobuf and without a schema.

A message is a list of (field, value, line) in file order; a value is a number, a bool, a string, an
enum's name, or a message. ``top_messages`` yields the messages of the file one
after the other, so that a graph is never held as text and as messages at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mla_fusion.tools.dumps.model import DumpError

Field = tuple[str, Any, int]
Message = list[Field]

_VALUE = r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([-+.\w]+))"""
# no two \s* side by side: linear
_LINE = re.compile(rf"\s*(?:(\w+)\s*(?::\s*(?:{_VALUE}|(\{{))|(\{{))|(\}}))")
_REST = re.compile(r"\s*[;,]?\s*(?:#.*\s*)?")
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_DEPTH = 64


def top_messages(lines: Iterable[str], inside: str = "") -> Iterator[Field]:
    """The fields at the top of the text. A message ``inside`` there is given empty, then its
    fields, as they are read.

    Raises DumpError, without a path, for anything but protobuf text.
    """
    stack: list[tuple[str, Message, int]] = []
    number = offset = entered = 0
    for number, line in enumerate(lines, 1):
        for name, value, at in _tokens(line, number, offset):
            if value is _OPEN:
                if len(stack) >= _DEPTH:
                    raise DumpError("messages nest too deeply", number, offset + at)
                if name == inside and not stack and not entered:
                    entered = number
                    yield name, [], number
                else:
                    stack.append((name, [], number))
                continue
            if value is _CLOSE:
                if not stack and entered:
                    entered = 0
                    continue
                if not stack:
                    raise DumpError("a '}' without its '{'", number, offset + at)
                name, value, opened = stack.pop()
            else:
                opened = number
            if stack:
                stack[-1][1].append((name, value, opened))
            else:
                yield name, value, opened
        offset += len(line)
    if entered or stack:
        name, _, opened = stack[-1] if stack else (inside, [], entered)
        said = f"the file ends inside {name!r} of line {opened}: truncated"
        raise DumpError(said, number, offset)


def parse(text: str) -> Message:
    """A whole small message."""
    return list(top_messages(text.splitlines(keepends=True)))


_OPEN, _CLOSE = object(), object()  # begin and end of a message among the tokens


def _tokens(line: str, number: int, offset: int) -> Iterator[tuple[str, Any, int]]:
    """(field, value, place in the line)."""
    place = 0
    while True:
        rest = _REST.match(line, place)
        place = rest.end() if rest else place
        if place >= len(line):
            return
        found = _LINE.match(line, place)
        if found is None:
            said = f"not protobuf text: {line[place : place + 40].strip()!r}"
            raise DumpError(said, number, offset + place)
        name, double, single, bare, message, opens, closes = found.groups()
        if bare is not None:
            yield name, _number(bare), place
        elif message or opens:
            yield name, _OPEN, place
        elif closes:
            yield "", _CLOSE, place
        else:
            yield name, unescape(single if double is None else double), place
        place = found.end()


def _number(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def unescape(text: str) -> str:
    """A C string literal's content; a byte above 127 becomes the character of that number."""
    return _ESCAPE.sub(_unescaped, text) if "\\" in text else text


def _unescaped(found: re.Match[str]) -> str:
    octal, hexadecimal, other = found.groups()
    if octal:
        return chr(int(octal, 8) & 255)
    if hexadecimal:
        return chr(int(hexadecimal, 16))
    return _NAMED.get(other, other)


def first(message: Message, name: str, default: Any = None) -> Any:
    """The first value of a field."""
    return next((value for key, value, _ in message if key == name), default)


def every(message: Message, name: str) -> list[Any]:
    """All values of a repeated field."""
    return [value for key, value, _ in message if key == name]
