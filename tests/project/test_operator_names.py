"""No room but those that define operators names one of ATen, of the NPU or of prims."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "mla_fusion"
NAMESPACES = ("aten::", "npu::", "prims::")
# what says which operators there are, what defines them, and what prints them
MAY_NAME = (
    *("meta/", "reference/", "converters/", "ops.py", "compat.py", "tools/"),
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
