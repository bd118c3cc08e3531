"""Where a node comes from: the module path that nodes share, and the innermost line of the model."""

from __future__ import annotations

import pytest
from torch.fx import Graph, Node

from mla_fusion.fx.module_path import layer, source


def node(path: str = "", trace: str = "") -> Node:
    made = Graph().placeholder("x")
    if path:
        made.meta["nn_module_stack"] = {"outer": ("L['self']", object), "inner": (path, object)}
    made.meta["stack_trace"] = trace
    return made


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("L['self'].layers.3.self_attn", "layers.3.self_attn"),
        ("L['self'].layers[3].self_attn", "layers.3.self_attn"),
        ("L['self']._modules['layers']._modules['3'].self_attn", "layers.3.self_attn"),
        ("model.layers.0", "model.layers.0"),
        ("L['self']", ""),
    ],
)
def test_a_path_as_the_model_writes_it(path: str, plain: str) -> None:
    assert layer([node(path)]) == plain


def test_what_nodes_share() -> None:
    nodes = [node(f"L['self'].layers.3.attn.{name}") for name in ("q_proj", "kv_proj")]
    assert layer([*nodes, node()]) == "layers.3.attn"
    assert layer([*nodes, node("L['self'].layers.4.attn.q_proj")]) == "layers"
    assert layer([node()]) == layer([]) == ""


def test_the_innermost_line() -> None:
    frames = 'File "a.py", line 3, in outer\n    y = inner(x)\n  File "b.py", line 7, in inner\n    return x @ w\n'
    assert source(node(trace=frames)) == "b.py:7 in inner: return x @ w"
    assert source(node()) == ""
