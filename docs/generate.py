"""Write docs/rejections.md from the table of rejection codes, with the tests that provoke them as examples.

python docs/generate.py           # write the page
python docs/generate.py --check   # exit 1 when the page is not what the table says
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from written import write

from mla_fusion.report.rejection import CODES
from mla_fusion.report.staging import REMEDIES

PAGE = Path(__file__).with_name("rejections.md")
TESTS_OF = Path(__file__).parents[1] / "tests"

INTRODUCTION = """\
# Why a prologue was not fused

Every prologue that the pass recognises, wholly or in part, is either fused or listed in `Report.rejected` with one
of these codes. Codes are stable: tests and `Config.skip` may name them. The message in the report adds the dims and
the nodes concerned. A code may carry a part after a colon that says more: `contract:dims.he` is the check `dims.he`
of the operator's contract ([operator.md](operator.md)).

Each code has an example: the smallest change to a plain prologue that gets it, cut from the tests that run it. `Base`
is that prologue ([base.py](../tests/catalogue/base.py)), with a method for every step; `Full`, `Partial`
([int8.py](../tests/catalogue/int8.py)) and `OperatorCache` ([int8_caches.py](../tests/catalogue/int8_caches.py))
are int8 ones. `Lite` ([keys.py](../tests/catalogue/keys.py)) has no query latent, and is read under
`Config(targets=("key",))`; `Static` ([static.py](../tests/catalogue/static.py)) is in static W8A8, under
`Config(targets=("preprocess",))`.

Generated from `mla_fusion/report/rejection.py` by `docs/generate.py`; do not edit.
"""
# where examples are looked for: first the near misses, by the code they are entered with, then tests that name the code
_MISSES = "misses_norms misses_products misses_rotations misses_writes int8_misses misses_keys static"
_REFUSALS = "plan/test_refusals commit/test_refusals match/test_finder emit/test_contract entry/test_entry"
MODELS = [f"catalogue/{name}.py" for name in _MISSES.split()]
TESTS = [f"{name}.py" for name in _REFUSALS.split()]


@cache
def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *sections(), *staged()])


def staged() -> Iterator[str]:
    """What stands between a staged fusion and a write in place."""
    yield "## Why a fusion is staged\n"
    yield "These codes reject nothing: `Fusion.staged_by` lists them with a message and the remedy.\n"
    yield "| code | to write in place |\n| --- | --- |"
    yield from (f"| `{code}` | {remedy} |" for code, remedy in REMEDIES.items())
    yield ""


def examples() -> dict[str, str]:
    """Source text by code, the first one that is found."""
    found: dict[str, str] = {}
    for name in (*MODELS, *TESTS):
        text = (TESTS_OF / name).read_text()
        statements = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef))
        definitions = {node.name: node for node in statements}
        for code, definition in _listed(text) if name in MODELS else _named(text, definitions.values()):
            source = ast.get_source_segment(text, definitions[definition])
            assert source is not None
            found.setdefault(code, source)
    return found


def _listed(text: str) -> Iterator[tuple[str, str]]:
    """(code, class) of every class under ``@miss(code, ..)``; those that are compiled and run are no minimal ones."""
    for node in ast.parse(text).body:
        for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            assert isinstance(mark, ast.Call) and isinstance(node, ast.ClassDef)
            tags = next(keyword.value.value for keyword in mark.keywords if keyword.arg == "tags")
            if ast.unparse(mark.func) == "miss" and "run" not in tags.split(", "):
                yield mark.args[0].value, node.name


def _named(text: str, definitions: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(code, function) of every test whose text holds a code."""
    for node in definitions:
        source = ast.get_source_segment(text, node) or ""
        for code in CODES:
            if isinstance(node, ast.FunctionDef) and (f'"{code}"' in source or f'"{code}:' in source):
                yield code, node.name


def sections() -> Iterator[str]:
    """One table for each family of codes: what stands before the dot; then their examples."""
    sources = examples()
    for family, group in groupby(CODES, key=lambda code: code.partition(".")[0]):
        codes = list(group)
        yield f"## {family}\n"
        yield "| code | what it means | what would make it fuse |"
        yield "| --- | --- | --- |"
        for code in codes:
            yield "| " + " | ".join((f"`{code}`", *(text.replace("|", "\\|") for text in CODES[code]))) + " |"
        yield ""
        for code in codes:
            yield f"`{code}`:\n\n```python\n{sources[code]}\n```\n"


def main(arguments: Sequence[str]) -> int:
    return write({PAGE: page()}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
