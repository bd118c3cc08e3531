"""Private names of torch, torch_npu and torchair stand in ``mla_fusion/compat.py`` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("mla_fusion", "meta", "converters")
BRIDGES = ("compile/torchair_bridge.py", "compile/inductor_bridge.py", "compile/offline/")
APART = ("compat.py", "modes.py", "_autoload.py", *BRIDGES)  # as compat.py says
PRIVATE = re.compile(
    r"(torch|torch_npu|torchair|npugraph_ex)(\.\w+)*\.(_(?!_)\w*|fx\.experimental)(\.\w+)*"
)
OPERATORS = re.compile(r"torch\.ops\b")  # aten._to_copy is an operator like any other
ATTRIBUTES = frozenset(
    """
    _cdata _codegen _converters _destroy _dynamo_dynamic_indices _dynamo_static_input_type
    _ge_converter _is_view _op _opname _overloadname _overloadpacket _qualified_op_name _schema
    _tracing_cls _version backed_var_to_val bound_sympy grapharg py_kernels shape_env var_to_range
    var_to_val
    """.split()
)


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found = [above + alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [
                _dotted(node),
                node.attr if node.attr in ATTRIBUTES and not _is_own(node) else "",
            ]
        # for import_module, getattr and hasattr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value, node.value if node.value in ATTRIBUTES else ""]
        else:
            continue
        for name in found:
            of_torch = PRIVATE.fullmatch(name) is not None and not OPERATORS.match(name)
            if of_torch or name in ATTRIBUTES or name.endswith("node.expr"):
                yield node.lineno, name


def _dotted(node: ast.expr) -> str:
    """``a.b.c``, as far as it is one; a call or an index in it is "?"."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_nobody_but_compat_touches_a_private_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.relative_to(ROOT / folder).as_posix().startswith(APART)
        for line, name in private_names(path.read_text())
    ]
    assert not found, "\n".join(found)
