"""The code and commands that a page shows, run as they stand, in order, in one folder."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mla_fusion as mf
from mla_fusion.releases import RELEASES
from mla_fusion.tools import cli
from tests.project.pages import DOCS

ROOT = DOCS.parent
_BLOCK = re.compile(
    r"^```(?P<kind>\w*)(?: "
    r'title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
_COMMAND_OF_AN_INDENTED_BLOCK = re.compile(
    r"^    (?:mla-fusion|pip|make|python|torchrun) "
    r".*",
    re.MULTILINE,
)
ON_AN_NPU = "on an NPU"
# What differs from one processor or run to the next.
_VARYING = [
    (r"in \d+ ms", "in .. ms"),
    (r"\b\d\.\de-\d\d\b", "..e-.."),
    (r"(?<=at )\S*/(?=\w+\.py:)", ""),
]


@dataclass(frozen=True)
class Block:
    """A fenced block. ``kind``: python, sh, text (the block before prints it), or not run."""

    page: str
    line: int
    kind: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order. A command in an indented block fails: it would not be run."""
    text = page.read_text(encoding="utf-8")
    assert not (stray := _COMMAND_OF_AN_INDENTED_BLOCK.findall(_BLOCK.sub("", text))), (
        f"{page.name}: {stray}"
    )
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start()) + 1,
            found["kind"],
            found["title"] or "",
            found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    """Run a page. What stands in a ``text`` block must be what the block before it printed."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        where = f"{block.page}:{block.line}"
        if block.kind == "text":
            assert settled(printed) == settled(block.text), f"{where}: printed\n{printed}"
        elif block.kind in ("python", "sh"):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                _python(block, where, scope) if block.kind == "python" else _shell(block, where)
            printed = output.getvalue()
        else:
            assert block.kind in ("", "diff"), f"{where}: a block of kind {block.kind!r} is not run"


def settled(text: str) -> str:
    """The text with what varies taken out."""
    for pattern, instead in _VARYING:
        text = re.sub(pattern, instead, text)
    return text


def _python(block: Block, where: str, scope: dict[str, Any]) -> None:
    source = "\n" * block.line + block.text
    code = compile(source, where, "exec")
    # as of a file
    linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
    if block.title != ON_AN_NPU:
        exec(code, scope)
        return
    # as far as the device, which says where that is
    with pytest.raises(mf.offline.NpuNotAvailable):
        exec(code, scope)


def _shell(block: Block, where: str) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        command, _, remark = line.partition(" #")
        match shlex.split(command):
            case []:
                pass
            case ["mla-fusion", *arguments] if block.title == ON_AN_NPU:
                cli.parser().parse_args(arguments)
            case ["mla-fusion", *arguments]:
                expected = int(found[1]) if (found := re.search(r"exit status (\d)", remark)) else 0
                assert cli.main(arguments) == expected, f"{where}: {command}"
            case ["python", "-m", module]:
                assert (ROOT / "examples" / f"{module.rpartition('.')[2]}.py").is_file(), (
                    f"{where}: {command}"
                )
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                    f"{where}: {command}"
                )
            case (
                ["git", "clone", "$REPOSITORY", _]
                | ["cd", _]
                | ["python3", "-m", "venv", _]
                | [".", _]
            ):
                pass  # the clone and the environment that this test runs in
            case ["pip", "install", *wanted]:
                for item in wanted:
                    _installable(item, where)
            case _:
                raise AssertionError(f"{where}: nothing here runs {command!r}")


def _installable(item: str, where: str) -> None:
    """A release of the table, or this project with extras that it has
    (tests/project/test_install.py resolves them).
    """
    name, _, version = item.partition("==")
    if version:
        pairs = {
            release.torch_npu: release.torch.partition("+")[0]
            for release in RELEASES
            if release.tested
        }
        assert version in (pairs if name == "torch_npu" else pairs.values()), f"{where}: {item}"
        return
    extras = re.fullmatch(r"(?:\.|mla-fusion)(?:\[([\w,]+)\])?", name)
    assert extras, f"{where}: {item}"
    project = (ROOT / "pyproject.toml").read_text()
    for extra in (extras[1] or "").split(","):
        assert not extra or re.search(rf"^{extra} = \[", project, re.MULTILINE), f"{where}: {item}"
