"""Where a node comes from: the module path that nodes share, and the innermost line of the
model.
"""

from __future__ import annotations

import pytest
from torch import nn
from torch.fx import Graph, Node

from mla_fusion.fx.module_path import layer, root, source


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
    frames = (
        'File "a.py", line 3, in outer\n    y = inner(x)\n  File "b.py", line 7, in inner\n    '
        "return x @ w\n"
    )
    assert source(node(trace=frames)) == "b.py:7 in inner: return x @ w"
    assert source(node()) == ""


def test_what_was_compiled_is_a_class_or_a_function() -> None:
    here, line = __file__, node.__code__.co_firstlineno
    made = Graph().call_function(print)
    frames = (
        f'File "{here}", line {line}, in attention\n    y\n  File "{here}", line 1, in norm\n    '
        "z\n"
    )
    made.meta["stack_trace"] = frames
    assert root([made]) == "attention"
    made.meta["nn_module_stack"] = {"L__self__": ("", object)}  # as torch.export has it
    assert root([made]) == "attention"
    made.meta["stack_trace"] = (
        f'File "{nn.Linear.forward.__code__.co_filename}", line {forward_line()}, in forward\n'
    )
    assert root([made]) == "Linear"


def forward_line() -> int:
    return nn.Linear.forward.__code__.co_firstlineno
