"""Protobuf text, read without protobuf and without a schema.

A message is a list of (field, value, line) in file order; a value is a number, a bool, a string, an
enum's name, or a message.
"""

from __future__ import annotations

import re
from typing import Any

from mla_fusion.tools.dumps.model import DumpError

Field = tuple[str, Any, int]
Message = list[Field]

_VALUE = r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([-+.\w]+))"""
# no two \s* side by side: linear
_LINE = re.compile(rf"\s*(?:(\w+)\s*(?::\s*(?:{_VALUE}|(\{{))|(\{{))|(\}}))")
_REST = re.compile(r"\s*[;,]?\s*(?:#.*\s*)?")
_DEPTH = 64


def parse(text: str) -> Message:
    """The fields of a message. Raises DumpError, without a path, for anything but protobuf
    text.
    """
    whole: Message = []
    stack: list[Field] = [("", whole, 1)]
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        place = 0
        while True:
            rest = _REST.match(line, place)
            place = rest.end() if rest else place
            if place >= len(line):
                break
            found = _LINE.match(line, place)
            if found is None:
                raise DumpError(f"not protobuf text: {line[place : place + 40].strip()!r}", number)
            name, double, single, bare, message, opens, closes = found.groups()
            place = found.end()
            if closes:
                stack.pop()
                if not stack:
                    raise DumpError("a '}' without its '{'", number)
                continue
            value: Any = []
            if bare is not None:
                value = _number(bare)
            elif not (message or opens):
                try:
                    value = _unescaped(single if double is None else double)
                except ValueError as error:
                    raise DumpError(f"a damaged text: {error}", number) from None
            stack[-1][1].append((name, value, number))
            if message or opens:
                stack.append((name, value, number))
            if len(stack) > _DEPTH:
                raise DumpError("messages nest too deeply", number)
    if len(stack) > 1:
        name, _, opened = stack[-1]
        raise DumpError(f"the file ends inside {name!r} of line {opened}: truncated", number)
    return whole


def _number(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _unescaped(text: str) -> str:
    """A C string literal's content; a byte above 127 becomes the character of that number."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


def first(message: Message, name: str, default: Any = None) -> Any:
    """The first value of a field."""
    return next((value for key, value, _ in message if key == name), default)


def every(message: Message, name: str) -> list[Any]:
    """All values of a repeated field."""
    return [value for key, value, _ in message if key == name]
