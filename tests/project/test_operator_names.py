"""One row an operator: every row of the table is complete, and no other room names an operator of
ATen, of the NPU or of prims.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mla_fusion.operators.table import ROWS, row_of

ROOT = Path(__file__).parents[2] / "mla_fusion"
NAMESPACES = ("aten::", "npu::", "prims::")
# what says which operators there are, what defines them, and what prints them
MAY_NAME = (
    *("operators/", "meta/", "reference/", "converters/", "ops.py", "compat.py", "tools/"),
    "graph/",  # where an operator is one function
)
# asks whether torch_npu defines an operator, and looks at no graph
STILL_NAMES = {"models/hf/latent_attention.py: npu::npu_sparse_flash_attention"}
# prefixes of names, which are no operator's
PREFIXES = {*NAMESPACES, "aten::as_strided"}


def strings(path: Path) -> Iterator[str]:
    """Words of every string that is no docstring."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield from node.value.split()


def test_no_other_room_names_an_operator() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {word}"
        for path in sorted(ROOT.rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(MAY_NAME)
        for word in strings(path)
        if word.startswith(NAMESPACES) and word not in PREFIXES
    }
    assert found == STILL_NAMES  # the set only shrinks


def compared(path: Path) -> Iterator[str]:
    """Words with which the word of a node, or of a call in the field, is compared."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and re.match(r"word\(|call\.word", ast.unparse(node.left)):
            for part in ast.walk(ast.Tuple(node.comparators)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_what_is_compared_is_a_word_of_the_table() -> None:
    """A name that no row has would never be met."""
    found = {word for path in ROOT.rglob("*.py") for word in compared(path)}
    assert len(found) > 5 and not found - {row.word for row in ROWS}


def test_no_operator_has_two_rows() -> None:
    names = Counter(name for row in ROWS for name in row.names)
    words = Counter(row.word for row in ROWS)
    assert not [name for each in (names, words) for name in each if each[name] > 1]


def test_every_row_is_complete() -> None:
    for row in ROWS:
        assert row.names and row.word and all(row_of(name) is row for name in row.names), row
